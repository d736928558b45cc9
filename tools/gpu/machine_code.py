"""Compile Hopper's kernels to machine code without a GPU: registers, spills, serialized matmuls.

    python tools/gpu/machine_code.py flash_attention --cases 'sweep-d128-s4096-*' --pass bwd
    python tools/gpu/machine_code.py flash_attention --cases option-window1024 --pass bwd \\
        --set bwd.pipelined=0,bwd.dq_stages=1 --loops --keep /tmp/code

Cases are listed by ``ejk shapes OPERATION``; ``--set`` changes fields of the tiles as ``--try`` of
``sweep.py`` does. A row of the table is a kernel. "serialized" names the notes of ptxas by which it
waits for every matmul before the next (C7510 to C7519): such a kernel takes 25% more time, and
nothing else says so. ``--loops`` prints the order of instructions of the innermost loops with
matmuls: H matmul, E special function, m multiplication, a addition, f both, c conversion, W wait
for matmuls, S barrier, B branch, L and T reads and writes of spilled registers, a point any other.
Exponentials in one row, behind all multiplications, leave the other units idle.

Needs JAX 0.11 or newer with the wheels ``jax-cuda13-plugin``, ``jax-cuda13-pjrt``,
``nvidia-cuda-nvcc`` and ``nvidia-nvvm``, and a C compiler for a library that stands in for the
driver; ``--loops`` needs ``nvdisasm``, which Triton's wheel has.
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checkout

checkout.use()

ATTRIBUTES = {75: 9, 76: 0, 16: 132, 97: 232448}  # capability 9.0, multiprocessors, shared memory
DRIVER = """
#define RETURN_OK(name) int name() { return 0; }
RETURN_OK(cuInit) RETURN_OK(cuCtxSetCurrent) RETURN_OK(cuFuncSetAttribute)
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *d, int n) { *d = 0; return 0; }
int cuCtxGetDevice(int *d) { *d = 0; return 0; }
int cuCtxGetCurrent(void **c) { *c = (void *)8; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)8; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { switch (a) { ANSWERS default: *v = 1; } return 0; }
int cuModuleLoadData(void **m, const void *image) { *m = (void *)8; return 0; }
int cuModuleGetFunction(void **f, void *m, const char *name) { *f = (void *)8; return 0; }
""".replace("ANSWERS", " ".join(f"case {a}: *v = {v}; break;" for a, v in ATTRIBUTES.items()))
SYMBOLS = {
    "HGMMA": "H", "QGMMA": "H", "MUFU": "E", "FMUL": "m", "FADD": "a", "FFMA": "f", "F2FP": "c",
    "WARPGROUP": "W", "SYNCS": "S", "BAR": "S", "BRA": "B", "LDL": "L", "STL": "T",
}  # fmt: skip


def cuda_folder() -> Path:
    """Returns the folder of CUDA 13's compilers among the installed wheels."""
    packages = importlib.util.find_spec("nvidia")
    for folder in (packages and packages.submodule_search_locations) or ():
        if (Path(folder) / "cu13" / "bin" / "ptxas").exists():
            return Path(folder) / "cu13"
    raise SystemExit(
        "needs wheels: pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm"
    )


def compiler(folder: Path) -> Any:
    """Returns the function of JAX's plugin that compiles a kernel, with a stand-in for a driver."""
    if (cc := shutil.which("cc")) is None:
        raise SystemExit("needs a C compiler, cc")
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(DRIVER)
    name = f"-Wl,-soname,{library.name}"
    subprocess.run([cc, "-w", "-shared", "-fPIC", name, "-o", library, source], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    spec = importlib.util.find_spec("jax_plugins.xla_cuda13")
    if spec is None or spec.origin is None:
        raise SystemExit("needs the wheel jax-cuda13-pjrt")
    (plugin,) = Path(spec.origin).parent.glob("*.so")
    function = ctypes.CDLL(str(plugin)).MosaicGpuCompile
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_size_t]
    return function


def lowered_kernels(
    operation: str, cases: str, pass_name: str, values: dict[str, Any]
) -> Iterator[tuple[str, list[bytes]]]:
    """Yields the name of each case that Hopper's kernels take, and the modules of its kernels."""
    import jax
    from jax.experimental.mosaic.gpu import core

    from ejkernel.modules.workloads.find import calls_here
    from ejktest.device import H200, on
    from gpu import sweep

    with on(H200):
        for call in calls_here(operation, cases):
            try:
                subject = sweep.subject_of(call, "pallas")
            except LookupError as error:
                print(error, file=sys.stderr)
                continue
            function = subject.function(sweep.changed(subject.ships, values))
            arrays = [call.abstract()[name] for name in call.names]

            def with_gradients(*x: Any, function: Any = function) -> Any:
                out, back = jax.vjp(function, *x)
                return back(out)

            core.KNOWN_KERNELS.clear()
            run = function if pass_name == "fwd" else with_gradients
            jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",))
            yield call.name, list(core.KNOWN_KERNELS.values())


