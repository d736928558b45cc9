"""Sharded arguments without ``mesh=``: explicit meshes, the compiler's own partitioning, shard_map.

Programs are traced where a wrong type is what could go wrong, compiled without optimisation where
the partitioning is, and run where the values are.
"""

import inspect
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel.modules as modules
from ejkernel.modules._table import operation_class
from ejkernel.types import MaskInfo
from ejkernel.types.calls.signature import axes_of
from ejktest import calls
from ejktest.grids import cover

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")


@pytest.fixture(autouse=True)
def untuned(monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")


SPREAD = {
    **dict.fromkeys(("heads", "kv_heads", "combined_kv_heads", "columns"), "tp"),
    **dict.fromkeys(("channels", "channels_0"), "tp"),
    "batch": "dp",
}
SMALL = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def mesh_of(kind, shape=(2, 2), names=("dp", "tp")):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def spec_of(operation, name, arguments):
    """Batch over dp and heads over tp, wherever the argument has them."""
    spec = operation_class(operation).spec
    parameter = next(p for p in spec.boundary.parameters if p.name == name)
    override = spec.argument_axes({**spec.boundary.defaults, **arguments})
    words = axes_of(parameter, arguments[name], override)
    sizes = arguments[name].shape
    pairs = zip(words, sizes, strict=True)
    return P(*(SPREAD.get(word.lstrip("#")) if size > 1 else None for word, size in pairs))


def specs_of(c):
    return {name: spec_of(c.operation, name, c.arguments) for name in c.arrays}


def pulled(c, ones=jnp.ones_like):
    """Outputs and the gradients of everything differentiable, of a call's arrays."""
    function = getattr(modules, c.operation)

    def run(arrays):
        wanted = {name: arrays[name] for name in c.gradients if name in arrays}
        out, pull = jax.vjp(lambda g: function(**{**arrays, **g}, **c.static), wanted)
        return out, pull(jax.tree.map(ones, out))[0]

    return run


def abstract(x, mesh, spec):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def entries(sharding):
    spec = [e[0] if isinstance(e, tuple) and len(e) == 1 else e for e in sharding.spec]
    while spec and spec[-1] is None:
        spec.pop()
    return spec


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-5, atol=2e-5)


# ---- explicit meshes --------------------------------------------------------------------------

OUTPUTS = {
    "attention": [["dp", None, "tp"], ["dp", "tp"]],
    "flash_attention": [["dp", None, "tp"], ["dp", None, "tp"]],
    "ragged_page_attention": [[None, "tp"]],
    "ragged_page_attention_v3": [[None, "tp"], [None, None, "tp"]],
    "recurrent_attention": [["dp", None, "tp"], ["dp", "tp"]],
    "gated_delta_rule": [["dp", None, "tp"], ["dp", "tp"]],
    "causal_conv1d": [["dp", None, "tp"], ["dp", "tp"]],
    "gla_attention": [["dp", None, "tp"], ["dp", "tp"]],
    "lightning_attention": [["dp", None, "tp"], ["dp", "tp"]],
    "mla_decode": [["dp", "tp"]],
    "grouped_matmul": [[None, "tp"]],
}


@pytest.mark.parametrize("operation", sorted(calls.CALLS))
def test_explicit_types(operation):
    """Outputs lie as the query does, gradients as their inputs."""
    c, mesh = calls.call(operation), mesh_of(AxisType.Explicit)
    specs = specs_of(c)
    arrays = {name: abstract(x, mesh, specs[name]) for name, x in c.arrays.items()}
    out, gradients = jax.eval_shape(pulled(c), arrays)
    wanted = OUTPUTS.get(operation, [["dp", None, "tp"]])
    assert [entries(x.sharding) for x in jax.tree.leaves(out)] == wanted
    for name, x in gradients.items():
        assert entries(x.sharding) == entries(arrays[name].sharding), name


def qkv(kv_heads=4):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(4, 8, 8, 8)] + [(4, 8, kv_heads, 8)] * 2
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


BSHD = P("dp", None, "tp")


