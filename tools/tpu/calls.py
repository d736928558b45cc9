"""Kernels whose cost is compared with that of JAX's own: ours, and those."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tools.tpu.alone import ALONE
from tools.tpu.copies import ONE_ROW_EACH, PREFILLED, decoding, mixed
from tools.tpu.cost import KERNELS, LANES, Cost

from ejkernel.kernels import pallas
from ejktest.abstract import BF16
from ejktest.cases import grouped, paged, ragged
from ejktest.cases.attention import flash

BATCH, HEADS, LENGTH = 4, 16, 4096
_flash = partial(flash, b=BATCH, h=HEADS, kv_heads=HEADS, q=LENGTH)


def ours(dim: int) -> Iterator[Cost]:
    from ejkernel.kernels.pallas.tpu.common.chip import current_chip
    from ejkernel.kernels.pallas.tpu.flash_attention import tiles
    from ejkernel.types.attention.problem import Problem

    shipped, two = _flash(dim), _flash(dim, cfg={"fuses_gradients": False})
    sizes: dict[str, Any] = dict(
        batch=BATCH, q_len=LENGTH, kv_len=LENGTH, heads=HEADS, kv_heads=HEADS
    )
    problem = Problem(**sizes, dim=dim, value_dim=dim, dtype="bfloat16", scale=1.0)
    chosen = tiles.choose(problem, current_chip())
    for kernel, matmuls in KERNELS.items():
        t = getattr(chosen, "fused" if kernel == "bwd" else kernel)
        text = f"{t.block_q}x{t.block_kv}/{t.rows}"
        is_backward, call = kernel != "fwd", two if kernel in ("dq", "dkv") else shipped
        function = call.backward(pallas) if is_backward else call.forward(pallas)
        name = f"ejkernel_flash_{kernel}"
        work = t.block_q * t.block_kv * matmuls * dim
        shapes = call.shapes()
        yield Cost("ejkernel", kernel, name, text, work, dim, function, shapes, call, is_backward)


def jax_flash(dim: int, block: int) -> Iterator[Cost]:
    import jax
    from jax.experimental.pallas.ops.tpu import flash_attention as fa

    shape = jax.ShapeDtypeStruct((BATCH, HEADS, LENGTH, dim), "bfloat16")
    names = [f for f in fa.BlockSizes.__dataclass_fields__ if f != "block_b"]
    blocks = fa.BlockSizes(block_b=1, **dict.fromkeys(names, block))

    def forward(q: Any, k: Any, v: Any) -> Any:
        return fa.flash_attention(q, k, v, sm_scale=dim**-0.5, block_sizes=blocks)

    yield from _others("jax flash", _FLASH, forward, block, dim, (shape,) * 3)


def jax_splash(dim: int, block: int, *, fused: bool = False) -> Iterator[Cost]:
    """JAX's splash attention, whose gradients are of two kernels or of one."""
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as sk
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as sm

    shape = jax.ShapeDtypeStruct((BATCH, HEADS, LENGTH, dim), "bfloat16")
    names = [f for f in sk.BlockSizes.__dataclass_fields__ if f.startswith("block_")]
    blocks: dict[str, Any] = dict.fromkeys(names, block)
    if fused:
        blocks |= {"block_q_dq": None, "block_kv_dq": None, "use_fused_bwd_kernel": True}
    mask = sm.MultiHeadMask([sm.FullMask((LENGTH, LENGTH))] * HEADS)
    kernel = sk.make_splash_mha(
        mask, block_sizes=sk.BlockSizes(**blocks), head_shards=1, q_seq_shards=1
    )

    def forward(q: Any, k: Any, v: Any) -> Any:
        return jax.vmap(kernel)(q * dim**-0.5, k, v)

    kernels = {"bwd": _SPLASH["dkv"]} if fused else _SPLASH
    yield from _others("jax splash", kernels, forward, block, dim, (shape,) * 3)


_FLASH = {"fwd": "flash_attention", "dq": "flash_mha_bwd_dq", "dkv": "flash_mha_bwd_dkv"}
_SPLASH = {"fwd": "splash_mha_fwd", "dq": "splash_mha_dq", "dkv": "splash_mha_dkv"}


