"""Exported programs with symbolic sizes: one program, any size, also after serialisation."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import Mesh

import ejkernel.modules as modules
from ejkernel.ops import InvalidArgument, KernelNotSupported
from ejkernel.types import MaskInfo
from ejktest.calls import CALLS, B, S, call
from ejktest.grids import cover, without
from ejktest.variants import SPECS, axis_words, ids

# packed calls have no batch: their sequences share one axis of rows
PACKED = ("ragged_page_attention", "ragged_page_attention_v3", "grouped_matmul")

# operations with the kernels of recurrent_attention and of ragged_page_attention_v3
SAME_KERNELS = ("gla_attention", "lightning_attention", "ragged_page_attention")


def fast(f):
    """``f`` compiled in the shortest time."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})


LENGTHS = ("kv_len", "q_len", "rows", "seq", "tokens")
TILES = {"q_blocksize": 16, "kv_blocksize": 16}
CFG = {"fwd_params": TILES, "bwd_params": TILES}
CFGS = {name: CFG for name in ("flash_attention", "mla_attention", "blocksparse_attention")}


def of_length(c, n):
    """The arrays of the call with lengths of ``n``, their values repeated; 1 row stays 1."""

    words = axis_words(c)

    def resized(name, x):
        for axis, word in enumerate(words[name]):
            blocks = word in ("q_blocks", "kv_blocks")
            if x.shape[axis] > 1 and (blocks or word in LENGTHS):
                size = -(-n // 4) if blocks else n
                x = jnp.take(x, jnp.arange(size) % x.shape[axis], axis)
        return x

    return replace(c, arrays={name: resized(name, x) for name, x in c.arrays.items()})


def open_shapes(c, *axes):
    """The arrays of the call as shapes; ``axes`` are symbolic, block counts follow lengths."""
    words = axis_words(c)
    names = sorted(set().union(*words.values()) & set(axes) - {"q_blocks", "kv_blocks"})
    sizes = dict(zip(names, export.symbolic_shape(",".join(names)), strict=True))
    for axis in ("q", "kv"):
        if f"{axis}_len" in sizes:
            sizes[f"{axis}_blocks"] = -(-sizes[f"{axis}_len"] // 4)

    def shape(name, x):
        named = zip(words[name], x.shape, strict=True)
        return [n if n == 1 else sizes.get(word, n) for word, n in named]

    return {n: jax.ShapeDtypeStruct(shape(n, x), x.dtype) for n, x in c.arrays.items()}


def program(c, *, gradients=False):
    """The call as a function of its arrays, or the gradient of its outputs' sum."""
    static = dict(c.static, platform="xla", cfg=CFGS.get(c.operation))

    def run(arrays):
        return getattr(modules, c.operation)(**arrays, **static)

    def gradients_of(arrays):
        def value(floats):
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(run({**arrays, **floats})))

        return jax.grad(value)({name: arrays[name] for name in c.gradients})

    return jax.jit(gradients_of if gradients else run)


# linear attention does up to 16 rows one by one, more of them in chunks
LONG = 33


@pytest.mark.parametrize(
    ("operation", "gradients"),
    cover(
        itertools.product(sorted(CALLS), (False, True)),
        *((name, True) for name in sorted(CALLS) if name not in SAME_KERNELS),
        ("flash_attention", False),
        ("mla_decode", False),
    ),
)
def test_every_operation_exports_with_all_open_axes(operation, gradients):
    check_export(operation, SPECS[operation].symbolic, gradients)


@pytest.mark.parametrize(
    "operation",
    cover(
        [name for name in sorted(CALLS) if name not in PACKED],
        *("flash_attention", "gated_delta_rule", "native_sparse_attention", "page_attention"),
    ),
)
def test_every_gradient_exports_with_a_symbolic_batch(operation):
    check_export(operation, ("batch", "states"), gradients=True)


def check_export(operation, axes, gradients):
    c = of_length(call(operation), LONG)
    exported = export.export(program(c, gradients=gradients))(open_shapes(c, *axes))
    if gradients:
        shapes = dict(zip(sorted(c.arrays), exported.in_avals, strict=True))
        assert list(exported.out_avals) == [shapes[name] for name in sorted(c.gradients)]


WITH_GRADIENTS = ("flash_attention", "grouped_matmul")
WITH_LENGTHS = [name for name in sorted(CALLS) if name not in ("page_attention", "mla_decode")]


@pytest.mark.parametrize("operation", without(WITH_LENGTHS, *SAME_KERNELS))
def test_symbolic_lengths(operation):
    c = call(operation)
    run = program(c, gradients=operation in WITH_GRADIENTS)
    exported = export.export(run)(open_shapes(c, *LENGTHS))
    arrays = of_length(c, LONG).arrays
    ours, want = (fast(f)(arrays) for f in (exported.call, run))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


PACKED_CALLS = {
    "flash_attention": ("cum_seqlens_q", "query key value"),
    "gla_attention": ("cu_seqlens", "query key value"),
    "gated_delta_rule": ("cu_seqlens", "query key value"),
    "causal_conv1d": ("cu_seqlens", "x weight"),
    "mean_pooling": ("cu_seqlens", "x"),
}


@pytest.mark.parametrize("operation", PACKED_CALLS)
def test_packed_sequences_of_symbolic_length(operation):
    starts, names = PACKED_CALLS[operation]
    whole = call(operation).arrays
    arrays = {n: whole[n] if n == "weight" else whole[n][:1] for n in names.split()}
    if operation == "mean_pooling":
        arrays = {"x": arrays["x"][0]}
    arrays[starts] = jnp.asarray([0, 5, 5, 9], jnp.int32)
    run = jax.jit(lambda arrays: getattr(modules, operation)(**arrays, platform="xla"))
    (n,) = export.symbolic_shape("n")

    def shape(x):
        return jax.ShapeDtypeStruct([n if m == S else m for m in x.shape], x.dtype)

    exported = export.export(run)({name: shape(x) for name, x in arrays.items()})
    np.testing.assert_allclose(exported.call(arrays), run(arrays), atol=1e-5)


@pytest.mark.parametrize(
    ("operation", "sizes", "message"),
    [
        ("flash_attention", {"query": (B, S, "n", 8)}, "query: .*'heads' .*batch, q_len, kv_len, "),
        ("page_attention", {"key_cache": (7, "n", 2, 8)}, "key_cache: .*'page_size'"),
        (
            "mla_attention",
            {"cu_seqlens": ("n",), "query": (1, S, 4, 12), "key_value": (1, S, 5)},
            "cu_seqlens: .*repeat the last entry",
        ),
    ],
)
def test_a_size_that_must_be_a_number_is_named(operation, sizes, message):
    c = call(operation)
    (n,) = export.symbolic_shape("n")
    sizes = {name: [n if m == "n" else m for m in shape] for name, shape in sizes.items()}
    arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in c.arrays.items()}
    if "cu_seqlens" in sizes:
        arrays["b_k"] = jax.ShapeDtypeStruct((1, S, 4), np.float32)
    for name, shape in sizes.items():
        kind = np.int32 if name == "cu_seqlens" else np.float32
        arrays[name] = jax.ShapeDtypeStruct(shape, kind)
    run = jax.jit(lambda a: getattr(modules, operation)(**a, **c.static, platform="xla"))
    with pytest.raises(InvalidArgument, match=message):
        export.export(run)(arrays)