def assemble(text: Path, ptxas: Path) -> tuple[dict[str, Any], Path]:
    """Returns what ptxas says of a kernel, and its machine code."""
    code = text.with_suffix(".cubin")
    command = [ptxas, "-arch=sm_90a", "-v", "-o", code, text]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    numbers = {
        "registers": r"Used (\d+) registers",
        "spill stores": r"(\d+) bytes spill stores",
        "spill loads": r"(\d+) bytes spill loads",
    }
    row: dict[str, Any] = {}
    for name, pattern in numbers.items():
        match = re.search(pattern, report)
        row[name] = int(match[1]) if match else 0
    row["serialized"] = " ".join(sorted(set(re.findall(r"C751\d", report)))) or "-"
    return row, code


def loops(disassembly: str) -> Iterator[str]:
    """Yields the instructions, a letter each, of every innermost loop that has matmuls."""
    names, labels, jumps = [], {}, []
    for line in disassembly.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        if instruction := re.search(
            r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9]+)(.*?);", line
        ):
            if target := re.search(r"`\((\.L_x_\d+)\)", instruction[2]):
                jumps.append((len(names), target[1]))
            names.append(instruction[1])
    letters = "".join(SYMBOLS.get(name, ".") for name in names)
    spans = sorted((labels[to], at) for at, to in jumps if labels.get(to, at) < at)
    spans = [(a, b) for a, b in spans if "H" in letters[a:b]]
    end = 0
    for a, b in spans:
        inner = not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)
        if inner and a >= end:  # retries of waits jump back, too, from behind a loop
            end = b
            yield letters[a : b + 1]


def disassembler() -> Path:
    triton = importlib.util.find_spec("triton")
    for folder in (triton and triton.submodule_search_locations) or ():
        if (tool := Path(folder) / "backends" / "nvidia" / "bin" / "nvdisasm").exists():
            return tool
    if tool_on_path := shutil.which("nvdisasm"):
        return Path(tool_on_path)
    raise SystemExit("--loops needs nvdisasm, which Triton's wheel has")


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("operation")
    p.add_argument("--cases", default="*", help="comma-separated globs on case names")
    p.add_argument("--pass", dest="pass_name", choices=("fwd", "bwd"), default="fwd")
    p.add_argument("--set", default="", metavar="FIELD=N,...", help="other fields of the tiles")
    p.add_argument("--loops", action="store_true", help="order of instructions of the mainloops")
    p.add_argument("--keep", type=Path, help="folder for PTX and machine code")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    cuda = cuda_folder()
    os.environ |= {"JAX_PLATFORMS": "cpu", "CUDA_ROOT": str(cuda)}
    os.environ["PATH"] = f"{cuda / 'bin'}:{os.environ['PATH']}"
    from gpu import sweep  # which imports JAX, for the platform above

    checkout.register()
    try:
        values = sweep.field_values(options.set) if options.set else {}
    except ValueError:
        raise SystemExit("--set: expected FIELD=NUMBER,FIELD=NUMBER as bwd.pipelined=0") from None
    any_serialized = False
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
        kernels = list(lowered_kernels(options.operation, options.cases, options.pass_name, values))
        os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(cuda)  # JAX sets its own when it is imported
        compile_kernel = compiler(Path(scratch))
        for case, modules in kernels:
            print(case)
            for module in modules:
                before = set(glob.glob(f"{folder}/*.ptx"))
                compile_kernel(module, len(module))
                for text in sorted(set(glob.glob(f"{folder}/*.ptx")) - before):
                    row, code = assemble(Path(text), cuda / "bin" / "ptxas")
                    cells = ", ".join(f"{name} {value}" for name, value in row.items())
                    print(f"  {Path(text).stem}: {cells}", flush=True)
                    any_serialized |= row["serialized"] != "-"
                    if options.loops:
                        command = [disassembler(), "-c", code]
                        report = subprocess.run(command, check=True, capture_output=True, text=True)
                        for order in loops(report.stdout):
                            print(f"    {order}")
    return int(any_serialized)


if __name__ == "__main__":
    sys.exit(main())
