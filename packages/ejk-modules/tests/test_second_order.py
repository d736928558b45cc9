"""Second derivatives: right, or refused with the name of the operation."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

import ejkernel.modules as modules
from ejkernel.ops import interpret_mode
from ejktest.variants import options

OPTIONS = options(value_dim=8)
REFUSED = (
    "blocksparse_attention",
    "mla_decode",
    "native_sparse_attention",
    "page_attention",
    "ragged_decode_attention",
    "ragged_page_attention",
    "ragged_page_attention_v3",
)

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("ejkernel.kernels.triton") is None,
    reason="the package of Triton kernels is not installed",
)


def first(operation, *, platform="xla"):
    """The gradient of an operation's first case in the direction of one input, and the input."""
    c = next(
        c
        for _, c in OPTIONS[operation]
        if modules.supports(operation, platform=platform, **c.arguments)
    )
    given = dict(c.arrays)
    name = c.gradients[0]
    x = given.pop(name)

    def loss(x):
        out = getattr(modules, operation)(**{name: x}, **given, **c.static, platform=platform)
        return sum(jnp.square(leaf.astype(jnp.float32)).sum() for leaf in jax.tree.leaves(out))

    return jax.grad(loss), x


def again(gradient):
    return jax.grad(lambda x: gradient(x).sum())


@pytest.mark.parametrize("operation", REFUSED)
def test_reverse_over_reverse_names_the_operation(operation):
    gradient, x = first(operation)
    with pytest.raises(NotImplementedError, match=f"^{operation} is differentiable once.*'xla'"):
        jax.make_jaxpr(again(gradient))(x)


@needs_triton
@pytest.mark.parametrize("operation", ["flash_attention", "page_attention"])
def test_kernels_name_the_operation(operation):
    with interpret_mode():
        gradient, x = first(operation, platform="triton")
        for second in (again(gradient), lambda x: jax.jvp(gradient, (x,), (x,))[1]):
            with pytest.raises(NotImplementedError, match=f"^{operation} is differentiable once"):
                jax.make_jaxpr(second)(x)


def test_hessian_of_blocksparse_attention():
    """Directions are mapped over derivatives, which once ended in a RecursionError."""
    x = jax.random.normal(jax.random.key(0), (1, 8, 2, 4))
    pattern = jnp.tril(jnp.ones((1, 1, 2, 2), bool))

    def sparse(t):
        q = x * t[0] + t[1]
        out = modules.blocksparse_attention(
            q,
            x,
            x,
            block_mask=pattern,
            q_block_size=4,
            kv_block_size=4,
            causal=True,
            platform="xla",
        )
        return out.sum()

    def dense(t):
        return modules.attention(x * t[0] + t[1], x, x, causal=True, platform="xla")[0].sum()

    t = jnp.array([0.7, 0.2])
    expected = jax.hessian(dense)(t)
    assert jnp.allclose(jax.hessian(sparse)(t), expected, rtol=1e-5, atol=1e-5)
    assert jnp.abs(expected).max() > 1e-3


def test_first_gradient_keeps_all_transformations():
    gradient, x = first("page_attention")
    expected = gradient(x)
    several = jax.jit(jax.vmap(jax.checkpoint(gradient)))(jnp.stack([x, x]))
    assert jnp.allclose(several, expected[None], rtol=1e-5, atol=1e-6)
