"""Kernels under plain ``jit`` over sharded arrays: each device runs them on its part.

Programs of Triton kernels are compiled for their collectives and the shapes of their launches; an
interpreted kernel cannot run in a partitioned program, so its values come from the same regions
under ``shard_map``. How regions behave under JAX's transformations is shown with XLA's kernels,
partitioned in the same way.
"""

from __future__ import annotations

import collections
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel.modules as modules
from ejkernel.kernels.xla.kernel import XlaKernel
from ejkernel.modules._table import operation_class
from ejkernel.ops import call_kernel, interpret_mode, partition, partitioned
from ejkernel.types import MaskInfo
from ejkernel.types.calls.signature import axes_of
from ejktest import calls
from ejktest.grids import cover
from ejktest.transforms import with_pullback

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")

SMALL = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
ROLES = {
    "batch": {"batch": "x"},
    "heads": dict.fromkeys(("heads", "kv_heads", "combined_kv_heads"), "x"),
    "rows": {"rows": "x"},
    "experts": {"groups": "x"},
    "columns": dict.fromkeys(("columns", "channels", "channels_0"), "x"),
}
COLLECTIVES = re.compile(
    r" (all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)(-start)?\("
)


@pytest.fixture(autouse=True)
def untuned(monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")


@pytest.fixture
def sizes(monkeypatch):
    """Head dims that Triton's kernels take, and columns for two devices."""
    sizes = {"v_dim": 8, "columns": 8, "inner": 8, "cache_dim": 24, "q_dim": 16, "rope_dim": 8}
    sizes["groups"] = 4
    monkeypatch.setattr(calls, "SIZES", calls.SIZES | sizes)
    return monkeypatch


def call_of(operation, **sizes):
    c = calls.call(operation, length=16, **sizes)
    static = {**c.static, "latent_dim": 16} if operation == "mla_decode" else c.static
    return calls.Call(operation, c.arrays, static, c.gradients)


@pytest.fixture
def xla(monkeypatch):
    """XLA's kernels, partitioned as those of the other backends are."""
    monkeypatch.setattr(XlaKernel, "partitioned", True)


def mesh_of(shape, *names):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def specs_of(c, spread):
    """The spec of each array of a call, by the mesh axes of the words of its axes."""
    spec, found = operation_class(c.operation).spec, {}
    arguments = {**spec.boundary.defaults, **c.arguments}
    for p in spec.boundary.parameters:
        if p.name in c.arrays:
            x = c.arrays[p.name]
            words = axes_of(p, x, spec.argument_axes(arguments))
            axes = (spread.get(w.lstrip("#")) for w in words)
            found[p.name] = P(*(a if n > 1 else None for a, n in zip(axes, x.shape, strict=True)))
    return found


def pulled(c, platform):
    """Outputs and gradients of a call, of its arrays."""
    function = getattr(modules, c.operation)

    def differentiate(arrays):
        smooth = {name: arrays[name] for name in c.gradients}
        call = lambda g: function(**{**arrays, **g}, **c.static, platform=platform)  # noqa: E731
        out, pull = jax.vjp(call, smooth)
        return out, pull(jax.tree.map(jnp.sin, out))[0]

    return differentiate


def collectives(compiled):
    return dict(collections.Counter(m[1] for m in COLLECTIVES.finditer(compiled.as_text())))


def assert_same(found, expected, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


# ---- every operation ----------------------------------------------------------------------------

SUMMED = {
    ("flash_attention", "batch"): 2,  # the gradients of a bias and of sinks that rows share
    ("scaled_dot_product_attention", "batch"): 1,  # of a bias
    ("page_attention", "batch"): 2,  # of the pages of keys and of values
    ("mla_attention", "batch"): 2,  # of the weights
    ("mla_attention", "heads"): 2,  # of the latent rows, and of the rotary part
    ("mla_decode", "batch"): 1,  # of the pages
    ("mla_decode", "heads"): 1,
    ("recurrent_attention", "batch"): 1,  # of a decay for each head
    ("gla_attention", "batch"): 1,
    ("grouped_matmul", "rows"): 1,  # of the matrices
    ("grouped_matmul", "columns"): 1,  # of the rows
    ("grouped_matmul", "experts"): 3,  # the result itself, of the rows and of existing_out
    ("causal_conv1d", "batch"): 2,  # of the weights and of the bias
}
"""All-reduces of a call and its gradients: one for each gradient that devices share."""


OPERATIONS = sorted(set(calls.CALLS) - {"attention"})
"""Operations with a Triton kernel."""


def roles_of(operation):
    parameters = operation_class(operation).spec.boundary.parameters
    forms = (axes for p in parameters for _, axes in p.forms)
    words = {word.lstrip("#*") for axes in forms for word in axes.split()}
    return [role for role, spread in ROLES.items() if words & spread.keys()]


CASES = [(n, role) for n in OPERATIONS for role in roles_of(n)]


@pytest.mark.parametrize(("operation", "role"), CASES)
def test_a_sharded_call_communicates_shared_gradients_alone(operation, role, sizes):
    pytest.importorskip("triton", reason="Triton is not installed")
    sizes.setenv("EJKERNEL_INTERPRET", "1")
    sizes.setattr(partition, "interpreting", lambda: False)  # compiled, never run
    c = call_of(operation, batch=4, heads=8, kv_heads=4)
    specs, mesh = specs_of(c, ROLES[role]), mesh_of((2,), "x")
    arrays = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, specs[name]))
        for name, x in c.arrays.items()
    }
    compiled = jax.jit(pulled(c, "triton")).lower(arrays).compile(compiler_options=SMALL)
    count = collectives(compiled)
    assert set(count) <= {"all-reduce"}, count
    # XLA joins sums of different arrays
    assert bool(count) == ((operation, role) in SUMMED)
    assert count.get("all-reduce", 0) <= SUMMED.get((operation, role), 0)
    out, gradients = compiled.output_shardings
    assert all(("x" in s.spec) == (role != "experts") for s in jax.tree.leaves(out)[:1])
    for name, sharding in gradients.items():
        assert sharding.is_equivalent_to(arrays[name].sharding, len(arrays[name].shape)), name


