"""Compare the code of kernels between two checkouts: what compiles to the same text is the same.

python tools/gpu/compare_code.py dump before.json                 # every Triton call, for sm_90
python tools/gpu/compare_code.py dump before.json d128 lists --targets sm_80 gfx942
python tools/gpu/compare_code.py dump before.json --small         # small calls of every code path
python tools/gpu/compare_code.py dump before.json --mosaic        # Hopper's kernels; JAX >= 0.11
python tools/gpu/compare_code.py dump before.json d128 --text before  # and the code as files
python tools/gpu/compare_code.py compare before.json after.json

``dump`` traces calls as users write them and records for every launch, in program order, its grid,
its parameters, and a hash of the code: PTX (or AMD's assembly), or the MLIR module of a Mosaic
kernel. Names of kernels, labels, debug information and comments are left out of the code, so that
renaming changes nothing. Dumps into one file add up. Needs no GPU; a launch takes about a second.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checkout

checkout.use()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from ejkernel.kernels import triton  # noqa: E402
from ejkernel.kernels.triton.bound_launch import In, Out, TensorMap, leaves  # noqa: E402
from ejkernel.kernels.triton.bridge import specialize  # noqa: E402
from ejkernel.kernels.triton.compiled import CONSTANT, compile_stages  # noqa: E402
from ejkernel.kernels.triton.resources import launch_source  # noqa: E402
from ejkernel.kernels.triton.targets import Target, compile_for  # noqa: E402
from ejktest import triton_calls  # noqa: E402
from ejktest.abstract import AbstractCall  # noqa: E402
from ejktest.ahead import as_finished  # noqa: E402
from ejktest.device import H200, on  # noqa: E402
from ejktest.operand_dtypes import dtype_cases  # noqa: E402

checkout.register()  # a composed kernel asks for the kernels of other packages

Launches = list[dict[str, Any]]
Texts = list[str]

# ---- Triton -----------------------------------------------------------------------------------


def normalized_ptx(text: str) -> str:
    """Returns PTX without comments, debug information and the kernel's name."""
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"^\s*\.section\s+\.debug\w*\s*\{.*?\}", "", text, flags=re.M | re.S)
    text = re.sub(r"^\s*\.(file|loc)\b.*$", "", text, flags=re.M)
    text = re.sub(r"^\s*\$L__(tmp|func_begin|func_end|info_string)\w*:.*$", "", text, flags=re.M)
    return _without_names(text, re.findall(r"\.entry\s+([\w$]+)", text))


def normalized_amdgcn(text: str) -> str:
    """Returns AMD's assembly without comments, debug information and the kernel's name."""
    names = re.findall(r"\.amdhsa_kernel\s+([\w$]+)", text)
    text = text.partition(".amdgpu_metadata")[0].partition("\t.section\t.debug")[0]
    text = re.sub(r";[^\n]*", "", text)
    text = re.sub(r"^\s*\.(file|loc|ident|cfi\w*)\b.*$", "", text, flags=re.M)
    text = re.sub(r"^\.L(tmp|func_begin|func_end)\d+:.*$", "", text, flags=re.M)
    return _without_names(text, names)


def _without_names(text: str, names: list[str]) -> str:
    for number, name in enumerate(names):
        text = re.sub(rf"\b{re.escape(name)}(?![a-zA-Z0-9$])", f"kernel{number}", text)
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def code_of(source: Any, target: Target) -> tuple[str, dict[str, Any]]:
    """Compiles one specialisation; returns its normalized code and the compiler's metadata."""
    if target.platform == "cuda":
        outputs, metadata = compile_stages(source, target, "ptx")
        return normalized_ptx(outputs["ptx"]), metadata
    outputs, metadata = compile_stages(source, target, "amdgcn")
    return normalized_amdgcn(outputs["amdgcn"]), metadata


def parameters_of(launch: Any, source: Any, avals: list[Any], outs: Any) -> list[str]:
    """Describes every parameter that a launch passes, in order, without the names."""
    described = []
    values = {**launch.arguments, **launch.constants}
    for name, kinds in source.signature:
        for value, kind in zip(leaves(values[name]), leaves(kinds), strict=True):
            if kind == CONSTANT:
                continue
            if isinstance(value, (In, Out, TensorMap)):
                written = isinstance(value, Out) or getattr(value, "result", False)
                aval = (outs if written else avals)[value.index]
                array = f"{'result' if written else 'operand'} {aval.dtype}{list(aval.shape)}"
                described.append(f"{array} {kind}")
                if isinstance(value, TensorMap):
                    described[-1] += f" {value.shape} {value.strides} {value.block}"
            else:
                described.append(f"{kind} {value!r}")
    return described


