"""Ragged attention over pages on Hopper, where there is no Hopper GPU.

The kernel is lowered for one; its tiles are compared with those of a loop. With a card, ``-m gpu``:
mixes at real size.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice

from ejkernel.kernels.pallas import compat

if compat.mosaic_gpu_problem() is not None:
    pytest.skip(compat.mosaic_gpu_problem(), allow_module_level=True)

from ejkernel.kernels.pallas.gpu.common.chip import BARRIERS
from ejkernel.kernels.pallas.gpu.flash_attention.forward_softmax import factor_names
from ejkernel.kernels.pallas.gpu.serving.implementation import (
    mla_decode,
    ragged_page_attention,
    ragged_page_attention_v3,
)
from ejkernel.kernels.pallas.gpu.serving.prefill import (
    prefill,
    prefill_kernel,
    scale_factors,
    tile_of,
)
from ejkernel.ops import batch_invariant
from ejkernel.types.arrays import EIGHT_BIT
from ejkernel.types.masks.structure import Unsupported
from ejkernel.types.serving.layout import KVLayout
from ejkernel.types.serving.problem import PagedProblem, RaggedProblem
from ejkernel.types.serving.schedule import (
    LongPrefill,
    ScheduleSizes,
    work_tiles,
)
from ejktest.bound import on, struct
from ejktest.cases import ragged as ragged_cases
from ejktest.cases.paged import in_context
from ejktest.programs import equations_of

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
SHARED = 232448  # bytes of shared memory that a program of it may have


@pytest.mark.parametrize(
    "page, d, dtypes, cap, single",
    [
        (16, 128, ("bfloat16", "bfloat16"), None, True),
        (256, 64, ("bfloat16", "bfloat16"), None, False),
        (16, 128, ("bfloat16", "float8_e4m3fn"), None, False),
        (64, 64, ("float16", "int8"), 20.0, False),
        (256, 128, ("float16", "float8_e5m2"), None, False),
    ],
)
def test_lowers_for_a_hopper_gpu(page, d, dtypes, cap, single):
    n, rows, columns = 5, 1024, 4096 // page
    query, cache = dtypes
    arrays = [
        struct(rows, 8, d, dtype=query), struct(40, page, 4, d, dtype=cache),
        struct(n, columns, dtype=jnp.int32), struct(17, 8, dtype=jnp.int32),
        struct(n, 3, dtype=jnp.int32),
    ]  # fmt: skip
    sizes, layout = (n, 8, 2, d, d, 40, page, columns), KVLayout.interleaved(2, d)
    paged = PagedProblem(*sizes, query, cache, cache, d**-0.5, layout, soft_cap=cap)
    scaled = query != cache
    kernel = prefill_kernel(RaggedProblem(paged, rows), 132, scaled=scaled)
    assert (kernel.prologue is not None) == single
    if scaled:
        scales = jnp.ones((1, 2)), None
        arrays.append(jax.eval_shape(lambda: scale_factors(kernel.form, *scales)))
    with on(H200):
        traced = jax.jit(lambda *a: prefill(kernel, *a)).trace(*arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    # the schedule has listed the tiles: nothing else is to be launched
    others = set(re.findall(r"= stablehlo\.(\w+)", text)) - {"custom_call", "reshape", "constant"}
    assert others <= {"broadcast_in_dim"}  # the counter, 0


def test_a_number_of_the_queue_is_a_tile_and_a_head():
    """A sequence's key heads a few at a time; none past the last."""
    first, last = np.asarray([0, 3, 303]), np.asarray([3, 303, 432])
    length, heads = np.asarray([900, 700, 300]), 12
    long = LongPrefill(128, 0, block_q=128, block_kv=128)
    # L2 has the keys of one head of six, and of three
    sizes = ScheduleSizes(432, 2048, heads, 6, 64, 16, 1, 8, 1, 132, l2_tokens=1000, long=long)
    lines = work_tiles(first, last, length, last - first > 3, sizes)
    want = []
    for i, size in ((1, 2), (2, 6)):
        found = [(i, row, first[i], last[i], length[i])
                 for row in range(first[i] // 8 * 8, last[i], 128)][::-1]  # fmt: skip
        for group in range(0, heads, size):
            want += [(head, *x) for x in found for head in range(group, group + size)]
    table = jnp.asarray(lines)
    last_line = len(lines) - 1
    numbers = jnp.arange(last_line * heads + 50)
    found = jax.vmap(lambda n: tile_of(n, lambda m, c: table[m, c], last_line, heads))(numbers)
    found = np.stack(found, axis=1)
    np.testing.assert_array_equal(found[: len(want)], np.reshape(want, (-1, 6)))
    assert (found[len(want) :, 0] == -1).all()


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("cache", ["bfloat16", *EIGHT_BIT])
def test_shared_memory_suffices(cache, d):
    """A program fits an H200, whatever Mosaic adds (``BARRIERS``)."""
    layout = KVLayout.interleaved(2, d)
    paged = PagedProblem(5, 8, 2, d, d, 40, 64, 64, "bfloat16", cache, cache, 1.0, layout)
    kernel = prefill_kernel(RaggedProblem(paged, 1024), 132)
    arrays = [x for x in kernel.scratch().values() if hasattr(x, "shape")]
    assert {"staged"} & kernel.scratch().keys() == ({"staged"} if cache in EIGHT_BIT else set())
    sizes = [int(np.prod(x.shape)) * jnp.dtype(x.dtype).itemsize for x in arrays]
    assert sum(-(-n // 1024) * 1024 for n in sizes) + BARRIERS <= SHARED


def test_factors_are_those_of_the_scales_of_key_heads():
    layout = KVLayout.interleaved(2, 128)
    sizes = (5, 8, 2, 128, 128, 40, 64, 64)
    paged = PagedProblem(*sizes, "bfloat16", "int8", "int8", -0.25, layout, soft_cap=5.0)
    form = prefill_kernel(RaggedProblem(paged, 1024), 132, scaled=True).form
    k_scale, v_scale = jnp.asarray([[2.0, -3.0]]), jnp.asarray([[7.0]])
    want = {"slope": np.repeat([-0.1, 0.15], 4), "unit": np.full(8, 5.0), "value": np.full(8, 7.0)}
    made = scale_factors(form, k_scale, v_scale)
    np.testing.assert_allclose(made[0], np.stack([want[n] for n in factor_names(form)], 1))
    assert scale_factors(form, None, None) is None
    paged = replace(paged, soft_cap=None)
    form = prefill_kernel(RaggedProblem(paged, 1024), 132, scaled=True).form
    made = dict(
        zip(factor_names(form), np.asarray(scale_factors(form, k_scale, None))[0].T, strict=True)
    )
    np.testing.assert_allclose(made["unit"], np.repeat([0.5, 0.75], 4))
    np.testing.assert_array_equal(made["negative"], np.repeat([1, 0], 4))
    np.testing.assert_array_equal(made["value"], np.ones(8))


@pytest.mark.parametrize(
    "query, cache, options, reason",
    [
        ("bfloat16", "bfloat16", {"k_scale": 0.5}, "k_scale: not supported"),
        ("float16", "float16", {"v_scale": 0.5}, "v_scale: not supported"),
        ("bfloat16", "float16", {}, "queries: bfloat16 on float16; supported are"),
        ("float32", "int8", {"k_scale": 0.5}, "queries: float32 on int8; supported are"),
        ("bfloat16", "int8", {"k_scale": 0.5, "v_scale": 0.5}, None),
        ("float16", "float8_e5m2", {"logits_soft_cap": 5.0}, None),
    ],
)
def test_scales_are_those_of_caches_of_8_bits(query, cache, options, reason):
    pytest.importorskip("ejkernel.kernels.triton", reason="it has the other stages")
    ints = partial(struct, dtype=jnp.int32)
    arrays = (
        struct(8192, 8, 128, dtype=query), struct(40, 64, 4, 128, dtype=cache),
        ints(4), ints(4, 64), ints(5),
    )  # fmt: skip

    def attend(*arrays):
        return ragged_page_attention(*arrays, 4, **options)

    with on(H200):
        if reason is None:
            program = jax.make_jaxpr(attend)(*arrays)
            assert "ragged_page_attention_prefill" in str(program)
        else:
            with pytest.raises(Unsupported, match=reason):
                jax.make_jaxpr(attend)(*arrays)


@pytest.mark.parametrize("page, ahead", [(16, True), (256, True), (512, False)])
def test_leads_with_pages_that_a_card_has_compared(page, ahead, monkeypatch):
    problem = SimpleNamespace(paged=SimpleNamespace(page_size=page))
    monkeypatch.setattr(ragged_page_attention, "problem_of", lambda call: problem)
    assert (ragged_page_attention.priority_for(None) > 100) == ahead


@pytest.mark.parametrize(("rows", "n"), [(5, 3), (1021, 4), (8192, 4)])
def test_batch_invariant_calls_have_the_same_tiles_whatever_rows_there_are(rows, n):
    pytest.importorskip("ejkernel.kernels.triton", reason="it has the other stages")
    layout, ints = KVLayout.interleaved(2, 128), partial(struct, dtype=jnp.int32)
    arrays = (struct(rows, 8, 128), struct(40, 64, 4, 128), ints(n), ints(n, 64), ints(n + 1))

    def tiles_of(rows, n):
        sizes = (n, 8, 2, 128, 128, 40, 64, 64)
        paged = PagedProblem(*sizes, *["bfloat16"] * 3, 128**-0.5, layout)
        problem = RaggedProblem(paged, rows)
        assert ragged_page_attention.unsupported_reason(problem, target) is None
        return ragged_page_attention.tiles(problem, target)

    with on(H200), batch_invariant():
        target = ragged_page_attention.target()
        run = lambda *arrays: ragged_page_attention(*arrays, n)  # noqa: E731
        program = jax.make_jaxpr(run)(*arrays)
        chosen = tiles_of(rows, n)
        assert chosen == tiles_of(300, 70)
    assert program.out_avals[0].shape == arrays[0].shape
    assert "ragged_page_attention_prefill" in str(program)
    # XLA would fuse a slice of padded rows with the next launch, which then loses these rows
    apart = [e for e in equations_of(program.jaxpr) if e.primitive.name == "optimization_barrier"]
    assert [x.aval.shape for e in apart for x in e.outvars] == [arrays[0].shape]
    long = chosen.long_prefill
    assert (long.min_rows, long.min_total_rows, long.decodes) == (128, 0, False)
    assert (chosen.splits, chosen.decode.splits) == (None, 16)


@pytest.mark.parametrize("operation", ["ragged_page_attention", "mla_decode"])
def test_gradients_are_those_of_xla(operation):
    pytest.importorskip("ejkernel.kernels.xla", reason="its implementation has the gradients")
    ints = partial(struct, dtype=jnp.int32)
    if operation == "mla_decode":
        q, others = struct(4, 64, 576), (struct(40, 64, 576), ints(4), ints(4, 10))
        run = partial(mla_decode, latent_dim=512)
    else:
        pytest.importorskip("ejkernel.kernels.triton", reason="it has the other stages")
        q, others = struct(8192, 8, 128), (struct(40, 64, 4, 128), ints(4), ints(4, 64), ints(5))
        run = lambda *arrays: ragged_page_attention(*arrays, 4)  # noqa: E731

    def total(q, *others):
        return run(q, *others).astype(jnp.float32).sum()

    with on(H200):
        program = jax.make_jaxpr(jax.grad(total))(q, *others)
    assert program.out_avals[0].shape == q.shape


# ---- with a card --------------------------------------------------------------------------------

MIX = ragged_cases.Mix(
    (1, 0, 700, 3, 130, 1, 301, 64, 3), (4096, 5, 3000, 777, 130, 16, 2001, 6000, 3)
)
# single rows take less time than the prefills: the same kernel runs them
SINGLE = ragged_cases.Mix(
    (1, 1, 2048, 1, 1, 697, 1, 0, 3, 1, 1), (500, 2000, 6000, 129, 1, 3000, 777, 5, 100, 128, 1999)
)
AT_SIZE = {
    "page 16": MIX,
    "singles": SINGLE,
    "singles, 64 heads": replace(SINGLE, h=64, hk=2),
    "page 64": replace(MIX, ps=64),
    "page 256": replace(MIX, ps=256),
    "cap, one key head": replace(MIX, hk=1, cap=20.0),
    "float16 d64 page 128": replace(MIX, q="float16", kv="float16", d=64, ps=128),
    "e4m3 page 16": replace(MIX, kv="float8_e4m3fn"),
    "int8 page 64, 64 heads": replace(SINGLE, kv="int8", ps=64, h=64, hk=2),
    "e5m2 page 128 cap": replace(MIX, kv="float8_e5m2", ps=128, cap=20.0),
    "int8 float16 d64 page 256": replace(MIX, q="float16", kv="int8", d=64, ps=256),
    "too few rows": ragged_cases.Mix(
        (100, 0, 700, 3, 130, 100, 1, 64, 105), (4096, 5, 3000, 777, 130, 116, 2001, 6000, 500)
    ),
}


@pytest.fixture(scope="module")
def hopper():
    pytest.importorskip("triton")
    reason = ragged_page_attention.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)


def only_seen(m: ragged_cases.Mix, x: dict[str, jax.Array]) -> jax.Array:
    """The cache with nan, or 127, wherever there is no token."""
    seen = in_context(m.lens, x["tables"], *x["cache"].shape[:2])
    ones = (1,) * (x["cache"].ndim - 2)
    other = jnp.asarray(127 if m.kv == "int8" else jnp.nan, x["cache"].dtype)
    return jnp.where(seen.reshape(*seen.shape, *ones), x["cache"], other)


@pytest.mark.gpu
@pytest.mark.parametrize("name", AT_SIZE)
def test_against_float32(name, hopper):
    """The cache is NaN outside the tokens of its sequences; the second run has the same bits."""
    m = AT_SIZE[name]
    x = ragged_cases.draw(m)
    f, args = ragged_cases.reading(ragged_page_attention, m, x | {"cache": only_seen(m, x)})
    step = jax.jit(f)
    out, again = step(*args), step(*args)
    np.testing.assert_array_equal(out, again)
    assert ragged_cases.error(m, x, args[1], out) <= ragged_cases.BOUND[m.q]


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_scales_of_heads_in_8_bits(d, hopper):
    """A key head has the output of one scale times its own; a negative one turns logits."""
    m = replace(MIX, kv="float8_e4m3fn", d=d, ps=64)
    x = ragged_cases.draw(m)
    _, args = ragged_cases.reading(ragged_page_attention, m, x)
    signs = jnp.where(jnp.arange(m.hk) % 3 == 1, -1.0, 1.0)
    turned = [args[0] * jnp.repeat(signs, m.h // m.hk)[:, None].astype(m.q), *args[1:]]
    scales = {"k_scale": m.scale * signs, "v_scale": m.scale * (jnp.arange(m.hk) - 3.0)}
    want = jax.jit(partial(ragged_page_attention, k_scale=m.scale, v_scale=1.0))(*turned)
    got = jax.jit(partial(ragged_page_attention, **scales))(*args)
    factors = jnp.repeat(scales["v_scale"], m.h // m.hk)[:, None]
    want = want.astype(jnp.float32) * factors
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2**-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["page 16", "e4m3 page 16"])
def test_write_then_attend(name, hopper):
    m = AT_SIZE[name]
    x = ragged_cases.draw(m)
    f, args = ragged_cases.writing(ragged_page_attention_v3, m, x)
    step = jax.jit(f, donate_argnums=3)
    compiled = step.lower(*args).compile()
    if m.kv == m.q:  # other work takes more than half as many bytes
        assert compiled.memory_analysis().temp_size_in_bytes < x["cache"].nbytes
    before = x["cache"].unsafe_buffer_pointer()
    out, cache = compiled(*args)
    assert cache.unsafe_buffer_pointer() == before
    assert ragged_cases.error(m, x, cache, out) <= ragged_cases.BOUND[m.q]