@pytest.mark.parametrize(
    "operation",
    ["gla_attention", "mean_pooling", *(
        pytest.param(n, marks=pytest.mark.slow)
        for n in ("recurrent_attention", "lightning_attention", "gated_delta_rule", "causal_conv1d")
    )],
)  # fmt: skip
def test_a_call_over_shared_tokens_passes_states_alone(operation, sizes):
    pytest.importorskip("triton", reason="Triton is not installed")
    sizes.setenv("EJKERNEL_INTERPRET", "1")
    sizes.setattr(partition, "interpreting", lambda: False)  # compiled, never run
    c = call_of(operation)
    specs, mesh = specs_of(c, {"seq": "x"}), mesh_of((4,), "x")
    arrays = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, specs[name]))
        for name, x in c.arrays.items()
    }
    compiled = jax.jit(pulled(c, "triton")).lower(arrays).compile(compiler_options=SMALL)
    assert set(collectives(compiled)) <= {"all-reduce", "collective-permute"}
    for name, sharding in compiled.output_shardings[1].items():
        assert sharding.is_equivalent_to(arrays[name].sharding, len(arrays[name].shape)), name


def on_shards(mesh, spread):
    """``run_region`` under ``shard_map``, with words sharded as ``spread`` says."""

    def run(function, arrays, operands, results, rule, *, summed=False):
        types = jax.eval_shape(partial(function, None), *arrays)
        region = partition.Region(function, rule, tuple(operands), tuple(results(types)), summed)
        entries = [(words, [spread.get(word, ()) for word in words]) for words in operands]
        layout = rule.layout(dict(mesh.shape), entries)

        def specs(axes, values):
            return tuple(layout.spec(w, x.shape) for w, x in zip(axes, values, strict=True))

        in_specs, out_specs = specs(operands, arrays), specs(region.results, types)
        assert all(set(spec) == {None} for spec in in_specs) or layout.spread
        mapped = jax.shard_map(
            partial(region.on_device, layout), mesh=mesh, in_specs=in_specs, out_specs=out_specs,
            check_vma=False,
        )  # fmt: skip
        return mapped(*arrays)

    return run


QUICK = {"flash_attention", "lightning_attention", "mean_pooling", "grouped_matmul"}
NARROW = "grouped_matmul of 8 bits"


def narrow_call():
    """8-bit matrices with scales of their columns, and gradients of everything else."""
    c = call_of("grouped_matmul")
    rng, (groups, _, columns) = np.random.default_rng(0), c.arrays["rhs"].shape
    rhs = jnp.asarray(rng.integers(-100, 100, c.arrays["rhs"].shape), jnp.int8)
    scale = jnp.asarray(rng.uniform(0.01, 0.02, (groups, columns)), jnp.float32)
    arrays = {**c.arrays, "rhs": rhs, "rhs_scale": scale}
    return calls.Call(c.operation, arrays, c.static, ("lhs", "existing_out"))