def _others(
    who: str, names: dict[str, str], forward: Any, block: int, dim: int, shapes: tuple
) -> Iterator[Cost]:
    import jax

    def gradients(*arrays: Any) -> Any:
        return jax.grad(lambda *x: forward(*x).astype("float32").sum(), (0, 1, 2))(*arrays)

    for kernel in names:
        function = forward if kernel == "fwd" else gradients
        text = f"{block}x{block}"
        work = block * block * KERNELS[kernel] * dim
        yield Cost(who, kernel, names[kernel], text, work, dim, function, shapes)


GROUPED = grouped.COMPILED_TPU["grouped 8 x 1k"]


def our_grouped() -> Iterator[Cost]:
    from ejkernel.kernels.pallas.tpu.common.chip import current_chip
    from ejkernel.kernels.pallas.tpu.grouped_matmul import tiles
    from ejkernel.types.problems.grouped_matmul import GroupedProblem

    (rows, inner), (groups, _, columns) = (GROUPED.arrays[n][0] for n in ("lhs", "rhs"))
    problem = GroupedProblem(rows, inner, columns, groups, groups, False, BF16, BF16, "default")
    t = tiles.choose(problem, current_chip())
    operands = GROUPED.shapes()
    for row, call_tiles, depth, function in (
        ("grouped", t.fwd, t.fwd.chunk, GROUPED.forward(pallas)),
        ("grouped weights", t.drhs, t.drhs.inner, GROUPED.backward(pallas)),
    ):
        name = "ejkernel_" + row.replace("grouped", "grouped_matmul").replace(" ", "_")
        text = f"{call_tiles.rows}x{call_tiles.columns}x{call_tiles.inner}"
        work = call_tiles.rows * call_tiles.columns * depth
        backward = row != "grouped"
        yield Cost("ejkernel", row, name, text, work, LANES, function, operands, GROUPED, backward)


def jax_grouped(tile: tuple[int, int, int]) -> Iterator[Cost]:
    """JAX's megablox with tiles of these rows, inner and columns."""
    import importlib

    import jax

    megablox = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    shapes = tuple(GROUPED.structs()[name] for name in ("lhs", "rhs", "group_sizes"))
    rows, (_, columns) = shapes[0].shape[0], shapes[1].shape[1:]
    dout = jax.ShapeDtypeStruct((rows, columns), BF16)

    def forward(lhs: Any, rhs: Any, sizes: Any) -> Any:
        return megablox.gmm(lhs, rhs, sizes, lhs.dtype, tile)

    def weights(lhs: Any, dout: Any, sizes: Any) -> Any:
        return megablox.tgmm(lhs.swapaxes(0, 1), dout, sizes, lhs.dtype, tile)

    work, text = tile[0] * tile[1] * tile[2], "x".join(map(str, tile))
    yield Cost("megablox", "grouped", "gmm", text, work, LANES, forward, shapes)
    operands = shapes[0], dout, shapes[2]
    yield Cost("megablox", "grouped weights", "tgmm", text, work, LANES, weights, operands)


DECODE = paged.PAGED["paged"]


def our_decode() -> Iterator[Cost]:
    from ejkernel.kernels.pallas.tpu.common.chip import current_chip
    from ejkernel.kernels.pallas.tpu.page_attention import tiles
    from ejkernel.kernels.pallas.tpu.page_attention.implementation import page_attention
    from ejktest.bound import bound

    p = page_attention.problem(bound(page_attention.call, **DECODE.structs()).arguments)
    t = tiles.choose(p, current_chip())
    work = t.block * p.heads * 2 * p.dim
    text = f"{t.pages} pages"
    operands, function, kernel = DECODE.shapes(), DECODE.forward(pallas), "ejkernel_decode"
    copies = partial(decoding, DECODE)
    yield Cost(
        "ejkernel", "paged", kernel, text, work, LANES, function, operands, DECODE, copies=copies
    )


def jax_decode(pages: int) -> Iterator[Cost]:
    """JAX's paged attention, for one kv head at a time."""
    import jax
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    query, cache, _, lens, tables = DECODE.structs().values()
    pool = jax.ShapeDtypeStruct((cache.shape[2], *cache.shape[:2], cache.shape[3]), cache.dtype)

    def forward(*arrays: Any) -> Any:
        return paged_attention(*arrays, pages_per_compute_block=pages)

    group = query.shape[1] // pool.shape[0]
    work = pages * pool.shape[2] * group * 2 * query.shape[2]
    operands = query, pool, pool, lens, tables
    text = f"{pages} pages"
    yield Cost("jax", "paged", "paged_attention", text, work, LANES, forward, operands)