def triton_launches(programs: Any, target: Target) -> tuple[Launches, Texts]:
    """Compiles the launches of a program, (launch, operand types) each."""
    launches, texts = [], []
    compiled: dict[Any, tuple[str, dict[str, Any]]] = {}
    for described, avals in programs:
        launch, outs = described.bind(target), described.result_types()
        source = specialize(launch, avals, outs)
        if source not in compiled:
            compiled[source] = code_of(source, target)
        text, metadata = compiled[source]
        texts.append(text)
        launches.append(
            {
                "kernel": launch.kernel.__name__,
                "code": hashlib.sha256(text.encode()).hexdigest()[:16],
                "grid": [int(n) for n in launch.grid],
                "warps": int(metadata["num_warps"]),
                "shared": int(metadata["shared"]),
                "parameters": parameters_of(launch, source, avals, outs),
                "aliases": sorted(launch.aliases.values()),
            }
        )
    return launches, texts


def triton_case(call: str, target: str) -> tuple[Launches, Texts]:
    """The launches of a call of ``ejktest.triton_calls``."""
    programs = triton_calls.launches(call, target).values()
    return triton_launches(programs, triton_calls.TARGETS[target])


def small_cases() -> Iterator[tuple[str, AbstractCall]]:
    """Small calls by name: every operand of every operation in every dtype, on each path."""
    for entry in triton.PACKAGE.entries:
        if entry.public == "ring_attention":  # flash attention's kernels, over a mesh axis
            continue
        kernel: Any = triton.PACKAGE.load(entry)
        for number, case in enumerate(dtype_cases(kernel.call)):
            yield f"{entry.public} {number} {case.operand} {case.dtype}", case.called


def small_operation(operation: str) -> dict[str, tuple[Launches, Texts]]:
    """The launches of all small calls of an operation, those that differ from one before."""
    target, by_call, seen = triton_calls.TARGETS["sm_90"], {}, set()
    for name, called in small_cases():
        if called.operation != operation:
            continue
        wide = any(np.dtype(dtype).itemsize == 8 for _, dtype in called.arrays.values())
        with jax.enable_x64(wide), compile_for(target):
            program = _traced(called)
        if isinstance(program, str):
            by_call[name] = [{"kernel": "none", "refused": program}], [program]
            continue
        programs = triton_calls.launches_of(program, target).values()
        sources = tuple(
            (launch_source(launch, avals, target), launch.bind(target).grid)
            for launch, avals in programs
        )
        if sources not in seen:
            seen.add(sources)
            by_call[name] = triton_launches(programs, target)
    return by_call


def _traced(called: AbstractCall) -> Any:
    """The program of a call with its gradients, without where it has none, or why it is refused."""
    smooth = tuple(
        name
        for name, (_, dtype) in called.arrays.items()
        if jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize > 1
    )
    reason = ""
    for differentiated in (smooth, ()):
        c = replace(called, gradients=differentiated)
        run = c.backward(triton) if differentiated else c.forward(triton)
        try:
            return jax.make_jaxpr(run)(*c.shapes())
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return reason


# ---- Mosaic GPU -------------------------------------------------------------------------------


def normalized_module(module: Any) -> str:
    """Returns a printed MLIR module without locations and names of symbols."""
    text = module.operation.get_asm(enable_debug_info=False, use_local_scope=True)
    for number, name in enumerate(dict.fromkeys(re.findall(r"@([\w.$-]+)", text))):
        text = re.sub(rf"@{re.escape(name)}(?![\w.$-])", f"@symbol{number}", text)
    return re.sub(r'mosaic_gpu\.dump_basename = "[^"]*",? ?', "", text)


def mosaic_case(call: str) -> tuple[Launches, Texts]:
    """The Mosaic kernels of a call of ``ejktest.triton_calls`` on an H200."""
    from jax.experimental.mosaic.gpu import core
    from jax.interpreters import mlir

    from ejkernel.kernels import pallas
    from ejkernel.kernels.triton import bridge

    def zeros(context: Any, *operands: Any, **params: Any) -> Any:
        """Stands in for Triton's part of a call, whose code is compared by itself."""
        make = lambda *_: [jnp.zeros(x.shape, x.dtype) for x in context.avals_out]  # noqa: E731
        return mlir.lower_fun(make, multiple_results=True)(context, *operands)

    texts: Texts = []
    lower = core._run_serde_pass

    def recorded(module: Any, **options: Any) -> Any:
        texts.append(normalized_module(module))
        return lower(module, **options)

    c = triton_calls.CALLS[call]
    run = c.backward(hopper_package(pallas)) if c.gradients else c.forward(hopper_package(pallas))
    mlir.register_lowering(bridge._primitive, zeros, platform="cuda")
    with on(H200), mock.patch.object(core, "_run_serde_pass", recorded):
        try:
            jax.jit(run).trace(*c.shapes()).lower(lowering_platforms=("cuda",))
        except Exception as error:
            texts = [f"{type(error).__name__}: {error}".splitlines()[0]]
            return [{"kernel": "none", "refused": texts[0]}], texts
    launches = [
        {"kernel": "mosaic", "code": hashlib.sha256(t.encode()).hexdigest()[:16]} for t in texts
    ]
    return launches, texts


