"""The state space layer of Mamba-2 against the paper's formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import InvalidArgument, ssd_attention
from ejktest.drawn import array, normal
from ejktest.oracles.linear import linear_attention
from ejktest.tolerance import check_close

DIMS = b, s, h, p, groups, n = 2, 20, 4, 6, 2, 8


def arguments(dtype=jnp.float32, skip=(h,)):
    return {
        "x": normal(b, s, h, p, dtype=dtype),
        "dt": normal(b, s, h, seed=1, dtype=dtype),
        "A": -jnp.abs(normal(h, seed=2)),
        "B": normal(b, s, groups, n, seed=3, dtype=dtype),
        "C": normal(b, s, groups, n, seed=4, dtype=dtype),
        "D": normal(*skip, seed=5),
        "dt_bias": normal(h, seed=6),
        "initial_state": normal(b, h, n, p, seed=7),
    }


def reference(x, dt, A, B, C, D=None, dt_bias=None, initial_state=None, **back):
    """Output, state and gradients by name, in float64 by the chain rule around the recurrence."""
    operands = (x, dt, A, B, C, D, dt_bias, initial_state)
    x, dt, A, B, C, D, dt_bias, initial_state = (np.asarray(a).astype(np.float64) for a in operands)
    raw = dt + dt_bias
    step = np.logaddexp(raw, 0)
    repeat = h // groups
    found = linear_attention(
        np.repeat(C, repeat, 2), np.repeat(B, repeat, 2), x * step[..., None], step * A,
        initial_state=initial_state, softmax_scale=1.0, **back,
    )  # fmt: skip
    g, do = found.grads, np.asarray(back["do"]).astype(np.float64)
    skip = D if D.ndim == 2 else D[:, None]
    dstep = (g["value"] * x).sum(-1) + g["g"] * A
    draw = dstep / (1 + np.exp(-raw))
    dskip = (do * x).sum((0, 1))
    grads = {
        "x": g["value"] * step[..., None] + do * skip,
        "dt": draw,
        "A": (g["g"] * step).sum((0, 1)),
        "B": g["key"].reshape(b, s, groups, repeat, n).sum(3),
        "C": g["query"].reshape(b, s, groups, repeat, n).sum(3),
        "D": dskip if D.ndim == 2 else dskip.sum(-1),
        "dt_bias": draw.sum((0, 1)),
        "initial_state": g["initial_state"],
    }
    return found.o + skip * x, found.state, grads


@pytest.mark.parametrize("skip", [(h,), (h, p)])
def test_values_and_gradients(skip):
    args = arguments(skip=skip)
    do, dstate = normal(b, s, h, p, seed=8), normal(b, h, n, p, seed=9)

    @jax.jit
    def differentiate(args):
        out, back = jax.vjp(lambda a: ssd_attention(**a, dt_softplus=True, return_state=True), args)
        return *out, back((do, dstate))[0]

    y, state, grads = differentiate(args)
    want, want_state, want_grads = reference(**args, do=do, dstate=dstate)
    check_close(y, want)
    check_close(state, want_state)
    for name, g in want_grads.items():
        check_close(grads[name], g, name=f"d{name}")


def test_bfloat16_keeps_its_gates_in_float32():
    args = arguments(jnp.bfloat16)
    y = ssd_attention(**args, dt_softplus=True)
    assert y.dtype == jnp.bfloat16
    check_close(y, reference(**args, do=np.zeros((b, s, h, p)))[0], rms_limit=1e-2)


def test_without_options_and_packed():
    """Packed rows equal a batch; the skip leaves padding 0."""
    args = {name: a for name, a in arguments().items() if name != "dt_bias"}
    args["dt"] = jnp.abs(args["dt"])
    want, want_state = ssd_attention(**args, return_state=True)
    plain = ssd_attention(**{n: a for n, a in args.items() if n != "D"})
    np.testing.assert_allclose(want - plain, args["D"][None, None, :, None] * args["x"], atol=1e-5)

    unbatched = ("A", "D", "initial_state")
    packed = {n: a if n in unbatched else a.reshape(1, -1, *a.shape[2:]) for n, a in args.items()}
    padded = {
        n: a if n in unbatched else jnp.concatenate([a, a[:, :5]], 1) for n, a in packed.items()
    }
    cu = array([0, s, 2 * s], jnp.int32)
    y, state = ssd_attention(**padded, cu_seqlens=cu, return_state=True)
    np.testing.assert_allclose(y[0, : 2 * s].reshape(want.shape), want, atol=1e-5)
    np.testing.assert_array_equal(y[:, 2 * s :], 0)
    np.testing.assert_allclose(state, want_state, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"A": jnp.ones(3)}, "A: expected.*heads=4"),
        ({"C": jnp.ones((b, s, 3, n))}, "C: expected.*groups=2"),
        ({"B": jnp.ones((b, s, 3, n)), "C": jnp.ones((b, s, 3, n))}, "B: expected groups that"),
        ({"D": jnp.ones((h, 5))}, r"D: expected.*v_dim=6"),
        ({"dt_softplus": 1}, "dt_softplus: expected bool"),
        ({"initial_state": jnp.ones((3, h, n, p))}, "initial_state: expected.*one per batch row"),
    ],
)
def test_wrong_arguments(changes, message):
    with pytest.raises(InvalidArgument, match=message):
        ssd_attention(**{**arguments(), **changes})
