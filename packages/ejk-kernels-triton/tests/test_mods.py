"""score_mod and mask_mod in Triton, run by its interpreter, against the float64 oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("ejkernel.kernels.xla", reason="gradients of captured arrays are XLA's")

from ejkernel.kernels.triton import flash_attention
from ejkernel.kernels.triton.flash_attention.mods import source
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import interpret_mode
from ejkernel.types import MaskInfo
from ejkernel.types.masks.structure import Unsupported
from ejkernel.types.mods import MASK, SCORE, trace_mod
from ejktest import mods
from ejktest.grids import cover
from ejktest.mods import FORMS
from ejktest.oracles import attention as oracle
from ejktest.tolerance import check_close

CFG = {
    "fwd_params": {"q_blocksize": 16, "kv_blocksize": 32},
    "bwd_params": {"q_blocksize": 16, "kv_blocksize": 16, "blocksize_m": 16, "blocksize_n": 16},
}


@pytest.fixture(autouse=True)
def interpreted():
    with interpret_mode(), compile_for(cuda_target(80)):
        yield


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "form",
    # of other bands and of other functions of the distance; XLA's tests have all
    cover(
        FORMS,
        *(f for f in FORMS if str(f) not in ("alibi", "prefix_lm", "log_distance_causal")),
    ),
    ids=str,
)
def test_against_oracle(form) -> None:
    x = mods.arrays(form)
    mods.check(form, x, *mods.run_form(flash_attention, form, x, cfg=CFG))


def loss(q, k, v, w, **options):
    mods = {
        "score_mod": lambda s, b, h, i, j: s * w[h] + jnp.sin(w[(i + j) % 2]) * b,
        "mask_mod": lambda b, h, i, j: (j <= i + h) | (j < b),
    }
    return (flash_attention(q, k, v, cfg=CFG, **mods, **options) ** 2).sum()


def small_arrays(*lead: int):
    rng = np.random.default_rng(0)
    shapes = ((2, 20, 2, 16), (2, 20, 1, 16), (2, 20, 1, 16), (2,))
    return tuple(jnp.asarray(rng.standard_normal((*lead, *s)), jnp.float32) for s in shapes)


grad = jax.grad(loss, (0, 1, 2, 3))


def close(a, b) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-3, rtol=2e-4), a, b)


def test_under_vmap_indices_are_those_of_each_call() -> None:
    """Mapped batch rows become rows of one launch; mapped captured arrays run one after another."""
    x = small_arrays(2)
    alone = [jax.jit(grad)(*(a[i] for a in x)) for i in (0, 1)]
    shared = jax.jit(jax.vmap(grad, (0, 0, 0, None)))(*x[:3], x[3][0])
    close(jax.tree.map(lambda a: a[0], shared), alone[0])
    close(jax.jit(jax.vmap(grad))(*x), jax.tree.map(lambda *g: jnp.stack(g), *alone))


def test_next_to_every_other_option() -> None:
    """A bias with its gradient, a cap, dropout, sinks and a known block map."""
    rng = np.random.default_rng(0)
    x = {n: np.asarray(a) for n, a in zip("qkvw", small_arrays(), strict=True)}
    x |= {"bias": rng.standard_normal((1, 2, 20, 20), np.float32)}
    x |= {"sinks": rng.standard_normal((2, 1), np.float32)}
    do = rng.standard_normal((2, 20, 2, 16), np.float32)
    ids, i, j = np.repeat([0, 1], [7, 13]), np.arange(20)[:, None], np.arange(20)
    traced = jnp.asarray(ids)
    mask = MaskInfo.from_mask_mod(lambda b, h, i, j: traced[i] == traced[j], 20, 20, block_size=4)

    def run(q, k, v, w, bias, sinks):
        return flash_attention(
            q, k, v, bias, softmax_aux=sinks, logits_soft_cap=3.0, dropout_prob=0.3,
            dropout_seed=1, mask_info=mask & MaskInfo.from_causal(), cfg=CFG,
            score_mod=lambda s, b, h, i, j: s + w[h] * (j - i),
        )  # fmt: skip

    @jax.jit
    def differentiate(arrays, do):
        o, back = jax.vjp(run, *arrays)
        return o, back(do)

    o, gradients = differentiate(tuple(x.values()), do)
    gradients = dict(zip(x, gradients, strict=True))
    linear = x["w"][None, :, None, None] * (j - i)
    drop = oracle.dropout_factor(0.3, 1, (2, 2, 20, 20))
    see = ((ids[:, None] == ids) & (j <= i))[None, None]
    case = oracle.Case(
        x["q"], x["k"], x["v"], np.float32(x["bias"] + linear), x["sinks"], see, cap=3.0, drop=drop
    )
    exact, plain = (oracle.attention(case, plain=flag) for flag in (False, True))
    check_close(o, exact.o, plain.o, factor=3.0)
    exact, plain = (oracle.gradients(case, do, plain=flag) for flag in (False, True))
    for name in ("q", "k", "v", "bias", "sinks"):
        expected, usual = (getattr(g, f"d{name}") for g in (exact, plain))
        check_close(gradients[name], expected, usual, factor=3.0, name=f"d{name}")
    expected, usual = ((g.dbias * (j - i)).sum((0, 2, 3)) for g in (exact, plain))
    check_close(gradients["w"], expected, usual, factor=3.0, name="dw")


def refusal(function, name: str = SCORE) -> str:
    with pytest.raises(Unsupported) as caught:
        source(trace_mod(name, function).form)
    return str(caught.value)


def test_refusals_name_the_primitive() -> None:
    w = jnp.arange(8.0)
    assert refusal(lambda s, b, h, q, k: s + w.sum()).startswith("score_mod: primitive reduce_sum")
    drawn = lambda b, h, q, k: jax.random.uniform(jax.random.key(q)) < 0.5  # noqa: E731
    assert refusal(drawn, MASK).startswith("mask_mod: primitive random_")
    loop = lambda s, b, h, q, k: jax.lax.fori_loop(0, 3, lambda i, x: x * s, s)  # noqa: E731
    assert "primitive scan" in refusal(loop) or "primitive while" in refusal(loop)
    many = [w + n for n in range(17)]
    text = refusal(lambda s, b, h, q, k: s + sum(a[h] for a in many))
    assert text == "score_mod: captures more than 16 arrays"
    assert "shape [8]" in refusal(lambda s, b, h, q, k: s + (w * 2)[h])


def test_the_source_depends_on_equations_alone() -> None:
    """Two calls of a function with different arrays share code; arrays are read in bounds."""

    def of(table):
        return trace_mod(SCORE, lambda s, b, h, q, k: s + table[h, (q - k) % 5] * jnp.exp2(-h)).form

    rng = np.random.default_rng(0)
    first, second = (of(jnp.asarray(rng.standard_normal((4, 5)))) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert source(first) == source(second)
    assert source(first) != source(of(jnp.zeros((3, 5))))


READS = {
    "two indices": lambda t, h: t[h, 2],
    "a row, then": lambda t, h: t[h][h % 5],
    "take": lambda t, h: jnp.take(t[2], h, mode="clip"),
    "gather": lambda t, h: t.at[h, h].get(mode="clip"),
    "a column": lambda t, h: t[:, 3][h],
    "from the end": lambda t, h: t[-1, -h],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reads_of_a_captured_array(read) -> None:
    table, q = jnp.arange(20.0).reshape(4, 5), jnp.ones((1, 16, 4, 16))

    def score(s, b, h, i, j):
        return read(table, h) * j

    lse = flash_attention(q, q, q, score_mod=score, return_lse=True, cfg=CFG)[1][0, 0]
    factors = jax.vmap(lambda h: read(table, h))(jnp.arange(4))
    expected = jax.nn.logsumexp(factors[:, None] * jnp.arange(16), -1)
    np.testing.assert_allclose(lse, expected, rtol=1e-5)