@pytest.mark.parametrize("kv_heads", cover([8, 2], 2))
def test_explicit_values(kv_heads):
    """Eager and jitted, inside ``jax.set_mesh`` and outside; keys of too few heads stay whole."""
    mesh = mesh_of(AxisType.Explicit, (2, 4))
    arrays = qkv(kv_heads)
    of_keys = BSHD if kv_heads == 8 else P("dp")
    specs = (BSHD, of_keys, of_keys)
    pairs = zip(arrays, specs, strict=True)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]
    ids = np.asarray([[0] * 5 + [1] * 3, [3] * 8] * 2, np.int32)
    options = dict(
        mask_info=MaskInfo.from_segments(ids), dropout_prob=0.3, dropout_seed=7, causal=True,
        bias=np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 1, 8, 8),
        softmax_aux=np.zeros(2, np.float32),
    )  # fmt: skip

    def attend(q, k, v):
        return modules.flash_attention(q, k, v, **options)

    def both(q, k, v):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(jnp.sin(out))

    expected = jax.jit(both)(*arrays)
    found = jax.jit(both)(*placed)
    assert_same(found, expected)
    assert [entries(x.sharding) for x in found[1]] == [entries(x.sharding) for x in placed]
    eager = attend(*placed)
    assert_same(eager, expected[0])
    assert entries(eager.sharding) == ["dp", None, "tp"]
    assert entries((placed[0] + eager).sharding) == ["dp", None, "tp"]
    if kv_heads == 2:
        with jax.set_mesh(mesh):
            assert_same(attend(*placed), expected[0])
            assert_same(attend(*arrays), expected[0])


def test_explicit_replicated_query_stays_replicated():
    mesh = mesh_of(AxisType.Explicit)
    q, k, v = (abstract(x, mesh, s) for x, s in zip(qkv(), (P(), BSHD, BSHD), strict=True))
    pull = jax.grad(lambda q, k, v: modules.flash_attention(q, k, v).sum(), (0, 1, 2))
    assert entries(jax.eval_shape(modules.flash_attention, q, k, v).sharding) == []
    found = [entries(x.sharding) for x in jax.eval_shape(pull, q, k, v)]
    assert found == [[], ["dp", None, "tp"], ["dp", None, "tp"]]


def test_explicit_axes_beside_others():
    """Axes of one device split nothing, auto axes are the compiler's, manual ones the caller's."""
    arrays = qkv(8)
    expected = modules.flash_attention(*arrays, causal=True)

    def attend(q, k, v):
        return modules.flash_attention(q, k, v, causal=True)

    thin = mesh_of(AxisType.Explicit, (2, 1, 4), ("dp", "sp", "tp"))
    spec = NamedSharding(thin, P("dp", "sp", "tp"))
    placed = [jax.device_put(x, spec) for x in arrays]
    out = attend(*placed)
    assert_same(out, expected)
    assert entries((placed[0] + out).sharding) == ["dp", "sp", "tp"]

    mixed = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit, AxisType.Auto))
    placed = [jax.device_put(x, NamedSharding(mixed, BSHD)) for x in arrays]
    compiled = jax.jit(attend).lower(*placed).compile()
    assert_same(compiled(*placed), expected)
    assert moved(compiled.as_text(), 0) == []

    mesh = mesh_of(AxisType.Explicit, (2, 4))
    placed = [jax.device_put(x, NamedSharding(mesh, BSHD)) for x in arrays]
    local = jax.shard_map(attend, mesh=mesh, in_specs=BSHD, out_specs=BSHD)
    outer = jax.shard_map(attend, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
    for mapped in (local, outer):
        assert_same(jax.jit(mapped)(*placed), expected)


@pytest.mark.parametrize("spec", [P("dp"), P(None, None, "tp"), BSHD, P(("dp", "tp"))])
def test_specs_name_explicit_axes_and_automatic_ones(spec):
    types = (AxisType.Auto, AxisType.Explicit)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=types, devices=jax.devices()[:4])
    gradients = lambda f: jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2)))  # noqa: E731
    attend = partial(modules.flash_attention, causal=True)
    ours = gradients(partial(attend, mesh=mesh, in_specs=(spec,) * 3))
    for one, other in zip(ours(*qkv(4)), gradients(attend)(*qkv(4)), strict=True):
        assert_same(one, other)


def test_explicit_ring():
    mesh = mesh_of(AxisType.Explicit, (2, 2, 2), ("dp", "sp", "tp"))
    arrays = qkv(8)
    placed = [jax.device_put(x, NamedSharding(mesh, P("dp", "sp", "tp"))) for x in arrays]
    out = modules.ring_attention(*placed, axis_name="sp", causal=True)
    assert_same(out, modules.flash_attention(*arrays, causal=True))
    assert entries(out.sharding) == ["dp", "sp", "tp"]


def test_explicit_vmap():
    mesh = mesh_of(AxisType.Explicit, (2, 4))
    placed = [jax.device_put(x, NamedSharding(mesh, BSHD)) for x in qkv(8)]
    one = lambda q, k, v: modules.flash_attention(q[None], k[None], v[None])[0]  # noqa: E731
    out = jax.vmap(one)(*placed)
    assert_same(out, modules.flash_attention(*qkv(8)))
    assert entries(out.sharding) == ["dp", None, "tp"]


