"""Residuals by name: a layer under ``jax.checkpoint`` launches its forward kernel once."""

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton import flash_attention, native_sparse_attention

POLICIES = jax.checkpoint_policies
NAMED = POLICIES.save_only_these_names("ejkernel_out", "ejkernel_lse")


def flash(q, x):
    return flash_attention(q, x, x, causal=True)


def three_branches(q, x):
    gate = x[..., 0]
    return native_sparse_attention(
        q, x, x, gate, block_size=8, block_counts=2, sliding_window=3, g_swa=gate
    )


def launches(policy, attend=flash) -> int:
    def layer(x, w):
        o = attend(x @ w, x)
        return jnp.sum((o @ w).astype(jnp.float32))

    x = jax.ShapeDtypeStruct((1, 64, 2, 32), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((32, 32), jnp.bfloat16)
    gradients = jax.value_and_grad(jax.checkpoint(layer, policy=policy), (0, 1))
    return str(jax.make_jaxpr(gradients)(x, w)).count("ejkernel_triton[")


def test_named_residuals_keep_the_forward_kernel_from_running_twice():
    assert launches(NAMED) == launches(POLICIES.everything_saveable) == 3
    assert launches(POLICIES.nothing_saveable) == 4


def test_a_sum_of_kernels_keeps_the_residuals_of_each():
    """The choice of blocks and three forward kernels run once."""
    once = launches(POLICIES.everything_saveable, three_branches)
    assert launches(NAMED, three_branches) == once
    assert launches(POLICIES.nothing_saveable, three_branches) == once + 4