@pytest.mark.parametrize(
    "operation",
    [
        *(pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in OPERATIONS),
        NARROW,
    ],
)
def test_the_parts_of_a_triton_call_make_the_call(operation, sizes):
    """Outputs, saved arrays, shared gradients, decays and dropout by global heads."""
    pytest.importorskip("triton", reason="Triton is not installed")
    sizes.setenv("EJKERNEL_INTERPRET", "1")
    c = narrow_call() if operation == NARROW else call_of(operation)
    if operation == "flash_attention":
        static = {**c.static, "dropout_prob": 0.3, "dropout_seed": 7}
        c = calls.Call(operation, c.arrays, static, c.gradients)
    run = pulled(c, "triton")
    expected = jax.jit(pulled(c, "xla"))(c.arrays)
    spread = {
        **dict.fromkeys(("heads", "kv_heads", "combined_kv_heads"), ("tp",)),
        **dict.fromkeys(("columns", "channels", "channels_0"), ("tp",)),
        **dict.fromkeys(("batch", "rows"), ("dp",)),
    }
    regions = []
    here = on_shards(mesh_of((2, 2), "dp", "tp"), spread)
    sizes.setattr(partitioned, "run_region", lambda *a, **k: regions.append(a) or here(*a, **k))
    sizes.setattr(call_kernel, "may_be_sharded", lambda _: not partition.inside_region())
    found = jax.jit(run)(c.arrays)
    assert regions
    assert_same(found, expected)


# ---- JAX's transformations, through the compiler's partitioner ----------------------------------

DP, BSHD = P("dp"), P("dp", None, "tp")


def qkv(heads=8, kv_heads=4):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(4, 16, heads, 8)] + [(4, 16, kv_heads, 8)] * 2
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def attend(q, k, v, **options):
    return modules.flash_attention(q, k, v, causal=True, platform="xla", **options)


def both(function):
    """The output and the gradients of all arguments."""
    return partial(with_pullback(function), jnp.sin)


def partitioned_program(function, arrays, specs, mesh=None):
    """Compiled for arrays that lie as the specs say; its answer is that of unsharded arrays."""
    mesh = mesh_of((2, 4), "dp", "tp") if mesh is None else mesh
    places = [NamedSharding(mesh, spec) for spec in specs]
    placed = [jax.device_put(x, place) for x, place in zip(arrays, places, strict=True)]
    expected = jax.jit(function)(*arrays)
    lowered = jax.jit(function).lower(*placed)
    assert "CustomSPMDPartitioning" in lowered.as_text()
    compiled = lowered.compile()
    assert_same(compiled(*placed), expected, 1e-4)
    return compiled


def test_mapped_calls_stay_sharded(xla):
    q, k, v = (jnp.stack([x, x + 1]) for x in qkv())
    one = jax.vmap(both(attend), in_axes=(0, 1, None))
    arrays = q, k.swapaxes(0, 1), v[0]
    specs = P(None, *BSHD), P("dp", None, None, "tp"), BSHD
    assert collectives(partitioned_program(one, arrays, specs)) == {}
    rows = jax.vmap(lambda q, k, v: attend(q[None], k[None], v[None])[0])
    compiled = partitioned_program(both(rows), qkv(), (BSHD,) * 3)
    assert collectives(compiled) == {}
    assert compiled.output_shardings[0].spec == BSHD


def test_a_mesh_axis_that_no_spec_names_has_no_collective(xla):
    """Devices along it compute the same: their gradients are not added up."""
    mesh = mesh_of((2, 4), "dp", "tp")
    ring = partial(modules.ring_attention, axis_name="dp")
    for function, spec, with_heads in (
        (modules.flash_attention, DP, BSHD),
        (ring, P(None, "dp"), P(None, "dp", "tp")),
    ):
        call = partial(function, mesh=mesh, in_specs=(spec,) * 3, causal=True)
        compiled = partitioned_program(both(call), qkv(), (spec,) * 3, mesh)
        assert "all-reduce" not in collectives(compiled), function
        assert compiled.output_shardings[0].is_equivalent_to(NamedSharding(mesh, spec), 4)
        # arrays that are sharded over it become whole
        compiled = partitioned_program(call, qkv(), (with_heads,) * 3, mesh)
        assert compiled.output_shardings.is_equivalent_to(NamedSharding(mesh, spec), 4)


def test_vmap_shards_over_a_mesh_axis_that_no_spec_names(xla):
    mesh = mesh_of((2, 4), "dp", "tp")
    call = partial(modules.flash_attention, mesh=mesh, in_specs=(DP,) * 3, causal=True)
    arrays = [jnp.stack([x, x + 1] * 2) for x in qkv()]
    out, gradients = jax.jit(jax.vmap(both(call), spmd_axis_name="tp"))(*arrays)
    assert_same((out, gradients), jax.vmap(both(attend))(*arrays), 1e-4)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("tp", "dp")), out.ndim)


