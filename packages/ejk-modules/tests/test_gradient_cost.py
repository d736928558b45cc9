"""What a gradient costs besides its kernels: programs outside jit, tracing inside it."""

import jax
import jax.numpy as jnp
import pytest

import ejkernel.modules as modules
from ejktest.calls import CALLS, Call, call
from ejktest.grids import cover
from ejktest.variants import options

COMPILED = "Finished XLA compilation"
MASKED = {"padding", "cu"}


def cases():
    """Every operation, masks that make a loop, and linear attention in (short) chunks."""
    masked = {f"flash_attention-{n}": c for n, c in options()["flash_attention"] if n in MASKED}
    arrays = call("gla_attention").arrays
    rows = {n: jnp.concatenate([arrays[n]] * 2, 1) for n in ("query", "key", "value")}
    chunks = {"gla_attention-chunks": Call("gla_attention", rows)}
    return {name: call(name) for name in CALLS} | masked | chunks


def gradient(function, c: Call):
    def loss(wanted):
        out = function(**{**c.arguments, **wanted})
        return sum(map(jnp.vdot, jax.tree.leaves(out), jax.tree.leaves(out)))

    return lambda: jax.block_until_ready(jax.grad(loss)({n: c.arrays[n] for n in c.gradients[:1]}))


def compilations(run, caplog) -> int:
    caplog.clear()
    with jax.log_compiles():
        run()
    return sum(COMPILED in record.message for record in caplog.records)


@pytest.mark.parametrize(
    "name",
    cover(
        sorted(cases()),
        # one with each kernel of XLA, with masks that make a loop, and in chunks
        *("blocksparse_attention", "causal_conv1d", "flash_attention-cu", "gated_delta_rule"),
        *("flash_attention-padding", "gla_attention-chunks", "grouped_matmul", "mean_pooling"),
        *("mla_attention", "native_sparse_attention", "ragged_page_attention_v3"),
        "scaled_dot_product_attention",
    ),
)
def test_a_second_gradient_outside_jit_compiles_nothing(name, caplog):
    c = cases()[name]
    run = gradient(getattr(modules, c.operation), c)
    assert compilations(run, caplog) > 0
    client = jax.devices()[0].client
    run()
    before = len(client.live_executables())
    assert [compilations(run, caplog) for _ in range(3)] == [0] * 3
    assert len(client.live_executables()) <= before


def loops(jaxpr):
    """Every loop in ``jaxpr``, as the identity of the jaxpr that holds it."""
    found = [id(jaxpr) for e in jaxpr.eqns if e.primitive.name in ("scan", "while")]
    for e in jaxpr.eqns:
        for inner in jax.tree.leaves(list(e.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            found += loops(inner) if hasattr(inner, "eqns") else []
    return found


LAYERS = ["flash_attention", "gla_attention", "recurrent_attention", "lightning_attention"]


@pytest.mark.parametrize("operation", LAYERS)
def test_the_loops_of_a_gradient_are_traced_once_for_all_layers(operation):
    own = {"layer_idx": 0, "num_layers": 3} if operation == "lightning_attention" else {}
    kinds = {"flash_attention": ("attention_mask",)}.get(operation, ())

    def model(x, layers):
        for i in range(layers):
            static = own | {"layer_idx": i} if own else {}
            masks = {name: jnp.ones(x.shape[:2], bool) for name in kinds}
            x = getattr(modules, operation)(x, x, x, **static, **masks)
        return x.sum()

    x = jnp.ones((1, 24, 2, 8))
    one, three = (jax.make_jaxpr(jax.grad(lambda x, n=n: model(x, n)))(x).jaxpr for n in (1, 3))
    assert len(set(loops(three))) == len(set(loops(one))) > 0


NAMED = {
    "flash_attention": {"causal": True},
    "blocksparse_attention": {"q_block_size": 100, "kv_block_size": 100, "causal": True},
    "native_sparse_attention": {"block_size": 64, "sliding_window": 50},
    "gla_attention": {},
}


@pytest.mark.parametrize("operation", NAMED)
def test_named_residuals_keep_the_forward_pass_from_running_twice(operation):
    x, w = jnp.ones((1, 1100, 2, 8)), jnp.ones((8, 8))

    def layer(x, w):
        return getattr(modules, operation)(x @ w, x, x, **NAMED[operation]) @ w

    def count(policy):
        kept = jax.checkpoint(layer, policy=policy)
        gradients = jax.grad(lambda x, w: kept(x, w).sum(), (0, 1))
        return len(loops(jax.make_jaxpr(gradients)(x, w).jaxpr))

    policies = jax.checkpoint_policies
    names = policies.save_only_these_names("ejkernel_out", "ejkernel_lse")
    everything = count(policies.everything_saveable)
    assert count(names) == everything < count(policies.nothing_saveable)
