"""Hopper's kernels in JAX's interpreter, watched for races. Needs no GPU, but JAX 0.11.

    python tools/gpu/races.py                                 # every kernel, four minutes
    python tools/gpu/races.py "hopper_flash segments q>k"     # kinds or names, as of check_memory
    python tools/gpu/races.py --plant hopper_grouped          # and would a race be seen?

The calls are small ones of ``check_memory`` for Hopper: every warpgroup of every program runs at
once, and each access of shared or device memory is compared with all accesses that are in no known
order with it (``gpu.mosaic``). Results are compared with float32, so that what was watched is what
should run. ``--plant`` takes away the order of one wait after another: where no race is seen then,
the wait orders nothing in this call; behind waits at a program's end there is nothing to order.
Exits with 1 when something is found, or wrong.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
# threads that wait for each other need as many workers of XLA's: one for each device
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=64"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checkout

checkout.use()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from ejkernel.kernels.pallas.gpu.blocksparse_attention.implementation import (  # noqa: E402
    blocksparse_attention,
)
from ejkernel.kernels.pallas.gpu.common.chip import Chip  # noqa: E402
from ejkernel.kernels.pallas.gpu.flash_attention.implementation import (  # noqa: E402
    flash_attention,
)
from ejkernel.kernels.pallas.gpu.grouped_matmul.eight_bit import EightBitMatmul  # noqa: E402
from ejkernel.kernels.pallas.gpu.grouped_matmul.weights import Weights  # noqa: E402
from ejkernel.kernels.pallas.gpu.serving.implementation import (  # noqa: E402
    decode_stage,
    merge_stage,
)
from ejkernel.kernels.pallas.gpu.serving.prefill import (  # noqa: E402
    prefill,
    prefill_kernel,
    scale_factors,
)
from ejkernel.kernels.pallas.gpu.serving.tiles import (  # noqa: E402
    MIN_ROWS,
    long_prefill_of,
)
from ejkernel.types.serving.layout import KVLayout  # noqa: E402
from ejkernel.types.serving.problem import (  # noqa: E402
    LatentProblem,
    PagedProblem,
    RaggedProblem,
)
from ejkernel.types.serving.schedule import (  # noqa: E402
    ScheduleSizes,
    work_tiles,
)
from ejktest import at_size  # noqa: E402
from ejktest.cases import attention as attention_cases  # noqa: E402
from ejktest.cases import grouped as grouped_cases  # noqa: E402
from ejktest.cases import ragged as ragged_cases  # noqa: E402
from ejktest.device import SMALL_CORES, SMALL_H200, on  # noqa: E402
from ejktest.oracles import attention as flash_oracle  # noqa: E402
from ejktest.oracles import grouped as oracle  # noqa: E402
from gpu.named import chosen, label  # noqa: E402

# writes whose order does not matter: warpgroups write the same, and read only what they wrote
ALIKE = ("PagedLoader.clear_from.clear",)
Call = tuple[Callable[[], Any], Callable[[Any], float]]  # a run, its error over what may be
LATENT = {
    "128 heads": ((130, 0, 70, 700, 1), 128, 1, 64),
    "float16, rows": ((70, 200, 5), 192, 3, 16),  # heads times rows
    "e4m3": ((130, 0, 700, 1), 64, 1, 64),
    "single": ((700,), 64, 1, 64),
    "single, one step": ((1,), 64, 1, 64),
    # the first again, both in two splits
    "batch-invariant": ((2310, 0, 130, 2310), 64, 1, 64),
    "single e4m3": ((130,), 128, 2, 64),
}
EIGHT_BIT: dict[str, tuple[int, int, int, int, int, dict[str, Any]]] = {
    "full": (150, 300, 2, 1, 128, {}),
    "causal": (300, 290, 2, 1, 128, {"causal": True}),
    "window": (400, 400, 1, 1, 128, {"sliding_window": (120, 30)}),
    "causal d64": (300, 260, 2, 2, 64, {"causal": True}),
    "causal d256": (150, 150, 1, 1, 256, {"causal": True}),
    "negative scale": (150, 150, 1, 1, 64, {"softmax_scale": -0.1}),
}
SMALL = attention_cases.SMALL
PIPELINED: dict[str, tuple[attention_cases.Call, dict[str, Any]]] = {  # and fields of the tiles
    "odd causal": (SMALL["odd causal"], {"dq_stages": 2}),
    "segments q>k": (SMALL["segments q>k"], {"q_stages": 3}),
    "window": (replace(SMALL["odd causal"], mask={"sliding_window": (100, 30)}), {}),
    "large logits d64": (SMALL["large logits d64"], {"q_stages": 3, "dq_stages": 1}),
    "causal d64": (replace(SMALL["odd causal"], d=64), {"dq_stages": 2}),
    "unseen": (replace(SMALL["odd causal"], mask={"causal": True, "causal_offset": -200}), {}),
    "full": (replace(SMALL["odd causal"], mask={}), {}),
    "shared keys d96": (replace(SMALL["odd causal"], d=96), {"dq_stages": 2}),
    "shared keys d80": (replace(SMALL["odd causal"], d=80), {"dq_stages": 2}),
    "segments d80": (replace(SMALL["segments q>k"], d=80), {"pipelined": False}),
}
UNSHIFTED: dict[str, tuple[attention_cases.Call, dict[str, Any]]] = {
    "window": (PIPELINED["window"][0], {}),
    "window d64": (replace(PIPELINED["window"][0], d=64), {"stages": 3}),
    "segments q>k": (SMALL["segments q>k"], {}),
    "segments d64": (replace(SMALL["segments q>k"], d=64), {"stages": 3}),
    "unseen": PIPELINED["unseen"],
    "large logits d96": (replace(SMALL["large logits"], d=96), {}),
    "causal d80": (replace(SMALL["odd causal"], d=80), {}),
    "guided": (SMALL["odd causal"], {"guided": True}),
}
GROUPED = ("around a tile", "some of eight")


def attention(operation: Any, case: attention_cases.Call) -> Call:
    """Returns a call of softmax attention, both passes."""

    def call(*args: Any, **options: Any) -> Any:
        with on(SMALL_H200):
            return operation(*args, **options)

    diff, fixed, exact = at_size.expected(case)
    both = at_size.kernel(case, call).__wrapped__
    fixed = {n: np.asarray(x) if n == "block_mask" else x for n, x in fixed.items()}
    run = jax.jit(lambda diff: both(diff, fixed))

    def error(out: Any) -> float:
        return max(at_size.relative(out[n], exact[n]) for n in out) / at_size.bound(case)

    return lambda: run(diff), error


def hopper_flash(name: str) -> Call:
    return attention(flash_attention, attention_cases.SMALL[name])


def hopper_pipelined(name: str) -> Call:
    """The backward pass with probabilities a step ahead, in each of its forms."""
    case, values = PIPELINED[name]
    return attention(with_tiles(bwd={"pipelined": True} | values), case)


def hopper_unshifted(name: str) -> Call:
    """The forward pass without maxima first, under windows, segments and masks of whole rows."""
    case, values = UNSHIFTED[name]
    return attention(with_tiles(fwd={"unshifted_first": True} | values), case)


def with_tiles(**changes: dict[str, Any]) -> Any:
    """Returns the kernel with other fields of its tiles."""
    kernel: Any = object.__new__(type(flash_attention))  # copy.copy gives the kernel itself
    kernel.__dict__.update(flash_attention.__dict__)

    def choose(problem: Any, target: Any) -> Any:
        tiles = flash_attention.choose(problem, target)
        parts = {name: replace(getattr(tiles, name), **x) for name, x in changes.items()}
        return replace(tiles, **parts)

    kernel.choose = choose
    return kernel


def hopper_eight_bit(name: str) -> Call:
    """Returns a call of 8-bit operands, against attention in float64 of their values."""
    q_len, kv_len, heads, kv_heads, d, options = EIGHT_BIT[name]
    mask = {name: x for name, x in options.items() if name != "softmax_scale"}
    rng = np.random.default_rng(0)
    shapes = (q_len, heads), (kv_len, kv_heads), (kv_len, kv_heads)
    arrays = [
        jnp.asarray(rng.standard_normal((1, *shape, d)), jnp.float8_e4m3fn) for shape in shapes
    ]
    factors = [1.5, -0.5, 3.0]
    scales = {f"{x}_scale": s for x, s in zip("qkv", factors, strict=True)}

    @jax.jit
    def run(*arrays: Any) -> Any:
        with on(SMALL_H200):
            return flash_attention(*arrays, **scales, **options, return_lse=True)

    exact = [np.asarray(x, np.float32) * s for x, s in zip(arrays, factors, strict=True)]
    see = flash_oracle.visible(1, q_len, kv_len, **mask)
    case = flash_oracle.Case(*exact, see=see, scale=options.get("softmax_scale"))
    want = flash_oracle.attention(case)

    def error(actual: Any) -> float:
        return max(relative(actual[0], want.o) / 3e-2, relative(actual[1], want.lse) / 1e-5)

    return lambda: run(*arrays), error


def hopper_sparse(name: str) -> Call:
    return attention(blocksparse_attention, attention_cases.SMALL_SPARSE[name])


def relative(actual: Any, want: Any) -> float:
    actual, want = (np.asarray(x, np.float64) for x in (actual, want))
    error = np.linalg.norm(actual - want) / max(np.linalg.norm(want), 1e-30)
    return float(error) if np.isfinite(error) else np.inf


def hopper_grouped(name: str) -> Call:
    """The gradient of the matrices; rows behind the groups hold NaN and infinity."""
    sizes, offset, _ = grouped_cases.SIZES[name]
    lhs, rhs, dout = grouped_cases.operands(name, "whole bfloat16", False, 392)
    kernel = Weights(
        rows=392, down=lhs.shape[1], across=dout.shape[1], batch=1, groups=len(sizes),
        held=len(rhs), dtype="bfloat16", cores=SMALL_CORES,
    )  # fmt: skip
    first = None if offset is None else np.asarray([offset], np.int32)
    run = jax.jit(lambda: kernel(lhs, dout, np.asarray(sizes, np.int32), first))
    want = oracle.grouped_matmul(lhs, rhs, sizes, offset, dout=dout).drhs
    return run, lambda actual: relative(actual, want) / 6e-3


def hopper_grouped_eight_bit(name: str) -> Call:
    """Rows times int8 matrices, in both layouts; rows behind the groups hold NaN."""
    sizes, offset, _ = grouped_cases.SIZES[name]
    transposed = offset is not None
    rng, rows, inner, columns = np.random.default_rng(0), 392, 256, 384
    matrices, shape = grouped_cases.MATRICES, (columns, inner) if transposed else (inner, columns)
    rhs = rng.integers(-128, 128, (matrices, *shape)).astype(np.int8)
    lhs = rng.standard_normal((rows, inner))
    lhs[sum(sizes) :] = np.nan
    lhs = jnp.asarray(lhs, "bfloat16")
    scale = rng.uniform(0.5, 2, (matrices, columns)).astype(np.float32)
    kernel = EightBitMatmul(
        rows=rows, inner=inner, columns=columns, batch=1, groups=len(sizes), matrices=matrices,
        shared=True, transposed=transposed, dtype="bfloat16", stored="int8", cores=SMALL_CORES,
    )  # fmt: skip
    first = None if offset is None else np.asarray([offset], np.int32)
    run = jax.jit(lambda: kernel(lhs, rhs, np.asarray(sizes, np.int32), first, scale))
    options = {"transpose_rhs": transposed, "rhs_scale": scale}
    want = oracle.grouped_matmul(lhs, rhs, sizes, offset, **options).out
    return run, lambda actual: relative(actual, want) / 6e-3


def hopper_ragged(name: str) -> Call:
    """Sequences of many new tokens, and of one where the kernel decodes."""
    m = ragged_cases.SMALL[name]
    x, rows = ragged_cases.draw(m), np.asarray(m.rows)
    first, length = np.cumsum(rows) - rows, np.asarray(m.lens)
    pages, page_size = x["cache"].shape[:2]
    sizes = (len(rows), m.h, m.hk, m.d, m.d, pages, page_size, x["tables"].shape[1])
    layout = KVLayout.interleaved(m.hk, m.d)
    paged = PagedProblem(*sizes, m.q, m.kv, m.kv, m.d**-0.5, layout, soft_cap=m.cap)
    problem = RaggedProblem(paged, len(x["q"]))
    scale = None if m.scale is None else jnp.full((1, 1), m.scale)
    kernel = prefill_kernel(problem, SMALL_CORES, scaled=scale is not None)
    long = long_prefill_of(problem, SMALL_CORES)
    mine, single = rows >= MIN_ROWS, (rows == 1) & long.decodes
    scheduled = ScheduleSizes(
        len(x["q"]), paged.capacity, m.h, m.hk, 64, 16, 1, 8, 1, SMALL_CORES, 1000, long=long
    )
    tiles = work_tiles(first, first + rows, length, mine, scheduled)
    programs = np.full(len(rows), int(single.any()))
    decode_rows = np.stack([first, np.where(single, length, 0), programs], 1)
    tables = jnp.clip(x["tables"], 0, pages - 1)
    operands = [x["q"], x["cache"], tables, jnp.asarray(tiles), jnp.asarray(decode_rows, jnp.int32)]
    if scale is not None:
        operands.append(scale_factors(kernel.form, scale, scale))
    sampled, exact = ragged_cases.reference(m, x, x["cache"])
    sequence = np.searchsorted(np.cumsum(rows), sampled, side="right")
    compared = (mine | single)[sequence]
    run = jax.jit(functools.partial(prefill, kernel))
    return lambda: run(*operands), lambda o: relative(o[sampled[compared]], exact[compared]) / 6e-3


def hopper_latent(name: str) -> Call:
    """Latent decoding with its merge and lse; bits of a sequence that a batch has twice."""
    lens, rows, tokens, page = LATENT[name]
    dtype = "float16" if "float16" in name else "bfloat16"
    key = "float8_e4m3fn" if "e4m3" in name else dtype
    rng, columns = np.random.default_rng(0), -(-max(lens) // page)
    pages = len(lens) * columns + 1
    q, cache = (
        jnp.asarray(rng.standard_normal(shape), kind)
        for shape, kind in (((len(lens), rows, 576), dtype), ((pages, page, 576), key))
    )
    tables = rng.permutation(pages)[: len(lens) * columns].reshape(len(lens), columns)
    invariant = "batch-invariant" in name
    if invariant:
        q, tables[-1] = q.at[-1].set(q[0]), tables[0]
    p = LatentProblem(
        len(lens), rows // tokens, 1, 576, 512, pages, page, columns, dtype, key, key, 576**-0.5,
        KVLayout.latent(576), tokens=tokens, return_lse=True,
    )  # fmt: skip
    work: Any = SimpleNamespace(
        problem=p,
        target=Chip(min(2, rows // 64) * SMALL_CORES),
        batch_invariant=invariant,
    )

    @jax.jit
    def run(*operands: Any) -> tuple[Any, ...]:
        arrays = dict(zip(("q", "k", "lens", "tables"), operands, strict=True))
        merged = merge_stage(work, arrays | decode_stage(work, arrays))
        return merged["o"], merged["lse"]

    arrays = (q, cache, *(jnp.asarray(x, jnp.int32) for x in (lens, tables)))
    wide = np.asarray(cache, np.float64)
    want = np.zeros((len(lens), rows, 512))
    for i, n in enumerate(lens):
        keys = wide[tables[i]].reshape(-1, 576)[:n]
        seen = np.arange(n) <= (n - tokens + np.arange(rows) // (rows // tokens))[:, None]
        s = np.where(seen, np.asarray(q[i], np.float64) @ keys.T * p.scale, -np.inf)
        if n:
            e = np.exp(s - s.max(1, keepdims=True))
            want[i] = e @ keys[:, :512] / e.sum(1, keepdims=True)

    def error(actual: Any) -> float:
        if invariant and any(np.any(x[0] != x[-1]) for x in map(np.asarray, actual)):
            return np.inf
        return relative(actual[0], want) / 6e-3

    return lambda: run(*arrays), error


CALLS = (
    *((hopper_flash, name) for name in attention_cases.SMALL),
    *((hopper_pipelined, name) for name in PIPELINED),
    *((hopper_unshifted, name) for name in UNSHIFTED),
    *((hopper_eight_bit, name) for name in EIGHT_BIT),
    *((hopper_sparse, name) for name in attention_cases.SMALL_SPARSE),
    *((hopper_grouped, name) for name in GROUPED),
    *((hopper_grouped_eight_bit, name) for name in (*GROUPED, "one group")),
    *((hopper_ragged, name) for name in ragged_cases.SMALL),
    *((hopper_latent, name) for name in LATENT),
)


def watch(run: Any, planted: str | None = None) -> tuple[Any, Any]:
    """(what was seen, the results)."""
    from gpu.mosaic import interpreter

    with interpreter.watched(planted) as seen:
        out = jax.block_until_ready(run())
    return seen, out


def unexplained(seen: Any) -> set[str]:
    """Returns the findings, except equal writes of several warpgroups."""
    others = {x for x in seen.races if not any(name in x for name in ALIKE)}
    return others | seen.same_thread | seen.problems


def noticed(run: Any, sites: dict[str, str]) -> set[str]:
    """The sites without whose order a race is seen."""
    noticed_sites = set()
    for site, kind in sites.items():
        wrong = unexplained(watch(run, site)[0])
        print(f"     {'seen' if wrong else 'none'} {kind} {site}", flush=True)
        noticed_sites |= {site} if wrong else set()
    return noticed_sites


def problem() -> str | None:
    """Why nothing can be watched here, None if it can."""
    if jax.__version_info__[:2] == (0, 11):
        return None
    return f"gpu.mosaic works inside of the interpreter of JAX 0.11, and this is {jax.__version__}"


def main() -> None:
    if reason := problem():
        sys.exit(reason)
    logging.getLogger("jax._src.callback").setLevel(logging.CRITICAL)  # an error ends every thread
    start, failed, plants = time.time(), 0, "--plant" in sys.argv[1:]
    sites: dict[str, str] = {}
    noticed_sites: set[str] = set()
    for call in chosen(CALLS, [x for x in sys.argv[1:] if x != "--plant"]):
        before = time.time()
        run, error = call[0](*call[1:])
        seen, out = watch(run)
        off = error(out)
        wrong = unexplained(seen) | ({f"error: {off:.1f} bounds"} if not off <= 1 else set())
        failed += bool(wrong)
        mark, took = "FAIL" if wrong else "ok  ", time.time() - before
        print(f"{mark} {label(call)} [{took:.1f}s]: error {off:.2f} of the bound", flush=True)
        print(*(f"     {x}\n" for x in sorted(wrong)), sep="", end="", flush=True)
        if plants:
            sites |= seen.sites
            noticed_sites |= noticed(run, dict(seen.sites))
    print(f"{failed} failed, {time.time() - start:.0f}s in all")
    if plants:
        left = sorted(sites.keys() - noticed_sites)
        print(f"{len(noticed_sites)} of {len(sites)} orders are watched; not in these calls:")
        print(*(f"     {sites[x]} {x}\n" for x in left), sep="", end="")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
