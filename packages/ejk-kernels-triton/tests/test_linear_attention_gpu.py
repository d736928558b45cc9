"""Linear attention and pooling on a GPU: real tiles against float64, and two runs alike."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejktest.oracles import linear as oracle
from ejktest.oracles import pooling
from ejktest.tolerance import check_close

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import mean_pooling, recurrent_attention

pytestmark = pytest.mark.gpu
# float32 matmuls run as TF32, which has the mantissa of float16
WORKING = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float16"}


def draw(s, h, hk, dk, dv, states, dtype, size, gate):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    def decay(*channels):
        return -size * jnp.abs(normal(1, s, h, *channels))

    return {
        "query": normal(1, s, h, dk),
        "key": normal(1, s, hk, dk),
        "value": normal(1, s, hk, dv),
        **({"gv": decay(dv)} if gate == "values" else {"g": decay(*[dk] * (gate == "keys"))}),
        "initial_state": normal(states, h, dk, dv).astype(jnp.float32),
    }


@pytest.mark.parametrize("dtype", WORKING)
@pytest.mark.parametrize(
    ("dims", "cu", "reverse"),
    [
        ((512, 2, 2, 128, 128), None, False),
        ((256, 2, 1, 64, 128), None, True),
        ((700, 2, 1, 128, 64), None, True),
        ((700, 2, 1, 64, 64), [0, 100, 100, 357, 650], False),
        ((300, 1, 1, 256, 256), None, False),
        ((300, 2, 1, 80, 96), [0, 33, 300], True),
    ],
)
@pytest.mark.parametrize(
    ("gate", "size"),
    [(kind, size) for kind in ("rows", "keys", "values") for size in (0.03, 20.0)],
)
def test_against_float64(dims, cu, reverse, dtype, gate, size):
    states = 1 if cu is None else len(cu) - 1
    args = draw(*dims, states, dtype, size, gate)
    cu = None if cu is None else np.asarray(cu, np.int32)
    rng = np.random.default_rng(1)
    do = jnp.asarray(rng.standard_normal((*args["query"].shape[:3], dims[4])), dtype)
    dstate = jnp.asarray(rng.standard_normal(args["initial_state"].shape), jnp.float32)

    @jax.jit
    def pull(args, cu):
        def run(args):
            return recurrent_attention(**args, cu_seqlens=cu, reverse=reverse, return_state=True)

        out, back = jax.vjp(run, args)
        return out, back((do, dstate))[0]

    (o, state), grads = pull(args, cu)
    again = pull(args, cu)
    want = oracle.linear_attention(**args, cu_seqlens=cu, reverse=reverse, do=do, dstate=dstate)
    working = WORKING[dtype]
    check_close(o, want.o, dtype=working, name="o")
    check_close(state, want.state, dtype=working, name="state")
    for name in args:
        check_close(grads[name], want.grads[name], dtype=working, name=f"d{name}")
        np.testing.assert_array_equal(grads[name], again[1][name])
    np.testing.assert_array_equal(o, again[0][0])


@pytest.mark.parametrize(
    ("dims", "cu", "reverse"),
    [((512, 2, 2, 128, 128), None, False), ((700, 2, 1, 64, 64), [0, 100, 100, 357, 600], True)],
)
def test_constants_are_rows_of_one_gate(dims, cu, reverse):
    args = draw(*dims, 1 if cu is None else len(cu) - 1, "bfloat16", 0.03, "rows")
    cu = None if cu is None else np.asarray(cu, np.int32)
    gate = jnp.asarray([-0.01, -20.0])

    @jax.jit
    def pull(gate):
        def run(args):
            return recurrent_attention(**args, cu_seqlens=cu, reverse=reverse)

        others = {name: x for name, x in args.items() if name != "g"}
        o, back = jax.vjp(run, others | {"g_gamma" if gate.ndim == 1 else "g": gate})
        return o, back(o)[0]

    o, grads = pull(gate)
    want, of_rows = pull(jnp.broadcast_to(gate, args["g"].shape))
    check_close(o, want.astype(jnp.float32), dtype="bfloat16", name="o")
    of_rows["g_gamma"] = of_rows.pop("g").sum((0, 1))
    for name, x in grads.items():
        check_close(x, of_rows[name].astype(jnp.float32), dtype="bfloat16", name=f"d{name}")


@pytest.mark.parametrize(
    ("gate", "strong"), [("keys", False), ("keys", True), ("rows", False), ("rows", True)]
)
def test_64k_tokens(gate, strong):
    """Tokens hardly decay, but for ``strong`` runs by -20 each, of one channel in three if any."""
    args = draw(65536, 1, 1, 32, 32, 1, "bfloat16", 1e-3, gate)
    if strong and gate == "rows":
        tokens = jnp.arange(65536)[None, :, None] % 11 < 4
        args["g"] = jnp.where(tokens, -20.0, args["g"]).astype(jnp.bfloat16)
    elif strong:
        tokens = jnp.arange(65536)[None, :, None, None] % 11 < 4
        channels = jnp.arange(32) % 3 == 0
        args["g"] = jnp.where(tokens & channels, -20.0, args["g"]).astype(jnp.bfloat16)
    do = jnp.asarray(np.random.default_rng(1).standard_normal((1, 65536, 1, 32)), jnp.bfloat16)
    o, back = jax.vjp(lambda args: recurrent_attention(**args), args)
    (grads,) = back(do)
    want = oracle.linear_attention(**args, do=do)
    check_close(o, want.o, name="o")
    for name in args:
        check_close(grads[name], want.grads[name], dtype="bfloat16", name=f"d{name}")


@pytest.mark.parametrize("cu", [None, [0, 1, 1, 2, 4]])
def test_a_few_tokens(cu):
    """Token after token, in the memory of the state that is given away."""
    args = draw(5, 4, 2, 128, 128, 4 if cu else 1, "bfloat16", 0.3, "rows")
    cu = None if cu is None else np.asarray(cu, np.int32)
    if cu is not None:
        args = {n: x if n == "initial_state" else x[:, :4] for n, x in args.items()}
    want = oracle.linear_attention(**args, cu_seqlens=cu)
    given = args.pop("initial_state")

    def run(state, args, cu):
        return recurrent_attention(**args, initial_state=state, cu_seqlens=cu, return_state=True)

    step = jax.jit(run, donate_argnums=0)
    o, state = step(given + 0, args, cu)
    check_close(o, want.o)
    check_close(state, want.state)
    shape = ",".join(map(str, given.shape))
    program = step.lower(given, args, cu).compile().as_text()
    assert f"f32[{shape}]{{3,2,1,0}} copy(" not in program


@pytest.mark.parametrize("dtype", WORKING)
@pytest.mark.parametrize(
    ("shape", "cu", "chunk"),
    [
        ((2, 1000, 4, 128), None, 64),
        ((2, 1000, 130), None, 7),
        ((1, 20000, 256), None, None),
        ((20000, 256), [0, 4000, 4000, 4001, 19000], None),
        ((3000, 256), [0, 1000, 2999], 100),
    ],
)
def test_mean_pooling_matches_the_reference(shape, cu, chunk, dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)
    cu = None if cu is None else np.asarray(cu, np.int32)
    out, back = jax.vjp(lambda x: mean_pooling(x, cu, chunk_size=chunk), x)
    want, dwant = pooling.mean_pooling(x, cu, chunk_size=chunk, dout=out)
    check_close(out, want)
    check_close(back(out)[0], dwant)
