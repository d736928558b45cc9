"""Residuals by name: a layer under ``jax.checkpoint`` launches its forward kernel once."""

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.flash_attention import flash_attention

POLICIES = jax.checkpoint_policies
NAMED = POLICIES.save_only_these_names("ejkernel_out", "ejkernel_lse")


def launches(policy) -> int:
    def layer(x, w):
        o = flash_attention(x @ w, x, x, causal=True)
        return jnp.sum((o @ w).astype(jnp.float32))

    x = jax.ShapeDtypeStruct((1, 64, 2, 32), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((32, 32), jnp.bfloat16)
    gradients = jax.value_and_grad(jax.checkpoint(layer, policy=policy), (0, 1))
    return str(jax.make_jaxpr(gradients)(x, w)).count("ejkernel_triton[")


def test_named_residuals_keep_the_forward_kernel_from_running_twice():
    assert launches(NAMED) == launches(POLICIES.everything_saveable) == 3
    assert launches(POLICIES.nothing_saveable) == 4
