"""Error against float64 of every operation, by dtype and backend: the table of the numerics guide.

    accuracy.py                          show the errors on this machine
    accuracy.py flash_attention          of one operation, or several
    accuracy.py --platform xla           of one backend: xla, triton, pallas, cuda
    accuracy.py --write                  keep them in tools/accuracy_records, one file a device
    accuracy.py --out FILE               keep them in another file
    accuracy.py --processes 8 --seconds 80   that many at once; nothing starts after the seconds

``tables.py --write`` makes the table of these records. What is in a record and was not measured
again stays. A backend whose hardware is absent runs in its interpreter, which rounds where the
hardware rounds but adds in another order. The reference is the call with the same inputs in
float64 on the CPU, by the XLA implementation, which the tests compare with numpy.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejktest.calls import DECAYS, Call, Form, call
from ejktest.tolerance import measure

RECORDS = Path(__file__).resolve().parent / "accuracy_records"
DTYPES = ("float32", "bfloat16", "float16")
PLATFORMS = ("xla", "triton", "pallas", "cuda")
LENGTH, HEADS, KV_HEADS, DIM = 128, 2, 1, 128
PAGE = 16
_PAGES = -(-LENGTH // PAGE)
SIZES = {
    "head_dim": DIM, "key_dim": DIM, "v_dim": DIM, "pages": 2 * _PAGES, "page_size": PAGE,
    "max_blocks": _PAGES, "cache_dim": DIM + 64, "tokens": 20, "q_dim": DIM + 64, "latent": 128,
    "nope_dim": DIM, "rope_dim": 64, "rows": LENGTH, "inner": DIM, "columns": DIM, "groups": 3,
    "channels": DIM, "width": 4, "history": 3,
}  # fmt: skip

_TABLES = tuple(tuple(range(row, 2 * _PAGES, 2)) for row in range(2))
_RAGGED = {"block_tables": _TABLES, "query_start_loc": (0, 1, 20)}
_RANGES = {"sequence_start": (0, 40), "sequence_end": (LENGTH, 99)}
FORMS = {
    "flash_attention": Form((), {"causal": True}),
    "attention": Form((), {"causal": True}),
    "scaled_dot_product_attention": Form((), {"causal": True}),
    "blocksparse_attention": Form(
        ("block_mask",), {"q_block_size": 128, "kv_block_size": 128, "causal": True}
    ),
    "native_sparse_attention": Form((), {"block_size": 32, "block_counts": 4}),
    "mla_attention": Form(("b_k",), {"causal": True}),
    "page_attention": Form((), {}, {"context_lens": (LENGTH, 99), "block_tables": _TABLES}),
    "ragged_decode_attention": Form((), {}, _RANGES),
    "ragged_page_attention": Form((), {}, {**_RAGGED, "context_lens": (LENGTH, 99), "num_seqs": 2}),
    "ragged_page_attention_v3": Form(
        (), {}, {**_RAGGED, "kv_lens": (LENGTH, 99), "distribution": (1, 1, 2)}
    ),
    "mla_decode": Form(
        (), {"latent_dim": DIM}, {"context_lens": (LENGTH, 99), "block_tables": _TABLES}
    ),
    "recurrent_attention": Form(("g",)),
    "gla_attention": Form(("g",)),
    "lightning_attention": Form((), {"layer_idx": 1, "num_layers": 4}),
    "gated_delta_rule": Form(("g", "beta"), {"normalize_qk": True}),
    "causal_conv1d": Form((), {"activation": "silu"}),
    "mean_pooling": Form((), {"chunk_size": 32}),
    "grouped_matmul": Form((), {}, {"group_sizes": (50, 0, 78)}),
}
"""The call of every operation. ring_attention is flash attention's kernels on several devices."""
SERVING = {name for name, form in FORMS.items() if form.integers} - {"grouped_matmul"}
"""Operations over caches, whose gradients are those of the XLA implementation everywhere."""


def cast(example: Call, dtype: Any) -> dict[str, jax.Array]:
    """Returns the arrays with floating ones in a dtype; decays stay float32, or float64."""
    decays = dtype if jnp.dtype(dtype).itemsize > 4 else jnp.float32
    return {
        name: x.astype(decays if name in DECAYS else dtype)
        if jnp.issubdtype(x.dtype, jnp.floating)
        else x
        for name, x in example.arrays.items()
    }