def our_ragged() -> Iterator[Cost]:
    """Blocks of queries of a prefilled sequence, and sequences of one row."""
    from ejkernel.kernels.pallas.tpu.common.chip import current_chip
    from ejkernel.kernels.pallas.tpu.ragged_page_attention.implementation import (
        ragged_page_attention as kernel,
    )
    from ejkernel.kernels.pallas.tpu.ragged_page_attention.tiles import Layout
    from ejktest.bound import bound

    # with few rows the largest piece of code is that of single rows
    for row, call in (("prefill", RAGGED["prefill"]), ("one row", RAGGED["one row"])):
        problem = kernel.problem(bound(kernel.call, **call.structs()).arguments)
        layout = Layout(problem, kernel.choose(problem, current_chip()), current_chip())
        p = layout.paged
        rows, text = p.heads, f"1x{layout.block}"
        if row == "prefill":  # the code loops over kv heads
            rows, text = layout.rows, f"{layout.tiles.queries}x{layout.block}"
        work, name = rows * layout.block * 2 * p.dim, "ejkernel_ragged_attention"
        function, shapes = call.forward(pallas), call.shapes()
        copies = partial(mixed, call, mix=MIXES[row])
        yield Cost("ejkernel", row, name, text, work, LANES, function, shapes, call, copies=copies)


MIXES = {"prefill": PREFILLED, "one row": ONE_ROW_EACH}
RAGGED = {
    "prefill": ragged.reading_ahead(2048),
    "one row": ragged.reading_ahead(16),
}


def jax_ragged(pages: int, queries: int, row: str) -> Iterator[Cost]:
    """JAX's ragged paged attention, whose code is one for all lengths."""
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    structs = RAGGED["prefill"].structs()
    names = "queries", "kv_pages", "context_lens", "block_tables", "query_start_loc", "num_seqs"
    query, pool, *indices, count = (structs[name] for name in names)

    memory = min(pltpu.get_tpu_info().vmem_capacity_bytes, 2**26)

    def forward(*arrays: Any) -> Any:
        return ragged_paged_attention(
            *arrays,
            num_kv_pages_per_block=pages,
            num_queries_per_block=queries,
            vmem_limit_bytes=memory,
        )

    rows = query.shape[1] * (queries if row == "prefill" else 1)
    work = rows * pages * pool.shape[1] * 2 * query.shape[2]
    operands = query, pool, *indices, type(count)((1,), count.dtype)
    text = f"{queries}x{pages * pool.shape[1]}"
    yield Cost("jax", row, "ragged_paged", text, work, LANES, forward, operands)


def our_ring() -> Iterator[Cost]:
    """The kernel of a ring's step that sends the keys on, for a shard of 4096 tokens."""
    from tools.tpu.sharing import DEVICES, SENDING_FORM, compile_on

    def compiled(device: Any) -> Any:
        return compile_on(device.client.devices()[:DEVICES], SENDING_FORM, backward=False)

    name, work = "ejkernel_flash_fwd_send", LANES**3
    yield Cost("ejkernel", "send", name, "", work, LANES, compiled, (), compiled=compiled)


def sources(name: str) -> list[Callable[[], Iterator[Cost]]]:
    """The kernels of a part of the count, ours first: "d64" and the like, or a family's name."""
    if name in ALONE:
        return [kernel.count for kernel in ALONE[name]]
    if name == "ring":
        return [our_ring]
    if name == "grouped":
        others = [partial(jax_grouped, (512, 1024, n)) for n in (512, 1024)]
        return [our_grouped, *others]
    if name == "decode":
        return [our_decode, *(partial(jax_decode, pages) for pages in (8, 16, 32))]
    if name == "ragged":
        tiles = (16, 32, "prefill"), (32, 64, "prefill"), (32, 8, "one row")
        return [our_ragged, *(partial(jax_ragged, *sizes) for sizes in tiles)]
    dim = int(name.removeprefix("d"))
    sources: list[Callable[[], Iterator[Cost]]] = [partial(ours, dim)]
    for block in (512, 1024):
        sources += [partial(jax_flash, dim, block), partial(jax_splash, dim, block)]
        sources.append(partial(jax_splash, dim, block, fused=True))
    return sources