def test_layers_of_a_scan_under_checkpoint_run_the_forward_pass_once(xla):
    names = jax.checkpoint_policies.save_only_these_names("ejkernel_out", "ejkernel_lse")

    @partial(jax.checkpoint, policy=names)
    def layer(x, w):
        return x + attend(x @ w, (x @ w)[:, :, ::2], x[:, :, ::2]), None

    gradients = jax.grad(lambda x, w: jnp.sin(jax.lax.scan(layer, x, w)[0]).sum(), (0, 1))
    arrays = qkv()[0], jax.random.normal(jax.random.key(3), (3, 8, 8)) / 9
    compiled = partitioned_program(gradients, arrays, (BSHD, P()))
    assert set(collectives(compiled)) == {"all-reduce"}  # of the weights
    places = (NamedSharding(mesh_of((2, 4), "dp", "tp"), spec) for spec in (BSHD, P()))
    placed = map(jax.device_put, arrays, places)
    assert str(jax.make_jaxpr(gradients)(*placed)).count("ejkernel_region[") == 2


@pytest.mark.parametrize("kv_heads", cover([1, 2], 2))
def test_key_heads_fewer_than_devices_are_replicated(kv_heads, xla):
    compiled = partitioned_program(both(attend), qkv(8, kv_heads), (BSHD, DP, DP))
    # gradients of keys and values are summed over the query heads of all devices
    assert set(collectives(compiled)) == {"all-reduce"}


def test_query_heads_over_more_mesh_axes_than_key_heads(xla):
    mesh = mesh_of((4, 2), "a", "b")
    keys = P(None, None, "a")
    specs = (P(None, None, ("a", "b")), keys, keys)
    compiled = partitioned_program(both(attend), qkv(), specs, mesh)
    assert set(collectives(compiled)) == {"all-reduce"}


def test_projections_that_split_a_mesh_axis_between_heads_and_channels(xla):
    def model(x, wq, wk):
        q, k = ((x @ w).reshape(*x.shape[:2], -1, 8) for w in (wq, wk))
        return attend(q, k, k).reshape(*x.shape[:2], -1)

    rng = np.random.default_rng(0)
    shapes = (4, 16, 32), (32, 64), (32, 16)  # two key heads for four devices
    arrays = [jnp.asarray(rng.standard_normal(s) / 6, jnp.float32) for s in shapes]
    columns = P(None, "tp")
    compiled = partitioned_program(model, arrays, (DP, columns, columns))
    assert set(collectives(compiled)) == {"all-gather"}  # of the keys


@pytest.mark.parametrize("minor", [False, True])
def test_inside_a_shard_map_over_other_axes(minor, xla):
    mesh = mesh_of((4, 2), "tp", "dp") if minor else mesh_of((2, 4), "dp", "tp")

    def outer(*arrays):
        mapped = jax.shard_map(
            both(attend), mesh=mesh, in_specs=DP, out_specs=DP, axis_names={"dp"}
        )
        return mapped(*arrays)

    compiled = partitioned_program(outer, qkv(8, 2), (BSHD, DP, DP), mesh)
    assert set(collectives(compiled)) == {"all-reduce"}


def test_options_follow_global_rows_and_heads(xla):
    ids = np.asarray([[0] * 9 + [1] * 7, [3] * 16] * 2, np.int32)
    visible = np.random.default_rng(0).random((1, 8, 16, 16)) < 0.8
    bias = jnp.linspace(-1, 1, 8 * 256).reshape(1, 8, 16, 16)
    sinks = jnp.linspace(-1, 1, 16).reshape(8, 2)

    def differentiate(q, k, v, bias, sinks, ids):
        def call(q, k, v, bias, sinks):
            return attend(
                q, k, v, bias=bias, softmax_aux=sinks, attention_mask=visible, dropout_prob=0.3,
                mask_info=MaskInfo.from_segments(ids), dropout_seed=jnp.int32(7),
            )  # fmt: skip

        return both(call)(q, k, v, bias, sinks)

    arrays = (*qkv(), bias, sinks, ids)
    specs = (BSHD, BSHD, BSHD, P(None, "tp"), P("tp"), DP)
    compiled = partitioned_program(differentiate, arrays, specs)
    assert set(collectives(compiled)) == {"all-reduce"}


@pytest.mark.parametrize(
    "operation", cover(["page_attention", "blocksparse_attention"], "page_attention")
)
def test_loops_end_on_each_device_and_have_second_derivatives(operation):
    """Loops of XLA kernels whose length depends on the data; forward mode of the gradients."""
    c = calls.call(operation, batch=4, length=16, heads=8, kv_heads=4)
    function, names = getattr(modules, operation), list(c.arrays)
    spread = {"batch": "dp", "heads": "tp", "kv_heads": "tp"}

    def second(*arrays):
        arrays = dict(zip(names, arrays, strict=True))
        smooth = {name: arrays[name] for name in c.gradients}

        def loss(smooth):
            return jnp.sin(function(**{**arrays, **smooth}, **c.static, platform="xla")).sum()

        return jax.jvp(jax.grad(loss), (smooth,), (smooth,))

    specs = specs_of(c, spread)
    mesh = mesh_of((2, 2), "dp", "tp")
    ordered = [c.arrays[name] for name in names], [specs[name] for name in names]
    compiled = partitioned_program(second, *ordered, mesh)
    assert set(collectives(compiled)) <= {"all-reduce"}  # of pages, which rows share
    assert ("all-reduce" in collectives(compiled)) == (operation == "page_attention")


