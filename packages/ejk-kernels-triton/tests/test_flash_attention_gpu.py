"""Flash attention on a GPU at real sizes: values, gradients, repeatability, transformations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejktest import at_size
from ejktest.cases import large_logits
from ejktest.cases.attention import AT_SIZE

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import flash_attention
from ejkernel.kernels.triton.targets import current_target
from ejktest.ahead import compile_side_by_side, lower_case

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def references(request: pytest.FixtureRequest):
    """Inputs and reference of a case of this run, its kernels compiled.

    Processes compile kernels while threads compile and run references.
    """
    with at_size.ahead(request, lambda name: at_size.expected(AT_SIZE[name]), 4) as expected:
        calls = [AT_SIZE[name] for name in at_size.names_in_run(request) if name in AT_SIZE]
        compile_side_by_side((lower_case, call, current_target()) for call in calls)
        yield expected


@pytest.mark.parametrize("name", AT_SIZE)
def test_against_float32(name: str, references) -> None:
    """o, lse and all gradients; the second run has the same bits."""
    at_size.check(AT_SIZE[name], flash_attention, references(name))


@pytest.mark.parametrize("name", large_logits.AT_SIZE)
def test_large_finite_logits_are_numbers(name: str) -> None:
    """o, lse and all gradients."""
    large_logits.check_at_size(large_logits.AT_SIZE[name], flash_attention)


def loss(q, k, v):
    o = flash_attention(q, k, v, causal=True, dropout_prob=0.1, dropout_seed=3)
    return (o.astype(jnp.float32) ** 2).sum()


grad = jax.grad(loss, (0, 1, 2))


def test_vmap_of_grad_has_the_bits_of_single_calls() -> None:
    x = at_size.small(3)
    mapped = jax.jit(jax.vmap(grad))(*x)
    for i in range(3):
        for a, b in zip(mapped, jax.jit(grad)(*(a[i] for a in x)), strict=True):
            np.testing.assert_array_equal(a[i], b)


def test_checkpoint_and_scan() -> None:
    """Up to the rounding of what XLA fuses differently around the kernels."""
    q, k, v = at_size.small()

    def layer(x, _):
        return flash_attention(x, k, v, causal=True), None

    def scanned(q):
        return (jax.lax.scan(jax.checkpoint(layer), q, None, length=2)[0] ** 2).sum()

    def unrolled(q):
        return (layer(layer(q, None)[0], None)[0] ** 2).sum()

    got, want = (jax.jit(jax.grad(f))(q) for f in (scanned, unrolled))
    assert at_size.relative(got, want) <= at_size.BOUND["bfloat16"]


def test_shard_map_on_one_device() -> None:
    x = at_size.small()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    P = jax.sharding.PartitionSpec
    mapped = jax.shard_map(
        lambda q, k, v: flash_attention(q, k, v, causal=True),
        mesh=mesh,
        in_specs=(P("x"),) * 3,
        out_specs=P("x"),
    )
    plain = jax.jit(lambda *x: flash_attention(*x, causal=True))
    np.testing.assert_array_equal(jax.jit(mapped)(*x), plain(*x))


def test_lengths_of_both_divisibilities_in_one_process() -> None:
    """Calls with 256, 257 and 272 rows: code made for one length is not used for another."""
    exact = jax.jit(at_size.reference, compiler_options=at_size.UNTUNED)
    for n in (256, 257, 272, 265):
        q, k, v = (x[:, :n] for x in at_size.small())
        o = flash_attention(q, k, v)
        want, _ = exact(q, k, v)
        assert at_size.relative(o, want) <= at_size.BOUND["bfloat16"]


def test_rows_without_keys() -> None:
    """Zero, with lse -inf; no gradient passes through them, sinks included."""
    q, k, v = at_size.small()
    sinks = jnp.ones((4, 1))

    def run(q, sinks):
        o, lse = flash_attention(
            q, k, v, softmax_aux=sinks, causal=True, causal_offset=-100, return_lse=True
        )
        return (o[:, :100].astype(jnp.float32) ** 2).sum(), (o, lse)

    grads, (o, lse) = jax.grad(run, (0, 1), has_aux=True)(q, sinks)
    assert not o[:, :100].any() and bool((lse[:, :100] == -jnp.inf).all())
    assert bool(jnp.isfinite(lse[:, 100:]).all())
    assert not any(bool(g.any()) for g in grads)


@pytest.mark.parametrize(("d", "causal", "blocks"), [(128, True, 1), (64, False, 5), (96, True, 5)])
def test_8_bits_against_float32(d: int, causal: bool, blocks: int) -> None:
    at_size.check_eight_bit(flash_attention, d, causal=causal, blocks=blocks)
