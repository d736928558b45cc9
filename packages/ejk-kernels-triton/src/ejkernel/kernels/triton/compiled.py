"""Triton source to launchable code, with a cache in memory and on disk.

The key is everything that decides the code: the source of the kernel and of all it calls
(Triton's own hash), types and alignment of its arguments, constants, options, architecture,
and the version of Triton. Entries are single files written next to the target and renamed into
place, so any number of processes may share the directory; an unreadable entry is a miss.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
import threading
from dataclasses import asdict, dataclass
from typing import Any

from ejkernel.kernels.triton.targets import Target
from ejkernel.ops import env
from ejkernel.ops.utils.files import parse_json, read_text, replace_text

SCHEMA = 1
CONSTANT = "constexpr"  # Triton's type of a compile-time constant
# a parameter, or (parameter, index of a field, index of a field of that, ...)
ParameterPath = str | tuple[Any, ...]

# Triton's frontend and its interpreter keep state in Python modules: one of them at a time. The
# passes after the frontend, four fifths of the work, run side by side.
TRITON_LOCK = threading.RLock()


class OutOfSharedMemory(RuntimeError):
    """A configuration needs more shared memory than the device has."""


@dataclass(frozen=True)
class Source:
    """One specialisation of a kernel.

    Attributes:
        kernel: a ``triton.jit`` (or Gluon) function.
        signature: parameter name to Triton type (``"*bf16"``, ``"i32"``, ``CONSTANT``), or to the
            group of its fields' types.
        constants: path to value of every ``CONSTANT``.
        aligned: paths of pointers and integers that are multiples of 16.
        options: compiler options (``num_warps``, ``num_stages``, ``maxnreg``).
    """

    kernel: Any
    signature: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[ParameterPath, Any], ...]
    aligned: tuple[ParameterPath, ...]
    options: tuple[tuple[str, Any], ...]

    def ast(self):
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

        names = list(self.kernel.arg_names)

        def path(parameter: ParameterPath) -> tuple[int, ...]:
            name, *fields = (parameter,) if isinstance(parameter, str) else parameter
            return (names.index(name), *fields)

        constants = {path(parameter): value for parameter, value in self.constants}
        attrs = {path(parameter): [["tt.divisibility", 16]] for parameter in self.aligned}
        make = GluonASTSource if isinstance(self.kernel, GluonJITFunction) else ASTSource
        return make(self.kernel, dict(self.signature), constants, attrs)


@dataclass(frozen=True)
class Code:
    """Compiled code and what a launch needs to know of it."""

    name: str
    text: str  # PTX; on ROCm the hex of the code object
    num_warps: int  # of a launch: more than asked for when warps are specialised
    shared: int
    scratch: int
    scratch_align: int
    tensor_maps: tuple[dict, ...]


CODES_LIMIT = 1024
"""Compiled kernels held in memory; the oldest is dropped first, the disk keeps it."""

_memory: dict[str, Code] = {}
_lock = threading.Lock()
_making: dict[str, threading.Lock] = {}  # by key: who compiles it, others wait


def cache_directory() -> pathlib.Path:
    """``$EJKERNEL_CACHE_DIR/triton`` (default ``~/.cache/ejkernel/triton``)."""
    return env.cache_dir() / "triton"


def _options(source: Source, target: Target) -> dict[str, Any]:
    options = dict(source.options)
    options["enable_fp_fusion"] = True
    if target.platform == "cuda" and int(target.arch) < 100:
        # readable by every CUDA 12.8 or newer, not only by the one bundled with Triton
        options["ptx_version"] = 87
    return options


def _gpu_target(target: Target):
    from triton.backends.compiler import GPUTarget

    if target.platform == "cuda":
        return GPUTarget("cuda", int(target.arch), 32)
    return GPUTarget("hip", str(target.arch), target.warp_size)


def cache_key(source: Source, target: Target) -> str:
    """Hex digest of everything that decides the compiled code."""
    import triton

    parts = [
        str(SCHEMA),
        triton.__version__,
        target.platform,
        str(target.arch),
        source.ast().hash(),
        repr(sorted(_options(source, target).items())),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def compile_stages(source: Source, target: Target, last: str | None = None) -> tuple[dict, dict]:
    """Runs the compiler and returns the text of every stage, and the metadata.

    ``last`` names the stage to stop after: ``"source"`` (the front end, which checks types and
    has no text), ``"ptx"``, ``"cubin"``, ``"hsaco"``...
    """
    import triton
    from triton._C.libtriton import ir

    with TRITON_LOCK:
        gpu = _gpu_target(target)
        backend = triton.compiler.make_backend(gpu)
        ast = source.ast()
        options = backend.parse_options(_options(source, target))
        metadata: dict[str, Any] = {"target": gpu, **options.__dict__}
        plan: dict[str, Any] = {}
        backend.add_stages(plan, options, ast.language)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        module = ast.make_ir(
            gpu,
            options,
            backend.get_codegen_implementation(options),
            backend.get_module_map(),
            context,
        )
    outputs: dict[str, Any] = {}
    if last == "source":
        return outputs, metadata
    for name, step in plan.items():
        module = step(module, metadata)
        outputs[name] = module if isinstance(module, (str, bytes)) else str(module)
        if name == last:
            break
    return outputs, metadata


def _compile(source: Source, target: Target) -> Code:
    last = "ptx" if target.platform == "cuda" else "hsaco"
    outputs, metadata = compile_stages(source, target, last)
    binary = outputs[last]
    return Code(
        name=metadata["name"],
        text=binary if isinstance(binary, str) else binary.hex(),
        num_warps=int(metadata["num_warps"]),
        shared=int(metadata["shared"]),
        scratch=int(metadata.get("global_scratch_size") or 0),
        scratch_align=int(metadata.get("global_scratch_align") or 1),
        tensor_maps=tuple(dict(m) for m in metadata.get("tensordesc_meta") or ()),
    )


_FIELDS = {"name": str, "text": str, "tensor_maps": list} | dict.fromkeys(
    ("num_warps", "shared", "scratch", "scratch_align"), int
)


def _read(path: pathlib.Path) -> Code | None:
    try:
        fields = parse_json(read_text(path))
    except (OSError, ValueError):
        return None
    if not isinstance(fields, dict) or {n: type(x) for n, x in fields.items()} != _FIELDS:
        return None
    if not all(isinstance(m, dict) for m in fields["tensor_maps"]):
        return None
    return Code(**{**fields, "tensor_maps": tuple(fields["tensor_maps"])})


def _write(path: pathlib.Path, code: Code) -> None:
    # a read-only or full disk costs time, not correctness
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(asdict(code)))


def _load_or_compile(key: str, source: Source, target: Target) -> Code:
    try:
        path = cache_directory() / key[:2] / f"{key}.json"
    except OSError:  # no home directory: kept for the process
        path = None
    code = None if path is None else _read(path)
    if code is None:
        code = _compile(source, target)
        if path is not None:
            _write(path, code)
    with _lock:
        _memory[key] = code
        while len(_memory) > CODES_LIMIT:
            del _memory[next(iter(_memory))]
        _making.pop(key, None)
    return code


def compile_kernel(source: Source, target: Target) -> Code:
    """The code of ``source`` for ``target``: from memory, from disk, or compiled now.

    Raises:
        OutOfSharedMemory: the code needs more than ``target.shared_limit`` bytes.
    """
    key = cache_key(source, target)
    code = _memory.get(key)
    if code is None:
        with _lock:
            making = _making.setdefault(key, threading.Lock())
        with making:
            code = _memory.get(key) or _load_or_compile(key, source, target)
    if code.shared > target.shared_limit:
        raise OutOfSharedMemory(
            f"{code.name}: needs {code.shared} bytes of shared memory, {target.name} has "
            f"{target.shared_limit}; use smaller blocks or fewer stages"
        )
    return code


def clear_memory_cache() -> None:
    """Forget compiled code held by this process (the disk keeps it)."""
    with _lock:
        _memory.clear()