def test_a_ring_leaves_the_batch_open_and_no_length():
    mesh = Mesh(np.array(jax.devices()[:2]), ("sp",))

    def attend(x):
        return modules.ring_attention(x, x, x, axis_name="sp", mesh=mesh, platform="xla")

    batch, length = export.symbolic_shape("b, 2 * s")
    x = jax.ShapeDtypeStruct((batch, S, 4, 8), np.float32)
    for f in (attend, jax.grad(lambda x: jnp.sum(attend(x)))):
        assert export.export(jax.jit(f))(x).out_avals[0].shape == x.shape
    with pytest.raises(InvalidArgument, match=r"query: .*'q_len' \(ring_attention takes .*batch;"):
        export.export(jax.jit(attend))(jax.ShapeDtypeStruct((B, length, 4, 8), np.float32))


def test_a_mask_travels_with_its_program():
    c = call("flash_attention")
    qkv = {n: c.arrays[n] for n in ("query", "key", "value")}
    shapes = open_shapes(replace(c, arrays=qkv), "batch")
    mask = MaskInfo.from_segments(ids([0] * 5 + [1] * (S - 5))) & MaskInfo(sliding_window=3)
    run = jax.jit(lambda a, m: modules.flash_attention(**a, mask_info=m, platform="xla"))
    exported = export.export(run)(shapes, mask)
    pytest.importorskip("flatbuffers")  # what JAX serialises with
    again = export.deserialize(exported.serialize())
    np.testing.assert_allclose(again.call(qkv, mask), run(qkv, mask), atol=1e-6)


def test_a_mask_builder_and_a_plan_of_symbolic_length():
    query = call("blocksparse_attention").arrays["query"]
    arrays, lens, starts = call("ragged_page_attention").arrays, [5, 9, 0], [0, 1, 5, 5]
    lens, starts = np.int32(lens), np.int32(starts)
    (n,) = export.symbolic_shape("n")

    def blocks(x):
        def lower(q_len, kv_len, heads):
            return jnp.tri(-(-q_len // 4), -(-kv_len // 4), dtype=bool)

        sizes = {"q_block_size": 4, "kv_block_size": 4}
        return modules.blocksparse_attention(x, x, x, mask_builder=lower, **sizes, platform="xla")

    def step(queries):
        plan = modules.plan_ragged_attention(lens, starts, 2, tokens=queries.shape[0])
        read = modules.ragged_page_attention
        return read(**{**arrays, "queries": queries}, plan=plan, platform="xla")

    for f, x in ((blocks, query), (step, arrays["queries"])):
        shape = jax.ShapeDtypeStruct([n if m in (S, 6) else m for m in x.shape], x.dtype)
        exported = export.export(jax.jit(f))(shape)
        np.testing.assert_allclose(exported.call(x), f(x), atol=1e-6)


def test_symbolic_sizes_are_neither_tuned_nor_given_to_other_platforms():
    arrays = open_shapes(call("flash_attention"), "batch")
    found = modules.supports("flash_attention", **arrays, platform="triton")
    assert not found
    with pytest.raises(KernelNotSupported):
        jax.eval_shape(lambda a: modules.flash_attention(**a, platform="triton"), arrays)
    executor = modules.create_default_executor(autotune=True)
    told = executor.explanation(modules.FlashAttention(), **arrays)
    assert (told.tier, told.platform) == ("heuristics", "xla")