def run_call(example: Call, arrays: dict[str, jax.Array], platform: str) -> list[np.ndarray]:
    """Returns the output and, for operations that are trained, the gradients."""
    from ejkernel import modules

    function = getattr(modules, example.operation)
    trained = () if example.operation in SERVING else example.gradients
    smooth = {name: arrays[name] for name in trained}
    fixed = {name: x for name, x in arrays.items() if name not in trained}

    def forward(smooth: dict[str, jax.Array]) -> jax.Array:
        out = function(**smooth, **fixed, **example.static, platform=platform)
        return jax.tree.leaves(out)[0]

    @jax.jit
    def both(smooth: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        out, back = jax.vjp(forward, smooth)
        drawn = np.random.default_rng(0).standard_normal(out.shape)
        cotangent = np.round(drawn * 64) / 64  # exact in every dtype
        return out, back(jnp.asarray(cotangent, out.dtype))[0]

    out, gradients = both(smooth) if trained else (jax.jit(forward)(smooth), {})
    return [np.asarray(x) for x in (out, *gradients.values())]


@functools.lru_cache(1)  # the platforms of one operation and dtype follow each other
def reference(operation: str, dtype: str) -> tuple[Call, dict[str, jax.Array], list[np.ndarray]]:
    """Returns a call, its arrays in a dtype, and its results in float64 from these arrays."""
    example = call(
        operation,
        length=LENGTH,
        heads=HEADS,
        kv_heads=KV_HEADS,
        form=FORMS[operation],
        sizes=SIZES,
    )
    arrays = cast(example, dtype)
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.enable_x64(True), jax.default_device(cpu):
        wide = cast(Call(operation, jax.device_put(arrays, cpu), {}), jnp.float64)
        return example, arrays, run_call(example, wide, "xla")


def errors(operation: str, dtype: str, platform: str) -> list[float]:
    """Returns RMS errors over the RMS of the reference: of the output, and the largest one of
    the gradients where the operation is trained."""
    example, arrays, exact = reference(operation, dtype)
    got = run_call(example, arrays, platform)
    ratios = [measure(a, b).rms_ratio for a, b in zip(got, exact, strict=True)]
    return [ratios[0], *([max(ratios[1:])] if ratios[1:] else [])]


@contextlib.contextmanager
def interpreters() -> Generator[None]:
    """Within the block, kernels whose hardware is absent run in their interpreters."""
    from jax.experimental.pallas import tpu as pltpu

    from ejkernel.kernels.pallas.tpu.common.chip import interpreter
    from ejkernel.ops import interpret_mode

    # the plain interpreter has no copies whose length is known at run time only
    with interpret_mode(), interpreter(pltpu.InterpretParams()):
        yield


def have(operation: str, platform: str) -> bool:
    """Returns whether this backend has a kernel of its own that can run here."""
    from ejkernel.modules._table import operation_class
    from ejkernel.ops import kernel_registry as registry

    name = operation_class(operation).shared().name
    kinds = {(i.platform.value, i.backend) for i in registry.list_implementations(name)}
    if jax.default_backend() == "cpu":
        return (platform in ("xla", "triton") and any(p == platform for p, _ in kinds)) or (
            platform == "pallas" and ("pallas", "tpu") in kinds
        )
    return any(p == platform and b in ("any", jax.default_backend()) for p, b in kinds)


def device_name() -> str:
    """Returns the device of the records' file, such as ``cpu`` or ``nvidia-h200``."""
    kind = jax.devices()[0].device_kind
    return kind.lower().replace(" ", "-")


def record(operation: str, dtype: str, platforms: Sequence[str]) -> dict[str, Any]:
    """Returns errors by platform: None where the kernel declines the call, text where it failed."""
    from ejkernel.ops import KernelNotSupported

    cells: dict[str, Any] = {}
    on_cpu = jax.default_backend() == "cpu"
    for platform in platforms:
        if not have(operation, platform):
            continue
        try:
            with interpreters() if on_cpu else contextlib.nullcontext():
                cells[platform] = [float(f"{x:.2g}") for x in errors(operation, dtype, platform)]
        except KernelNotSupported:
            cells[platform] = None
        except Exception as error:  # the others are worth having
            cells[platform] = f"{type(error).__name__}: {error}"
    return cells


def keep(path: Path, operation: str, dtype: str, cells: dict[str, Any]) -> None:
    """Adds errors, which are no failures, to a record."""
    from ejkernel.modules.bench.record import environment

    content = json.loads(path.read_text()) if path.is_file() else {"errors": {}}
    content |= environment()
    for platform, cell in cells.items():
        if not isinstance(cell, str):
            content["errors"].setdefault(platform, {})[f"{operation} {dtype}"] = cell
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def run_jobs(
    jobs: Sequence[tuple[str, str]], platforms: Sequence[str], processes: int, seconds: float
) -> Iterable[tuple[str, str, dict[str, Any]]]:
    """Yields operation, dtype and their errors by platform, as they are finished in time."""
    deadline = time.monotonic() + seconds
    if processes == 1:
        for job in jobs:
            if time.monotonic() < deadline:
                yield *job, record(*job, platforms)
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # they share a GPU
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
    futures = {pool.submit(record, *job, platforms): job for job in jobs}
    workers = list(pool._processes.values())
    try:
        for future in as_completed(futures, max(0.0, deadline - time.monotonic())):
            yield *futures[future], future.result()
    except TimeoutError:
        pass
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("operation", nargs="*", help="operations; without any, all")
    parser.add_argument("--platform", action="append", choices=PLATFORMS)
    parser.add_argument("--dtype", action="append", choices=DTYPES)
    parser.add_argument("--write", action="store_true", help="keep the errors of this device")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to keep them")
    parser.add_argument("--processes", type=int, default=1, metavar="N")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="ends by then")
    options = parser.parse_args(argv)
    unknown = [name for name in options.operation if name not in FORMS]
    if unknown:
        parser.error(f"no operation {unknown[0]!r}; there are: {', '.join(FORMS)}")
    os.environ.setdefault("EJKERNEL_AUTOTUNE_POLICY", "heuristics")  # nothing here is timed
    path = options.out
    if path is None and options.write:
        path = RECORDS / f"{device_name()}.json"
    jobs = [
        (name, dtype) for name in options.operation or FORMS for dtype in options.dtype or DTYPES
    ]
    left, failed = dict.fromkeys(jobs), False
    platforms = options.platform or PLATFORMS
    for operation, dtype, cells in run_jobs(jobs, platforms, options.processes, options.seconds):
        del left[operation, dtype]
        failed |= any(isinstance(cell, str) for cell in cells.values())
        for platform, cell in cells.items():
            print(f"{platform:7} {operation} {dtype}: {cell}", file=sys.stderr, flush=True)
        if path is not None:
            keep(path, operation, dtype, cells)
    for operation, dtype in left:
        print(f"no time left: {operation} {dtype}", file=sys.stderr)
    return 1 if failed or left else 0


if __name__ == "__main__":
    sys.exit(main())
