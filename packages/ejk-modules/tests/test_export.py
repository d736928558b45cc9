"""Exported programs with symbolic sizes: one program, any size, also after serialisation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import ejkernel.modules as modules
from ejkernel.ops import InvalidArgument, KernelNotSupported
from ejkernel.types import MaskInfo, calls
from ejkernel.types.calls.signature import axes_of
from ejktest.calls import CALLS, B, S, call
from ejktest.variants import ids

# packed calls have no batch: their sequences share one axis of rows
PACKED = ("ragged_page_attention", "ragged_page_attention_v3", "grouped_matmul")


def symbolic(x, size):
    batched = x.ndim and x.shape[0] == B
    return jax.ShapeDtypeStruct((size, *x.shape[1:]) if batched else x.shape, x.dtype)


def fast(f):
    """``f`` compiled in the shortest time."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})


@pytest.mark.parametrize("operation", [name for name in sorted(CALLS) if name not in PACKED])
def test_a_symbolic_batch(operation):
    c = call(operation)
    run = jax.jit(lambda arrays: getattr(modules, operation)(**arrays, **c.static, platform="xla"))
    (size,) = export.symbolic_shape("b")
    exported = export.export(run)({n: symbolic(x, size) for n, x in c.arrays.items()})
    ours, want = (fast(f)(dict(c.arrays)) for f in (exported.call, run))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


SPECS = {spec.name: spec for spec in (getattr(calls, name) for name in calls.__all__)}
LENGTHS = ("kv_len", "q_len", "rows", "seq", "tokens")
TILES = {"q_blocksize": 16, "kv_blocksize": 16}
CFG = {"fwd_params": TILES, "bwd_params": TILES}
CFGS = {name: CFG for name in ("flash_attention", "mla_attention", "blocksparse_attention")}


def words(operation, name, x):
    """Axis and word of every axis of an argument that has a length."""
    (p,) = (p for p in SPECS[operation].boundary.parameters if p.name == name)
    found = [word.lstrip("#") for word in axes_of(p, x)]
    return {i: w for i, w in enumerate(found) if w in (*LENGTHS, "q_blocks", "kv_blocks")}


def of_length(operation, arrays, n):
    """The arrays with lengths of ``n``, their values repeated; what has 1 row keeps it."""

    def resized(name, x):
        for axis, word in words(operation, name, x).items():
            size = -(-n // 4) if word.endswith("blocks") else n
            x = x if x.shape[axis] == 1 else jnp.take(x, jnp.arange(size) % x.shape[axis], axis)
        return x

    return {name: resized(name, x) for name, x in arrays.items()}


def program(operation, c):
    """The call as a function of its arrays; for a few operations of its gradients."""
    static = dict(c.static, platform="xla", cfg=CFGS.get(operation))

    def run(arrays):
        return getattr(modules, operation)(**arrays, **static)

    def gradients(arrays):
        def value(floats):
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(run({**arrays, **floats})))

        return jax.grad(value)({name: arrays[name] for name in c.gradients})

    return jax.jit(gradients if operation in WITH_GRADIENTS else run)


WITH_GRADIENTS = ("flash_attention", "grouped_matmul")
WITH_LENGTHS = [name for name in sorted(CALLS) if name not in ("page_attention", "mla_decode")]


@pytest.mark.parametrize("operation", WITH_LENGTHS)
def test_symbolic_lengths(operation):
    c = call(operation)
    run = program(operation, c)
    names = {w for n, x in c.arrays.items() for w in words(operation, n, x).values()}
    names = sorted(names & set(LENGTHS))
    sizes = dict(zip(names, export.symbolic_shape(",".join(names)), strict=True))
    for axis in ("q", "kv"):
        if f"{axis}_len" in sizes:
            sizes[f"{axis}_blocks"] = -(-sizes[f"{axis}_len"] // 4)

    def open_sizes(name, x):
        shape = list(x.shape)
        for axis, word in words(operation, name, x).items():
            shape[axis] = sizes[word]
        return jax.ShapeDtypeStruct(shape, x.dtype)

    exported = export.export(run)({n: open_sizes(n, x) for n, x in c.arrays.items()})
    arrays = of_length(operation, c.arrays, 33)
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
        ("flash_attention", {"query": (B, S, "n", 8)}, "query: .*'heads' .*batch, q_len, kv_len; "),
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


def test_a_mask_travels_with_its_program():
    c = call("flash_attention")
    qkv = {n: c.arrays[n] for n in ("query", "key", "value")}
    mask = MaskInfo.from_segments(ids([0] * 5 + [1] * (S - 5))) & MaskInfo(sliding_window=3)
    run = jax.jit(lambda a, m: modules.flash_attention(**a, mask_info=m, platform="xla"))
    (size,) = export.symbolic_shape("b")
    exported = export.export(run)({n: symbolic(x, size) for n, x in qkv.items()}, mask)
    pytest.importorskip("flatbuffers")  # what JAX serialises with
    again = export.deserialize(exported.serialize())
    np.testing.assert_allclose(again.call(qkv, mask), run(qkv, mask), atol=1e-6)


def test_symbolic_sizes_are_neither_tuned_nor_given_to_other_platforms():
    c = call("flash_attention")
    (size,) = export.symbolic_shape("b")
    arrays = {n: symbolic(x, size) for n, x in c.arrays.items()}
    found = modules.supports("flash_attention", **arrays, platform="triton")
    assert not found
    with pytest.raises(KernelNotSupported):
        jax.eval_shape(lambda a: modules.flash_attention(**a, platform="triton"), arrays)
    executor = modules.create_default_executor(autotune=True)
    told = executor.explanation(modules.FlashAttention(), **arrays)
    assert (told.tier, told.platform) == ("heuristics", "xla")
