"""Hopper flash attention where there is no Hopper GPU.

The kernels themselves run on a GPU only (``test_gpu_card.py``). Here they are lowered
for one, and what surrounds them is run with doubles that read the same operands: a block outside
the ranges is not read, one inside the full range is not masked.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec

from ejkernel.kernels.pallas import compat
from ejkernel.kernels.pallas.gpu.common.chip import SHARED, Chip
from ejkernel.ops import ConfigError
from ejkernel.types import MaskInfo

if compat.mosaic_gpu_problem() is not None:
    pytest.skip(compat.mosaic_gpu_problem(), allow_module_level=True)

from ejkernel.kernels.pallas.common.units import unit
from ejkernel.kernels.pallas.gpu.blocksparse_attention.implementation import blocksparse_attention
from ejkernel.kernels.pallas.gpu.flash_attention import (
    forward_softmax,
    implementation,
    lists,
    tiles,
)
from ejkernel.kernels.pallas.gpu.flash_attention.forward import flash_kernel
from ejkernel.kernels.pallas.gpu.flash_attention.forward_form import RANGE
from ejkernel.kernels.pallas.gpu.flash_attention.implementation import (
    DIMS,
    EIGHT_BIT_DIMS,
    flash_attention,
    scaled_dot_product_attention,
)
from ejkernel.types.attention.problem import Problem
from ejkernel.types.attention.softmax import row_delta
from ejktest.attention import Call, arrays, check, run
from ejktest.bound import on, struct
from ejktest.cases import large_logits
from ejktest.drawn import array
from ejktest.grids import cover, without
from ejktest.tolerance import check_close

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")


def gradient(f):
    return jax.grad(lambda *a: f(*a).astype(jnp.float32).sum(), argnums=(0, 1, 2))


def packed(q, k, v, ends):
    return flash_attention(q, k, v, cum_seqlens_q=ends, causal=True)


def with_sinks(q, k, v, sinks):
    return flash_attention(q, k, v, softmax_aux=sinks, causal=True, logits_soft_cap=30.0)


def heads(d, dv, length=1037, kv_length=None):
    kv = kv_length or length
    return struct(2, length, 4, d), struct(2, kv, 2, d), struct(2, kv, 2, dv)


def sparse(q, k, v, pattern):
    return blocksparse_attention(q, k, v, block_mask=pattern, causal=True)


CAUSAL = functools.partial(flash_attention, causal=True)


def eight_bit(q, k, v, q_scale, k_scale):
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": 2.0}
    return flash_attention(q, k, v, **scales, causal=True, out_dtype=jnp.float16)


def of_8_bits(d, length):
    arrays = [struct(2, length, h, d, dtype=jnp.float8_e4m3fn) for h in (4, 2, 2)]
    return (*arrays, struct(2, 4, dtype=jnp.float32), struct(1, 2, dtype=jnp.float32))


LOWERED = {
    "d64": (gradient(CAUSAL), heads(64, 64)),
    "d128": (gradient(CAUSAL), heads(128, 128, 1024)),
    "d192/128": (gradient(CAUSAL), heads(192, 128)),
    "sdpa": (gradient(scaled_dot_product_attention), heads(128, 128)),
    "pairs": (flash_attention, heads(128, 128, 2150, 3000)),
    "d256": (gradient(flash_attention), heads(256, 256, 777, 1000)),
    "window": (functools.partial(flash_attention, sliding_window=(200, 64)), heads(128, 128)),
    "packed": (
        gradient(lambda *a: packed(*a)),
        (*(struct(1, 1024, n, 128) for n in (4, 2, 2)), struct(5, dtype=jnp.int32)),
    ),
    "sparse": (gradient(sparse), (*heads(128, 128, 1000), struct(1, 4, 8, 8, dtype=jnp.bool_))),
    "sparse d64": (gradient(sparse), (*heads(64, 64, 1000), struct(2, 1, 8, 8, dtype=jnp.bool_))),
    "sinks, cap": (with_sinks, (*heads(128, 128), struct(4, 1))),
    "8 bits": (eight_bit, of_8_bits(128, 1037)),
    "8 bits d64": (eight_bit, of_8_bits(64, 300)),
    "8 bits d256": (
        jax.vmap(eight_bit),
        [struct(3, *x.shape, dtype=x.dtype) for x in of_8_bits(256, 300)],
    ),
    "vmap": (
        jax.vmap(gradient(CAUSAL), in_axes=(0, 0, None)),
        (struct(3, 2, 256, 4, 64), struct(3, 2, 256, 4, 64), struct(2, 256, 4, 64)),
    ),
}


@pytest.mark.parametrize(
    "name",
    cover(
        LOWERED,
        # not d128, with the tiles of packed and the passes of d192/128; not 8 bits d64, as vmap is
        *("d192/128", "d256", "packed", "sparse d64", "sinks, cap", "8 bits", "8 bits d256"),
        "vmap",
    ),
)
def test_lowers_for_a_hopper_gpu(name):
    f, shapes = LOWERED[name]
    with on(H200):
        text = jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def shared_bytes(scratch):
    """Shared memory of scratch types: an array begins at a multiple of 1024 bytes."""
    total = 0
    for x in scratch.values() if isinstance(scratch, dict) else scratch:
        if hasattr(x, "num_barriers"):
            total += 8 * int(np.prod(x.num_barriers))
        else:
            total += -(-math.prod(x.shape) * jnp.dtype(x.dtype).itemsize // 1024) * 1024
    return total


def by_pattern(q, k, v):
    pattern = np.ones((1, 1, -(-q.shape[1] // 128), -(-k.shape[1] // 128)), bool)
    return blocksparse_attention(q, k, v, block_mask=pattern, causal=True)


MASKED = {
    "full": flash_attention,
    "causal": CAUSAL,
    "window": functools.partial(flash_attention, sliding_window=(200, 0)),
    "cap": functools.partial(flash_attention, logits_soft_cap=30.0),
    "large cap": functools.partial(flash_attention, logits_soft_cap=99.0),
    "packed": lambda q, k, v: packed(q, k, v, jnp.array([0, 100, q.shape[1]])),
    "pattern": by_pattern,
}


@pytest.mark.parametrize("mask", MASKED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_shared_memory_suffices(monkeypatch, mask, dtype):
    """Kernels of both passes request no more than a program has, for all head dims."""
    requests = []

    def kernel(body, *, out_type, kernel_name, scratch_types=(), **_):
        requests.append((kernel_name, shared_bytes(scratch_types)))
        return lambda *_: tuple(jnp.zeros(x.shape, x.dtype) for x in out_type)

    monkeypatch.setattr(plgpu, "kernel", kernel)
    options = {"out_dtype": jnp.bfloat16} if dtype == "float8_e4m3fn" else {}
    f = functools.partial(MASKED[mask], **options) if options else MASKED[mask]
    dims = [(d, d) for d in EIGHT_BIT_DIMS] if options else DIMS
    if mask == "pattern":
        dims = [(d, dv) for d, dv in dims if d % 64 == 0]
    refused = options and mask in ("cap", "large cap", "packed", "pattern")
    for (d, dv), length in itertools.product(() if refused else dims, (384, 2560)):
        shapes = [struct(1, length, 2, n, dtype=jnp.dtype(dtype)) for n in (d, d, dv)]
        with on(H200):
            jax.eval_shape(f if options else gradient(f), *shapes)
    assert [x for x in requests if x[1] > SHARED] == []
    assert refused or any("forward" in name for name, _ in requests)


def test_named_residuals_keep_the_forward_kernel_from_running_twice():
    policies = jax.checkpoint_policies

    def kernels(policy):
        def layer(q, k, v):
            o = flash_attention(jnp.sin(q), k, v, causal=True)
            return jnp.sum(jnp.sin(o.astype(jnp.float32)))

        f = jax.jit(jax.value_and_grad(jax.checkpoint(layer, policy=policy), (0, 1, 2)))
        with on(H200):
            text = f.trace(*heads(64, 64, 256)).lower(lowering_platforms=("cuda",)).as_text()
        return text.count("@mosaic_gpu")

    # one of forward, and one of all gradients
    assert kernels(policies.save_only_these_names("ejkernel_out", "ejkernel_lse")) == 2
    assert kernels(policies.nothing_saveable) == 3


@pytest.mark.parametrize("name", cover(["d128", "d256", "packed", "sparse"], "d256", "sparse"))
def test_lowers_where_numbers_have_64_bits(name):
    f, shapes = LOWERED[name]
    with on(H200), jax.enable_x64(True):
        text = jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize("d", cover([64, 256], 64))
def test_lowers_inside_a_shard_map_that_tracks_axes(d):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = AbstractMesh((2,), ("x",), axis_types=auto, abstract_device=H200)
    specs = (jax.sharding.PartitionSpec("x"),) * 3
    with jax.sharding.use_abstract_mesh(mesh):
        f = jax.jit(jax.shard_map(gradient(CAUSAL), in_specs=specs, out_specs=specs))
        text = f.trace(*heads(d, d, 300)).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize("slack", [0, 8])
@pytest.mark.parametrize("unit, dtype", [(1.0, "bfloat16"), (0.3, "bfloat16"), (0.3, "float16")])
def test_sums_stay_exact_where_maxima_cross(monkeypatch, unit, dtype, slack):
    """The online softmax alone, and its accumulators as the epilogue reads them."""

    def multiply_add(x, factors, terms):
        wide = (np.asarray(a, np.float64) for a in (x, factors, terms))
        x, factors, terms = (a.reshape(-1, 1) if x.ndim > a.ndim else a for a in wide)
        with np.errstate(over="ignore"):
            return jnp.asarray((x * factors + terms).astype(np.float32))

    monkeypatch.setattr(forward_softmax, "multiply_add", multiply_add)
    monkeypatch.setattr(forward_softmax.plgpu, "layout_cast", lambda x, _: x)
    x, block = large_logits.wandering_maxima(unit, blocks=5), 16
    problem = Problem(1, 64, x.shape[1], 1, 1, 64, 64, dtype, unit)
    kernel = flash_kernel(problem, tiles.ForwardTiles(slack=slack), (), 132)
    v = np.random.default_rng(1).standard_normal(x.shape[1])
    state, acc = forward_softmax.start(kernel.form), 0.0
    for n in range(0, x.shape[1], block):
        s = jnp.asarray(x[:, n : n + block])
        step = forward_softmax.softmax_step
        p, state, alpha = step(kernel.form, s, (), state, forward_softmax.hide_nothing)
        acc = acc * np.asarray(alpha, np.float64) + np.asarray(p, np.float64) @ v[n : n + block]
    m, total, e = (np.asarray(a, np.float64) for a in (*state, 0.0)[:3])
    logits = x.astype(np.float64) * unit
    high = logits.max(1)
    weights = np.exp(logits - high[:, None])
    shift = np.exp2(-e) * np.exp(m * unit - high)
    np.testing.assert_allclose(total * shift, weights.sum(1), rtol=2**-18)
    np.testing.assert_allclose(acc * shift, weights @ v, rtol=0, atol=2**-18 * block * 5)
    assert np.asarray(total).max() < 2.0**50


@pytest.mark.parametrize("unit, is_right", [(1.0, True), (-1.0, True), (10.0, False)])
def test_a_step_without_maxima_is_right_or_seen_to_be_wrong(monkeypatch, unit, is_right):
    """Sums of logits of 60 and -60 are in range; those of 600 are seen not to be."""
    lane_sums = lambda x, rows, factors, **_: rows + jnp.sum(x, axis=1)  # noqa: E731
    monkeypatch.setattr(forward_softmax, "lane_sums", lane_sums)
    monkeypatch.setattr(forward_softmax.plgpu, "layout_cast", lambda x, _: x)
    problem = Problem(1, 64, 64, 1, 1, 64, 64, "bfloat16", unit)
    kernel = flash_kernel(problem, tiles.ForwardTiles(unshifted_first=True), (), 132).unshifted
    x = np.random.default_rng(0).uniform(-60, 60, (64, 64)).astype(np.float32)
    x[0] = -60.0
    total = forward_softmax.start(kernel.form)
    for n in range(0, 64, 16):
        s = jnp.asarray(x[:, n : n + 16])
        step = forward_softmax.softmax_step
        _, total, factor = step(kernel.form, s, (), total, forward_softmax.hide_nothing)
        assert factor is None
    total = np.asarray(total[0], np.float64)
    inside = (total >= RANGE[0]) & (total <= RANGE[1])
    assert inside.all() == is_right
    want = np.exp(unit * x.astype(np.float64)).sum(1)
    np.testing.assert_allclose(total[inside], want[inside], rtol=2**-16)


# ---- what surrounds the kernels ----------------------------------------------------------------


def _visible(problem, block_q, block_kv, t, transposed):
    """Pairs that a kernel computes: inside its blocks, and unmasked there."""
    p, rules = problem, problem.rules
    i, j = jnp.arange(p.q_len)[:, None], jnp.arange(p.kv_len)[None]
    seen = jnp.ones((1, 1, p.q_len, p.kv_len), bool)
    if rules.band.lo is not None:
        seen &= j - i >= rules.band.lo
    if rules.band.hi is not None:
        seen &= j - i <= rules.band.hi
    if "q_ids" in t:
        q_ids, kv_ids = t["q_ids"][:, : p.q_len], t["kv_ids"][:, : p.kv_len]
        seen &= (q_ids[:, :, None] == kv_ids[:, None])[:, None]
    if "tiles" in t:
        return _in_lists(t, seen, block_q, block_kv, i, j, transposed)
    if "q_ids" not in t:
        return seen
    row_block, column_block = (
        (j // block_kv, i // block_q) if transposed else (i // block_q, j // block_kv)
    )
    ranges = t["ranges"][:, :, jnp.broadcast_to(row_block, (p.q_len, p.kv_len))]
    start, full_start, full_stop, stop = (ranges[..., c] for c in range(4))
    visited = (column_block >= start) & (column_block < stop)
    return visited & (seen | ((column_block >= full_start) & (column_block < full_stop)))


def _in_lists(t, seen, block_q, block_kv, i, j, transposed):
    visited, full_tiles = (t["tiles"] & bit != 0 for bit in (lists.SOME, lists.EVERY))
    if transposed:
        visited, full_tiles = visited.swapaxes(2, 3), full_tiles.swapaxes(2, 3)
    if "bits" in t:
        (row, column), block = ((j, i), block_q) if transposed else ((i, j), block_kv)
        word = t["bits"][:, :, row // 64, column // block]
        seen &= (word >> (row % 64 // 16 * 8 + column % block // 16) & 1) != 0
    visited, full_tiles = (y[:, :, i // block_q, j // block_kv] for y in (visited, full_tiles))
    return visited & (seen | full_tiles)


def _attention(problem, visible, q, k, v, sink=None):
    p = problem
    f32 = functools.partial(jnp.asarray, dtype=jnp.float32)
    q, k, v = f32(q), *(jnp.repeat(f32(x), p.group, 2) for x in (k, v))
    x = jnp.einsum("bqhd,bkhd->bhqk", q, k) * p.scale
    if p.soft_cap:
        x = p.soft_cap * jnp.tanh(x / p.soft_cap)
    x = jnp.where(visible, x, -jnp.inf)
    total = jax.nn.logsumexp(x, -1)
    alive = jnp.isfinite(total)
    if sink is not None:
        total = jnp.where(alive, jnp.logaddexp(total, sink[:, :, None]), total)
    prob = jnp.where(alive[..., None], jnp.exp(x - jnp.where(alive, total, 0.0)[..., None]), 0.0)
    return jnp.einsum("bhqk,bkhd->bqhd", prob, v), total


def forward_double(problem, tiles, t, programs):
    q, k, v = (t[name] for name in "qkv")
    assert q.shape[0] == k.shape[0] == problem.batch
    seen = _visible(problem, tiles.block_q, tiles.block_kv, t, False)
    o, lse = _attention(problem, seen, q, k, v, t.get("sink"))
    return o.astype(q.dtype), lse, jnp.where(jnp.isfinite(lse), lse / unit(problem), jnp.inf)


def backward_double(
    problem, tiles, cores, *, q, k, v, do, base, delta=None, o=None, dlse=None, **t
):
    if delta is None:
        delta = row_delta(o, do, dlse)
    ids = {name: x for name, x in t.items() if name in ("q_ids", "kv_ids")}
    walks = {
        by: ids | {name.removeprefix(by): x for name, x in t.items() if name.startswith(by)}
        for by in ("by_key_", "by_query_")
    }
    if "tiles" in walks["by_key_"]:
        seen = _visible(problem, tiles.block_q, tiles.block_kv, walks["by_key_"], True)
        of_rows = _visible(problem, 128, 64, walks["by_query_"], False)
        seen, of_rows = jnp.broadcast_arrays(seen, of_rows)
        jax.debug.callback(np.testing.assert_array_equal, seen, of_rows)
    else:
        seen = _visible(problem, tiles.block_q, tiles.block_kv, t, True)

    def logits(q, k):
        x = jnp.einsum("bqhd,bkhd->bhqk", q, jnp.repeat(k, problem.group, 2)) * problem.scale
        return problem.soft_cap * jnp.tanh(x / problem.soft_cap) if problem.soft_cap else x

    f32 = [x.astype(jnp.float32) for x in (q, k, v, do)]
    x, back = jax.vjp(logits, *f32[:2])
    alive = jnp.isfinite(base)[..., None]
    shift = jnp.where(alive, base[..., None] * unit(problem), 0.0)
    prob = jnp.where(seen & alive, jnp.exp(x - shift), 0.0)
    dp = jnp.einsum("bqhd,bkhd->bhqk", f32[3], jnp.repeat(f32[2], problem.group, 2))
    dq, dk = back(prob * (dp - delta[..., None]))
    dv = jnp.einsum("bhqk,bqhd->bkhd", prob, f32[3])
    dv = dv.reshape(*dv.shape[:2], problem.kv_heads, problem.group, -1).sum(3)
    return tuple(g.astype(x.dtype) for g, x in zip((dq, dk, dv), (q, k, v), strict=True))


@pytest.fixture
def doubles(monkeypatch):
    monkeypatch.setattr(implementation, "flash_forward", forward_double)
    monkeypatch.setattr(implementation, "backward", backward_double)
    monkeypatch.setattr(implementation, "with_lists", lambda problem, tensors, programs: tensors)
    monkeypatch.setattr(flash_attention, "target", Chip)
    monkeypatch.setattr(blocksparse_attention, "target", Chip)


HALF = ("float16",) * 3
SIZES = {"b": 2, "q": 200, "k": 200, "h": 4, "hk": 2, "d": 64, "dtypes": HALF}
SIZES |= {"blocks": (128, 128)}
CALLS = [
    Call("plain", **SIZES | {"k": 150}),
    Call("offset", **SIZES, mask={"causal": True, "causal_offset": -150}),
    Call("window", **SIZES, mask={"sliding_window": (30, 10)}, sinks=(4, 2), cap=5.0),
    Call(
        "packed",
        **SIZES | {"b": 1, "q": 400, "k": 400},
        mask={"cum_seqlens_q": np.array([0, 60, 60, 342, 380]), "causal": True},
    ),
]


@pytest.mark.parametrize(
    "call", without(CALLS, *(c for c in CALLS if str(c) in ("plain", "offset"))), ids=str
)
def test_operands_describe_the_call(doubles, call):
    x = arrays(call)
    check(call, x, *run(flash_attention, call, x))


IDS = np.searchsorted([60, 142, 180], np.arange(200), side="right").astype(np.int32)[None]
IDS[IDS > 2] = -1
FEW = SIZES | {"b": 1, "h": 2, "hk": 1}
SPARSE = [
    (Call("across", **FEW | {"k": 150}, mask={"causal": True}), (32, 48), (1, 2)),
    (
        Call("window", **FEW | {"b": 2, "d": 128}, mask={"sliding_window": (50, 80)}, sinks=(2, 2)),
        (16, 128), (2, 1),
    ),
    (Call("segments", **FEW, mask={"q_segment_ids": IDS}), (128, 128), (1, 1)),
]  # fmt: skip


@pytest.mark.parametrize("call, blocks, lead", SPARSE, ids=lambda x: str(getattr(x, "name", "")))
def test_lists_describe_the_call(doubles, call, blocks, lead):
    shape = (*lead, -(-call.q // blocks[0]), -(-call.k // blocks[1]))
    pattern = np.random.default_rng(1).random(shape) < 0.5
    pattern[..., 0, :] = False
    sizes = {"q_block_size": blocks[0], "kv_block_size": blocks[1]}

    def sparse(*args, cfg, also=None, q_segment_ids=None, **options):
        if q_segment_ids is not None:
            options["mask_info"] = MaskInfo.from_segments(q_segment_ids, q_segment_ids)
        return blocksparse_attention(*args, block_mask=pattern, **sizes, **options)

    pairs = np.repeat(np.repeat(pattern, blocks[0], 2), blocks[1], 3)[..., : call.q, : call.k]
    call = dataclasses.replace(call, mask={**call.mask, "also": pairs})
    x = arrays(call)
    check(call, x, *run(sparse, call, x))


@pytest.mark.promotes
def test_a_mapped_axis_joins_the_batch(doubles):
    rng = np.random.default_rng(0)
    q, k, v = (
        array(rng.standard_normal((2, 2, n, h, 64)), jnp.float16)
        for n, h in ((130, 4), (150, 2), (150, 2))
    )
    ids = array(np.sort(rng.integers(-1, 3, (2, 2, 150)), -1), jnp.int32)

    def loss(q, k, v, ids, sinks):
        mask = MaskInfo.from_segments(ids[:, :130], ids)
        o, lse = flash_attention(
            q, k, v, mask_info=mask, causal=True, softmax_aux=sinks, return_lse=True
        )
        return jnp.sum(o.astype(jnp.float32) ** 2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0))

    grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 4)))
    sinks = array(rng.standard_normal((2, 4)), jnp.float32)
    for axes in ((0, 0, None, 0, None), (0, None, None, None, 0)):
        args = [
            x if axis == 0 else x[0] for x, axis in zip((q, k, v, ids, sinks), axes, strict=True)
        ]
        if axes[4] is None:
            args[4] = sinks[0]
        together = jax.jit(jax.vmap(grad, in_axes=axes))(*args)
        for n in range(2):
            alone = grad(*(x[n] if axis == 0 else x for x, axis in zip(args, axes, strict=True)))
            for a, t in zip(alone, together, strict=True):
                check_close(t[n], np.asarray(a, np.float64))


def test_backward_tiles_that_cannot_be_are_refused(doubles):
    x = jnp.zeros((1, 128, 1, 128), jnp.bfloat16)
    for bad in (
        {"kv_blocksize": 64},  # half of what two warpgroups own
        {"q_blocksize": 128},
        {"num_stages": 4},
    ):
        (name,) = bad
        with pytest.raises(ConfigError, match=f"bwd_params: {name}={bad[name]}"):
            flash_attention(x, x, x, cfg={"bwd_params": bad})
    flash_attention(x, x, x, cfg={"bwd_params": {"num_stages": 3, "q_blocksize": 64}})


@pytest.mark.parametrize("strategy", cover(["ring", "all_gather", "ulysses"], "ring"))
def test_attention_over_a_sharded_sequence_is_lowered(strategy):
    """Under vmap and differentiated; the first keys are sent before the first kernel runs."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = AbstractMesh((2,), ("sp",), axis_types=auto, abstract_device=H200)
    options = {"layout": "zigzag", "causal": True, "cfg": {"context_parallel": strategy}}
    attend = functools.partial(implementation.ring_attention, axis_name="sp", **options)
    spec = PartitionSpec(None, None, "sp")
    sharded = jax.shard_map(jax.vmap(attend), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    q, k = struct(2, 1, 2048, 8, 128), struct(2, 1, 2048, 2, 128)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(gradient(sharded)).trace(q, k, k)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    sent = {"ring": "collective_permute", "all_gather": "all_gather", "ulysses": "all_to_all"}
    assert 0 < text.index(f"stablehlo.{sent[strategy]}") < text.index("@mosaic_gpu")


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_calls_during_a_transfer_leave_multiprocessors_to_it(layout, monkeypatch):
    """The last step of a ring sends nothing. Heads go in groups: all but one travel meanwhile."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = AbstractMesh((2,), ("sp",), axis_types=auto, abstract_device=H200)
    kernel, found = implementation.RingAttention, []
    choose = kernel.choose

    def spy(self, problem, target):
        found.append((problem, choose(self, problem, target)))
        return found[-1][1]

    monkeypatch.setattr(kernel, "choose", spy)
    options = {"axis_name": "sp", "layout": layout, "causal": True}
    attend = functools.partial(implementation.ring_attention, **options)
    spec, q = PartitionSpec(None, "sp"), struct(1, 65536, 8, 128)
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(sharded, q, q, q)
    problem, tiles = found[0]
    first = {piece for pieces in problem.plan.pieces[0] for piece in pieces}
    calls = list(zip(problem.calls, tiles.calls, strict=True))
    guided = {piece: of_piece.fwd.guided for (piece, _), of_piece in calls}
    assert guided == {piece: piece in first for piece in guided}
    assert set(guided.values()) == {True, False}
    assert problem.head_groups > 1 and tiles.exchanged.fwd.guided
    for (piece, of_piece), call_tiles in calls:
        scheduler = flash_kernel(of_piece, call_tiles.fwd, (), 132).scheduler
        assert scheduler.grid > 1000 if piece in first else scheduler.grid == 132
        assert len(scheduler.order({})) == scheduler.grid