@pytest.mark.parametrize(
    ("specs", "mask", "message"),
    [
        ((P(), P(None, "dp"), P()), None, r"^arguments: axis kv_len is sharded over .*q_len over"),
        ((P(None, None, None, "tp"), P(), P()), None, r"^query: axis head_dim may not be sharded"),
        ((P("dp"), P("tp"), P()), None, r"^key: axis batch is sharded over \('tp',\), but over"),
        ((P(), P(None, None, "tp"), P()), None, r"^arguments: 2 kv heads cannot be sharded over 4"),
    ],
)
def test_explicit_errors(specs, mask, message):
    mesh = mesh_of(AxisType.Explicit, (2, 4))
    shapes = qkv(2 if "2 kv heads" in message else 4)
    if "2 kv heads" in message:  # not even JAX would cut two heads into four
        specs = (P(None, None, "tp"), P(), P())
    q, k, v = (abstract(x, mesh, s) for x, s in zip(shapes, specs, strict=True))
    ids = abstract(jnp.zeros((4, 8), jnp.int32), mesh, mask or P())
    with pytest.raises(ValueError, match=message):
        if "2 kv heads" in message:
            jax.eval_shape(lambda q, k, v: modules.native_sparse_attention(q, k, v), q, k, v)
        else:
            jax.eval_shape(
                lambda q, k, v, ids: modules.flash_attention(
                    q, k, v, mask_info=MaskInfo.from_segments(ids)
                ),
                q, k, v, ids,
            )  # fmt: skip


# ---- the compiler's own partitioning ----------------------------------------------------------


def moved(text, size):
    """Collectives of a compiled program that bring ``size`` elements or more to other devices."""
    found = []
    for line in text.splitlines():
        kind = re.search(r" (all-gather|all-to-all|collective-permute)(-start)?\(", line)
        if kind:
            result = line[: kind.start()].split("=", 1)[1]
            shapes = re.findall(r"\[([0-9,]*)\]", result)
            counts = [math.prod(int(n) for n in s.split(",") if n) for s in shapes]
            if max(counts) >= size:
                found.append((kind[1], result.strip()))
    return found


REST = set(calls.CALLS) - {
    *("flash_attention", "scaled_dot_product_attention", "page_attention", "grouped_matmul"),
    *("blocksparse_attention", "native_sparse_attention", "lightning_attention", "mla_attention"),
}


@pytest.mark.parametrize(
    "operation",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in REST)) for n in sorted(calls.CALLS)],
)
def test_nothing_sharded_is_gathered(operation):
    """Under plain ``jit`` keys and values stay where they are, forward and backward."""
    # two and more of each on every device
    c, mesh = calls.call(operation, batch=4, heads=8, kv_heads=4, length=16), mesh_of(AxisType.Auto)
    specs = specs_of(c)
    arrays = {name: abstract(x, mesh, specs[name]) for name, x in c.arrays.items()}
    lowered = jax.jit(pulled(c)).lower(arrays)
    text = lowered.compile(compiler_options=SMALL).as_text()
    assert moved(text, 64) == []  # a shard of the smallest keys has 128 elements


# ---- inside shard_map -------------------------------------------------------------------------


@pytest.mark.parametrize("operation", sorted(calls.CALLS))
def test_gradients_inside_shard_map_as_it_comes(operation):
    """It tracks over which axes arrays vary; constants made for absent arguments must, too."""
    full = calls.call(operation, length=16)  # long enough for chunks
    parameters = inspect.signature(getattr(modules, operation)).parameters
    required = {n for n, p in parameters.items() if p.default is inspect.Parameter.empty}
    given = {n: x for n, x in full.arrays.items() if n in required}
    if operation == "mla_attention":
        given["b_k"] = full.arrays["b_k"]  # its query has rotary dimensions
    options = ("sliding_window", "causal", "q_block_size", "kv_block_size")
    static = {n: x for n, x in full.static.items() if n not in options}
    bare = calls.Call(operation, given, static, tuple(n for n in full.gradients if n in given))
    mesh = mesh_of(AxisType.Auto)
    for c in (full, bare):
        specs = specs_of(c)
        gradients = {name: specs[name] for name in c.gradients}
        local = lambda arrays, c=c: pulled(c)(arrays)[1]  # noqa: E731
        inside = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=gradients)
        types = jax.eval_shape(inside, dict(c.arrays))
        assert all(types[name].shape == c.arrays[name].shape for name in c.gradients)
