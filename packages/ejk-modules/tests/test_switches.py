"""With JAX's switches set as strict callers set them; the 64-bit one is in test_wide."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

import ejkernel.modules as modules
from ejkernel.ops import interpret_mode
from ejktest.grids import without
from ejktest.variants import options

OPTIONS = options()
WIDE = {"float32": "float64", "int32": "int64"}

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("ejkernel.kernels.triton") is None,
    reason="the package of Triton kernels is not installed",
)


def narrow(x):
    """bfloat16: what promotes anything promotes this."""
    return x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x


def trace(c, convert=narrow, **how):
    """The program of the call's values and gradients; nothing is compiled."""
    arrays = {name: convert(x) for name, x in c.arrays.items()}
    wanted = {name: arrays.pop(name) for name in c.gradients}

    def loss(given):
        out = getattr(modules, c.operation)(**given, **arrays, **c.static, **how)
        return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(out))

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        return jax.make_jaxpr(jax.value_and_grad(loss))(wanted)


# the first three make the passes of flash attention, with their own arguments one by one in
# test_argument_switches; ragged_page_attention_v3 has the kernel of the last, and writes besides
COVERED = (
    "blocksparse_attention", "mla_attention", "scaled_dot_product_attention",
    "ragged_page_attention",
)  # fmt: skip


@pytest.mark.parametrize("operation", without(sorted(OPTIONS), *COVERED))
def test_no_operation_promotes_ranks_or_dtypes(operation):
    for label, c in OPTIONS[operation]:
        try:
            trace(c, platform="xla")
        except (TypeError, ValueError) as error:
            raise AssertionError(f"{operation}, {label}: {error}") from error


@pytest.mark.parametrize("operation", sorted(OPTIONS))
def test_no_operation_promotes_wide_indices(operation):
    with jax.enable_x64(True):
        for _, c in OPTIONS[operation][:: len(OPTIONS[operation]) - 1]:  # the first and the last
            trace(c, lambda x: x.astype(WIDE.get(x.dtype.name, x.dtype)), platform="xla")


@pytest.mark.parametrize(
    ("operation", "platform"),
    [
        pytest.param("flash_attention", "triton", marks=needs_triton),
        ("flash_attention", "pallas"),
        pytest.param("page_attention", "triton", marks=needs_triton),
    ],
)
def test_no_kernel_promotes_ranks_or_dtypes(operation, platform):
    ran = []
    with interpret_mode():
        for label, c in options(value_dim=8)[operation]:
            refused = not modules.supports(operation, platform=platform, **c.arguments)
            if not refused:
                trace(c, platform=platform)
                ran.append(label)
    assert len(ran) >= 3, ran


def test_dtypes_that_differ_are_promoted_by_the_operation():
    c = dict(OPTIONS["flash_attention"])["plain"]
    arrays = {**c.arrays, "key": narrow(c.arrays["key"])}
    with jax.numpy_dtype_promotion("strict"):
        strict = jax.make_jaxpr(lambda a: modules.flash_attention(**a))(arrays)
    assert str(strict) == str(jax.make_jaxpr(lambda a: modules.flash_attention(**a))(arrays))