@pytest.mark.parametrize("existing", [False, True])
def test_experts_stay_on_their_devices(existing):
    """Rows over one mesh axis and matrices over the other: sums of the rows alone."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s).astype(np.float32) for s in ((16, 8), (4, 8, 6), (16, 6))]
    sizes = jnp.asarray([9, 0, 3, 2], jnp.int32)

    def multiply(lhs, rhs, *out):
        return modules.grouped_matmul(lhs, rhs, sizes, None, *out, platform="xla")

    specs = P("dp"), P("tp"), P("dp")
    run = both(multiply)
    compiled = partitioned_program(run, arrays[: 2 + existing], specs[: 2 + existing])
    count = collectives(compiled)
    assert set(count) == {"all-reduce"} and count["all-reduce"] <= 3 + existing
    out, (rows, matrices, *_) = compiled.output_shardings
    assert (out.spec, rows.spec, matrices.spec) == (P("dp"), P("dp"), P("tp"))
    moved = partitioned_program(multiply, arrays[:2], (P(), P("tp")))
    assert collectives(moved) == {"all-reduce": 1}


def test_settings_of_jax_hold_while_the_compiler_partitions(xla):
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        arrays = [jnp.asarray(np.asarray(x, np.float64)) for x in qkv()]
        compiled = partitioned_program(both(attend), arrays, (BSHD,) * 3)
        assert collectives(compiled) == {}


@pytest.mark.parametrize(
    ("strategy", "sent", "returned"),
    [
        ("ring", {"collective-permute": 4}, {"collective-permute": 12}),
        pytest.param(
            *("all_gather", {"all-gather": 2}, {"all-gather": 4, "reduce-scatter": 2}),
            marks=pytest.mark.slow,
        ),
        ("ulysses", {"all-to-all": 4}, {"all-to-all": 16}),
    ],
)
def test_devices_share_a_sequence(xla, strategy, sent, returned):
    """Queries, keys and values sharded along their sequence; a mesh axis of batch rows besides."""
    mesh = jax.make_mesh((4, 2), ("sp", "dp"), axis_types=(AxisType.Auto,) * 2)
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(k, (2, 32, n, 8)) for k, n in zip(keys, (4, 2, 2, 4), strict=True)]
    placed = [jax.device_put(x, NamedSharding(mesh, P("dp", "sp"))) for x in arrays]
    ids = jnp.repeat(jnp.asarray([[0] * 9 + [1] * 15 + [-1] * 8], jnp.int32), 2, 0)
    options = {"mask_info": MaskInfo.from_segments(ids), "causal": True, "sliding_window": (25, 0)}

    def attend(q, k, v, **cfg):
        return modules.flash_attention(q, k, v, **options, **cfg)

    cfg = {"cfg": {"context_parallel": strategy}}
    shared = partial(attend, **cfg)
    compiled = jax.jit(shared).lower(*placed[:3]).compile()
    found = collectives(compiled)
    # ids travel too, or are gathered: the counts are those of keys and values at least
    assert set(sent) <= set(found) <= {*sent, "all-gather"}
    assert all(found[kind] >= n for kind, n in sent.items())
    assert_same(compiled(*placed[:3]), attend(*arrays[:3]))
    assert compiled(*placed[:3]).sharding.is_equivalent_to(placed[0].sharding, 4)

    def pull(f):
        return lambda q, k, v, w: jax.vjp(f, q, k, v)[1](w)

    compiled = jax.jit(pull(shared)).lower(*placed).compile()
    found = collectives(compiled)
    assert set(returned) <= set(found) <= {*returned, "all-gather"}
    assert all(found[kind] >= n for kind, n in returned.items())
    gradients = compiled(*placed)
    assert_same(gradients, pull(attend)(*arrays))
    for x, like in zip(gradients, placed, strict=False):
        assert x.sharding.is_equivalent_to(like.sharding, 4)
    meshed = partial(shared, mesh=mesh, in_specs=(P("dp", "sp"),) * 3)
    assert_same(jax.jit(pull(meshed))(*arrays), gradients)
    explicit = jax.make_mesh((4, 2), ("sp", "dp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        typed = [jax.device_put(x, NamedSharding(explicit, P("dp", "sp"))) for x in arrays]
        assert_same(jax.jit(pull(shared))(*typed), gradients)


def test_devices_share_a_latent_sequence(xla):
    """Packed, with heads over another mesh axis, in plain jit and by mesh and specs."""
    mesh = jax.make_mesh((4, 2), ("sp", "tp"), axis_types=(AxisType.Auto,) * 2)
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((1, 32, 4, 24), (1, 32, 16), (16, 2, 16), (16, 2, 8), (1, 32, 8))
    arrays = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]
    specs = (P(None, "sp", "tp"), P(None, "sp"), P(None, "tp"), P(None, "tp"), P(None, "sp"))
    starts = jnp.asarray([0, 10, 10, 25, 30])

    def loss(*arrays, **where):
        *latent, b_k = arrays
        out = modules.mla_attention(*latent, b_k=b_k, cu_seqlens=starts, causal=True, **where)
        return jnp.sin(out).sum()

    gradients = jax.jit(jax.grad(loss, range(5)))
    expected = gradients(*arrays)
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
    assert_same(gradients(*placed), expected)
    meshed = partial(loss, mesh=mesh, in_specs=specs[:4])
    assert_same(jax.jit(jax.grad(meshed, range(5)))(*arrays), expected)


@pytest.mark.parametrize(
    ("operation", "word", "message"),
    [
        ("scaled_dot_product_attention", "q_len", "a sequence that no.*use flash_attention"),
        ("native_sparse_attention", "seq", "a sequence that no device can share.*ring_attention"),
        ("ragged_decode_attention", "kv_len", "a sequence that no.*shard batch or heads"),
        ("ragged_page_attention", "tokens", "a sequence that no.*rows and tables"),
        ("page_attention", "page_size", "indexed.*shard heads or rows"),
    ],
)
def test_what_every_device_needs_is_an_error_where_it_is_sharded(xla, operation, word, message):
    """Of a sequence that an operation cannot share, and of a cache; not of features, which move."""
    c = calls.call(operation, length=16)
    specs, mesh = specs_of(c, {word: "x"}), mesh_of((2,), "x")
    placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in c.arrays.items()}
    message = f"{operation}: axis {word} is sharded over .*'x'.* is {message}"
    call = partial(getattr(modules, operation), **placed, **c.static)
    with pytest.raises(ValueError, match=message):
        call(platform="xla")
    notes = modules.explain(operation, **placed, **c.static).notes
    assert any(re.match(f"refused: {message}", note) for note in notes)


def test_a_donated_cache_is_written_in_place(xla):
    c = calls.call("ragged_page_attention_v3")
    mesh, specs = mesh_of((2,), "x"), specs_of(c, ROLES["heads"])
    arrays = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, specs[name]))
        for name, x in c.arrays.items()
    }
    cache = arrays.pop("kv_cache")

    def step(cache, arrays):
        return modules.ragged_page_attention_v3(kv_cache=cache, **arrays, platform="xla")

    compiled = jax.jit(step, donate_argnums=0).lower(cache, arrays).compile()
    assert collectives(compiled) == {}
    assert re.search(r"input_output_alias=\{ \{1\}: \(\d+", compiled.as_text())


def int8(*shape, seed):
    return jnp.asarray(np.random.default_rng(seed).integers(-100, 100, shape), jnp.int8)


POOL = P(None, None, "tp")  # pages and page_size whole, key heads over tp
TABLES = jnp.asarray([[3, 1, 0], [0, 6, 2], [4, 4, 4], [5, 2, 1]], jnp.int32)
LENGTHS = jnp.asarray([5, 11, 2, 9], jnp.int32)
OF_HEADS = jnp.linspace(0.01, 0.02, 4)


def paged_call():
    """Rows over dp, heads and an 8-bit cache with scales of its heads over tp."""
    pools = int8(7, 4, 4, 8, seed=1), int8(7, 4, 4, 8, seed=2)
    arrays = (qkv()[0][:, :1], *pools, LENGTHS, TABLES, OF_HEADS)

    def attend(q, k, v, lengths, tables, scale):
        return modules.page_attention(
            q, k, v, lengths, tables, k_scale=scale, v_scale=scale, platform="xla"
        )

    return attend, arrays, (BSHD, POOL, POOL, DP, DP, P("tp"))


def ragged_call():
    """Packed rows, heads and an 8-bit cache with scales of its heads over tp."""
    arrays = (qkv()[0][0, :7], int8(7, 4, 8, 8, seed=1), LENGTHS, TABLES, OF_HEADS)
    starts = jnp.asarray([0, 1, 3, 4, 7], jnp.int32)

    def attend(q, pages, lengths, tables, scale):
        return modules.ragged_page_attention(
            q, pages, lengths, tables, starts, 4, k_scale=scale, v_scale=scale, platform="xla"
        )

    return attend, arrays, (P(None, "tp"), POOL, P(), P(), P("tp"))


def latent_call():
    """Rows over dp and query heads over tp, all latent rows on every device."""
    q = jax.random.normal(jax.random.key(0), (4, 8, 24))
    arrays = q, int8(7, 4, 24, seed=1), LENGTHS, TABLES

    def attend(q, cache, lengths, tables):
        return modules.mla_decode(
            q, cache, lengths, tables, latent_dim=16, k_scale=0.01, platform="xla"
        )

    return attend, arrays, (P("dp", "tp"), P(), DP, DP)


def flash_call():
    """8-bit queries, keys and values, with scales of rows and heads."""
    narrow = [x.astype(jnp.float8_e4m3fn) for x in qkv()]
    arrays = (*narrow, jnp.full((4, 8), 0.5), jnp.full((4, 4), 0.25))

    def attend_narrow(q, k, v, of_queries, of_keys):
        scales = {"q_scale": of_queries, "k_scale": of_keys, "v_scale": of_keys}
        return attend(q, k, v, **scales, out_dtype=jnp.float32)

    return attend_narrow, arrays, (BSHD, BSHD, BSHD, P("dp", "tp"), P("dp", "tp"))


def grouped_call(*, experts, gradient=False):
    """8-bit matrices with scales of their columns: columns or experts over tp.

    ``gradient``: that of the rows too, which devices add up.
    """
    lhs = jax.random.normal(jax.random.key(0), (16, 8))
    scales = jnp.linspace(0.01, 0.02, 32).reshape(4, 8)
    sizes = jnp.asarray([5, 0, 9, 2], jnp.int32)

    def multiply(lhs, rhs, scales):
        def forward(lhs):
            return modules.grouped_matmul(lhs, rhs, sizes, rhs_scale=scales, platform="xla")

        return both(forward)(lhs) if gradient else forward(lhs)

    specs = (P("tp"), P("tp")) if experts else (P(None, None, "tp"), P(None, "tp"))
    return multiply, (lhs, int8(4, 8, 8, seed=1), scales), (P(), *specs)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        pytest.param(paged_call, {}, id="paged"),
        pytest.param(ragged_call, {}, id="ragged", marks=pytest.mark.slow),
        pytest.param(latent_call, {}, id="latent", marks=pytest.mark.slow),
        pytest.param(flash_call, {}, id="flash", marks=pytest.mark.slow),
        pytest.param(partial(grouped_call, experts=False), {}, id="columns"),
        pytest.param(partial(grouped_call, experts=True), {"all-reduce": 1}, id="experts"),
        pytest.param(
            *(partial(grouped_call, experts=False, gradient=True), {"all-reduce": 1}),
            id="gradient over columns",
        ),
        pytest.param(
            *(partial(grouped_call, experts=True, gradient=True), {"all-reduce": 2}),
            id="gradient over experts",
        ),
    ],
)
def test_narrow_arrays_stay_where_they_are(call, expected, xla):
    function, arrays, specs = call()
    assert collectives(partitioned_program(function, arrays, specs)) == expected


def test_nothing_changes_where_no_array_can_be_sharded(xla):
    """One device, a shard_map over the full mesh, exported programs, TPUs: no region is left."""
    arrays, mesh = qkv(), mesh_of((2, 4), "dp", "tp")
    assert "ejkernel_region" not in str(jax.make_jaxpr(both(attend))(*arrays))
    placed = [jax.device_put(x, NamedSharding(mesh, BSHD)) for x in arrays]
    mapped = jax.shard_map(both(attend), mesh=mesh, in_specs=BSHD, out_specs=BSHD)
    assert "ejkernel_region" not in str(jax.make_jaxpr(mapped)(*placed))
    one = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    alone = [jax.device_put(x, NamedSharding(one, P("x"))) for x in arrays]
    assert "ejkernel_region" not in str(jax.make_jaxpr(attend)(*alone))
    exported = jax.export.export(jax.jit(attend))(*placed)
    assert_same(jax.jit(exported.call)(*placed), attend(*arrays))
    for_tpu = jax.jit(attend).trace(*placed).lower(lowering_platforms=("tpu",))
    assert "CustomSPMDPartitioning" not in for_tpu.as_text()


# ---- functions of global indices ----------------------------------------------------------------


def loss_of_mods(q, k, v, w, **options):
    """Depends on the indices of the whole call, by arithmetic and by arrays."""
    o = modules.flash_attention(
        q, k, v,
        score_mod=lambda s, b, h, i, j: s * w[h] + jnp.sin(w[(i + j) % 2]) * b,
        mask_mod=lambda b, h, i, j: (j <= i + h) | (j < b),
        **options,
    )  # fmt: skip
    return (o**2).sum()


@pytest.fixture
def arrays_of_mods():
    rng = np.random.default_rng(0)
    shapes = (2, 20, 4, 16), (2, 20, 2, 16), (2, 20, 2, 16), (4,)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def test_mods_see_the_indices_of_the_whole_call(xla, arrays_of_mods):
    *qkv, w = arrays_of_mods
    gradients = jax.jit(jax.grad(partial(loss_of_mods, platform="xla"), (0, 1, 2, 3)))
    mesh = mesh_of((2, 2), "x", "y")
    sharded = [jax.device_put(a, NamedSharding(mesh, P("x", None, "y"))) for a in qkv]
    compiled = gradients.lower(*sharded, w).compile(SMALL)
    assert collectives(compiled) == {"all-reduce": 1}  # of the gradient of w
    assert_same(compiled(*sharded, w), gradients(*arrays_of_mods), 2e-4)


@pytest.mark.parametrize("platform", ["xla", "triton"])
def test_mods_over_a_mesh(platform, arrays_of_mods):
    tiles = {"q_blocksize": 32, "kv_blocksize": 32}
    options = {"platform": platform, "cfg": {"fwd_params": tiles, "bwd_params": tiles}}
    spec = P("x", None, "y")
    over_mesh = {"mesh": mesh_of((2, 2), "x", "y"), "in_specs": (spec, spec, spec)}
    if platform == "triton":
        pytest.importorskip("triton")
    with interpret_mode():
        alone, sharded = (
            jax.jit(jax.grad(partial(loss_of_mods, **(options | o)), (0, 1, 2, 3)))(*arrays_of_mods)
            for o in ({"platform": "xla"}, over_mesh)
        )
    assert_same(sharded, alone, 2e-4)


def dense_loss_of_mods(q, k, v, w):
    """``loss_of_mods`` by its formula."""
    b, h, i, j = np.ogrid[:2, :4, :20, :20]
    scores = jnp.einsum("bihd,bjhd->bhij", q, jnp.repeat(k, 2, 2)) / 4
    scores = scores * w[h] + jnp.sin(w[(i + j) % 2]) * b
    weights = jax.nn.softmax(jnp.where((j <= i + h) | (j < b), scores, -jnp.inf))
    return (jnp.einsum("bhij,bjhd->bihd", weights, jnp.repeat(v, 2, 2)) ** 2).sum()


@pytest.fixture(scope="module")
def gradients_of_mods():
    """Returns gradients in float64, by the reference."""
    rng = np.random.default_rng(0)
    shapes = (2, 20, 4, 16), (2, 20, 2, 16), (2, 20, 2, 16), (4,)
    with jax.enable_x64(True):
        arrays = [jnp.asarray(rng.standard_normal(s).astype(np.float32), float) for s in shapes]
        return jax.grad(dense_loss_of_mods, (0, 1, 2, 3))(*arrays)


@pytest.mark.parametrize(
    ("strategy", "kinds"),
    [
        ("ring", {"collective-permute"}),
        pytest.param("all_gather", {"all-gather", "reduce-scatter"}, marks=pytest.mark.slow),
        ("ulysses", {"all-to-all"}),
    ],
)
def test_mods_of_a_shared_sequence(xla, arrays_of_mods, gradients_of_mods, strategy, kinds):
    *qkv, w = arrays_of_mods
    loss = partial(loss_of_mods, platform="xla", cfg={"context_parallel": strategy})
    gradients = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    spec, found = P("dp", "sp"), []
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("sp", "dp"), axis_types=(kind,) * 2)
        with jax.set_mesh(mesh):
            placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in qkv]
            compiled = gradients.lower(*placed, w).compile()
            assert set(collectives(compiled)) == {*kinds, "all-reduce"}  # that of w's gradient
            found.append(compiled(*placed, w))
    over_mesh = {"mesh": mesh_of((2, 2), "sp", "dp"), "in_specs": (spec,) * 3}
    found.append(jax.jit(jax.grad(partial(loss, **over_mesh), (0, 1, 2, 3)))(*arrays_of_mods))
    for gradient in found:
        assert_same(gradient, gradients_of_mods, 2e-4)


@pytest.mark.slow
def test_triton_mods_of_a_shared_sequence(arrays_of_mods, gradients_of_mods):
    pytest.importorskip("triton")
    over_mesh = {"mesh": mesh_of((2, 2), "sp", "dp"), "in_specs": (P("dp", "sp"),) * 3}
    with interpret_mode():
        for strategy in ("ring", "ulysses"):
            cfg = {"context_parallel": strategy}
            loss = partial(loss_of_mods, platform="triton", cfg=cfg, **over_mesh)
            found = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*arrays_of_mods)
            assert_same(found, gradients_of_mods, 2e-4)
