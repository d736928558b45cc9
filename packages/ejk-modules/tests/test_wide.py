"""With 64-bit types and NaN checks on: float64 stays float64, and any width of indices serves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel.modules as modules
from ejktest.calls import CALLS, call
from ejktest.grids import without


def widened(x, floats, integers):
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.asarray(np.asarray(x), floats)
    return jnp.asarray(np.asarray(x), integers if x.dtype == jnp.int32 else x.dtype)


# the kernel of ragged_page_attention_v3 is that of ragged_page_attention, and writes besides
@pytest.mark.parametrize("operation", without(sorted(CALLS), "ragged_page_attention"))
def test_every_operation_with_64_bit_types(operation):
    c = call(operation)
    run = getattr(modules, operation)
    narrow = jax.tree.leaves(run(**c.arguments))
    widths = [(jnp.float64, jnp.int64), (jnp.float32, jnp.int32)]
    indexed = any(x.dtype == jnp.int32 for x in c.arrays.values())
    for floats, integers in widths if indexed else widths[:1]:
        with jax.enable_x64(True), jax.debug_nans(True):
            arrays = {name: widened(x, floats, integers) for name, x in c.arrays.items()}

            def loss(given, arrays=arrays):
                out = jax.tree.leaves(run(**{**arrays, **given, **c.static}))
                return sum(jnp.where(jnp.isfinite(x), x, 0).sum() for x in out), out

            given = {name: arrays[name] for name in c.gradients}
            grads, out = jax.jit(jax.grad(loss, has_aux=True))(given)
        assert out[0].dtype == floats
        assert all(g.dtype == floats and np.isfinite(g).all() for g in grads.values())
        for a, b in zip(out, narrow, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)


def test_gradients_outside_jit_meet_no_infinity() -> None:
    """Hidden logits of -inf stay inside the compiled programs, forward and backward."""
    x = jax.random.normal(jax.random.key(0), (1, 12, 1, 8))

    def loss(x):
        return (modules.flash_attention(x, x, x, causal=True, platform="xla") ** 2).sum()

    with jax.debug_infs(True):
        assert jnp.isfinite(jax.grad(loss)(x)).all()