def hopper_package(package: Any) -> Any:
    """The package's kernels for Hopper by the names of their operations."""
    entries = {entry.public: entry for entry in package.PACKAGE.entries if entry.backend == "gpu"}

    class Hopper:
        def __getattr__(self, name: str) -> Any:
            if name not in entries:
                raise NotImplementedError(f"{name}: no kernel for Hopper")
            return package.PACKAGE.load(entries[name])

    return Hopper()


# ---- the command ------------------------------------------------------------------------------


def dump(options: argparse.Namespace) -> None:
    if options.small:
        operations = dict.fromkeys(called.operation for _, called in small_cases())
        jobs = {o: (small_operation, o) for o in operations if o in (options.calls or [o])}
    elif options.mosaic:
        calls = options.calls or list(triton_calls.CALLS)
        jobs = {f"{call} @ mosaic": (mosaic_case, call) for call in calls}
    else:
        cases = triton_calls.cases()
        jobs = {
            f"{call} @ {target}": (triton_case, call, target)
            for call, target in cases
            if target in options.targets and call in (options.calls or [call])
        }
    names, failed = list(jobs), {}
    rows = json.loads(options.out.read_text()) if options.out.exists() else {}
    for done, (number, result) in enumerate(as_finished(jobs.values(), options.jobs), 1):
        name = names[number]
        print(f"{done}/{len(names)} {name}", flush=True)
        if isinstance(result, str):
            failed[name] = result
            continue
        for case, (launches, texts) in (
            result.items() if isinstance(result, dict) else [(name, result)]
        ):
            rows[case] = launches
            if options.text:
                write_texts(options.text, case, launches, texts)
        options.out.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    if failed:
        sys.exit(f"{len(failed)} failed: {failed}")


def write_texts(folder: Path, case: str, launches: Launches, texts: Texts) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, (launch, text) in enumerate(zip(launches, texts, strict=True)):
        name = re.sub(r"[^\w.+-]+", "_", f"{case} {number} {launch['kernel']}")
        (folder / f"{name}.txt").write_text(text)


def differences(before: Launches, after: Launches) -> Iterator[str]:
    """Yields a line for every launch of a case that changed; names of kernels may change."""
    if len(before) != len(after):
        kernels = [[launch["kernel"] for launch in launches] for launches in (before, after)]
        yield f"{len(before)} launches, now {len(after)}: {kernels[0]} {kernels[1]}"
        return
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        for key in dict.fromkeys((*old, *new)):
            if key != "kernel" and old.get(key) != new.get(key):
                change = "" if key == "code" else f" {old.get(key)} -> {new.get(key)}"
                yield f"launch {number}, {old['kernel']} -> {new['kernel']}: {key}{change}"


def compare(options: argparse.Namespace) -> None:
    before, after = (json.loads(path.read_text()) for path in (options.before, options.after))
    both = [case for case in before if case in after]
    count, changed, refused = 0, set(), []
    for case in both:
        count += len(before[case])
        if any("refused" in launch for launch in after[case]):
            refused.append(case)
        for line in differences(before[case], after[case]):
            changed.add((case, line.partition(":")[0]))
            print(f"{case}: {line}")
    print(f"{len(both)} calls, {count} launches compared: {len(changed)} differ")
    if refused:
        print(f"refused, so nothing is compared: {', '.join(refused)}")
    for name, cases in (("before", before.keys() - after), ("after", after.keys() - before)):
        if cases:
            print(f"only {name}: {', '.join(sorted(cases))}")
    sys.exit(bool(changed))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    make = commands.add_parser("dump")
    make.add_argument("out", type=Path)
    make.add_argument("calls", nargs="*", help="names in ejktest.triton_calls; none: all")
    make.add_argument("--targets", nargs="+", default=["sm_90"], choices=triton_calls.TARGETS)
    make.add_argument("--small", action="store_true", help="small calls; names are operations")
    make.add_argument("--mosaic", action="store_true")
    make.add_argument("--text", type=Path, help="folder for the code of every launch")
    make.add_argument("--jobs", type=int, default=1, help="processes")
    make.set_defaults(run=dump)
    check = commands.add_parser("compare")
    check.add_argument("before", type=Path)
    check.add_argument("after", type=Path)
    check.set_defaults(run=compare)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
