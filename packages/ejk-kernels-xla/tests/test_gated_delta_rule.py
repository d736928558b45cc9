"""The gated delta rule against the float64 recurrence."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.xla import gated_delta_rule
from ejkernel.kernels.xla.gated_delta_rule.solve import solve
from ejktest.cases.delta import check_delta, serving_batch
from ejktest.cases.delta import delta_arguments as make
from ejktest.cases.linear import cotangents
from ejktest.drawn import array, normal
from ejktest.grids import cover, without
from ejktest.oracles import delta as oracle
from ejktest.tolerance import check_close
from ejktest.transforms import check_shard_map, check_transformations

DIMS = dict(b=2, s=50, h=4, hk=2, dk=8, dv=6)
PACKED = {**DIMS, "b": 1, "s": 60, "states": 4}
# an empty sequence, one longer than a chunk, one that ends on a chunk, rows of padding
CU = np.array([0, 3, 3, 40, 56], np.int32)


@partial(jax.jit, static_argnames=("tile", "options"))
def differentiate(args, cu_seqlens=None, *, tile=16, options=()):
    """Output, state and gradients of every argument."""

    def apply(args):
        static = dict(options, cfg={"time_tile": tile})
        return gated_delta_rule(**args, cu_seqlens=cu_seqlens, return_state=True, **static)

    out, back = jax.vjp(apply, args)
    return *out, back(cotangents(*out))[0]


def check(args, cu_seqlens=None, *, tile=16, rounded_beta=False, **options):
    """Values and all gradients against the oracle."""
    found = differentiate(args, cu_seqlens, tile=tile, options=tuple(options.items()))
    check_delta(args, found, cu_seqlens=cu_seqlens, rounded_beta=rounded_beta, **options)


@pytest.mark.parametrize("gate", ["none", "head", "channel"])
def test_values_and_gradients(gate):
    check(make(gate, **DIMS))


@pytest.mark.parametrize("s", [5, 50])
def test_reverse_and_normalized(s):
    args = make("channel", **{**DIMS, "s": s})
    args["key"] = args["key"] * jnp.linspace(0.0, 9.0, s)[None, :, None, None]
    check(args, reverse=True, normalize_qk=True, softmax_scale=-0.7)


@pytest.mark.parametrize(("gate", "reverse"), [("head", False), ("channel", True)])
def test_packed_sequences_match_the_reference(gate, reverse):
    check(make(gate, **PACKED), CU, reverse=reverse)


def test_packed_steps():
    cu = np.array([0, 1, 1, 5, 6], np.int32)
    check(make("channel", **{**PACKED, "s": 8}), cu)


def test_chunk_lengths_agree():
    args = make("channel", **{**DIMS, "b": 1, "s": 150, "dk": 16})
    run = jax.jit(partial(gated_delta_rule, return_state=True), static_argnames="cfg")
    want = oracle.gated_delta_rule(**args)

    class Tile:
        def __init__(self, time_tile):
            self.time_tile = time_tile

    for tile in map(Tile, (64, 128)):  # other tests have 16
        o, state = run(**args, cfg=tile)
        check_close(o, want.o)
        check_close(state, want.state)
        again = run(**args, cfg=tile)
        np.testing.assert_array_equal(again[0], o)


def test_gradients_repeat():
    args = make("head", **DIMS)
    jax.tree.map(np.testing.assert_array_equal, differentiate(args), differentiate(args))


# ---- gates, keys and beta at their limits -----------------------------------------------------


@pytest.mark.parametrize(
    ("level", "gate"),
    without(
        itertools.product([-50.0, -3.0e38], ["head", "channel"]),
        (-50.0, "channel"),
        (-3.0e38, "head"),
    ),
)
def test_strong_decay(gate, level):
    """Runs of tokens that hardly decay between tokens that forget everything."""
    args = make(gate, **DIMS)
    strong = (np.arange(50) % 7 < 3).reshape(1, -1, *[1] * (args["g"].ndim - 2))
    check({**args, "g": jnp.where(strong, level, args["g"])})


def test_every_token_forgets():
    args = make("head", **DIMS)
    check({**args, "g": jnp.full_like(args["g"], -50.0)})


def test_minus_infinity_forgets():
    args = make("channel", **DIMS)
    args["g"] = args["g"].at[:, 20].set(-jnp.inf)
    o, _, grads = differentiate(args)
    tail = {n: x[:, 20:] for n, x in args.items() if n != "initial_state"}
    fresh = oracle.gated_delta_rule(**tail).o
    check_close(o[:, 20:], fresh)
    assert all(np.isfinite(g).all() for g in grads.values())
    np.testing.assert_array_equal(grads["g"][:, 20], 0)


def repeated(args, length=1.0):
    """The arguments with the first key of every batch row and head at every token."""
    return {**args, "key": jnp.broadcast_to(args["key"][:, :1], args["key"].shape) * length}


def test_equal_keys():
    check(repeated(make("head", **DIMS)))


@pytest.mark.parametrize("key_length", [1.0, 1.05])
@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_equal_keys_that_reflect_or_grow(key_length, decay):
    """Transitions of eigenvalue -1 (a reflection), and of -1.2: states of 1e16 without decay."""
    args = repeated(make("head", b=1, s=200, h=2, hk=2, dk=8, dv=6), key_length)
    args |= {"beta": jnp.full_like(args["beta"], 2.0), "g": args["g"] * decay}
    check(args, tile=64, rounded_beta=True)


@pytest.mark.parametrize(
    ("tile", "gate"),
    cover([(16, "head"), (64, "channel"), (128, "head")], (16, "head"), (64, "channel")),
)
def test_a_serving_batch_at_its_limits(tile, gate):
    """Sequences with states, of a token, of none and of no whole chunk; gates of 0 and -50, equal
    keys, and beta up to 2, in chunks of every length."""
    args, cu = serving_batch(gate)
    check(args, cu, tile=tile, rounded_beta=True)


def test_beta_of_two_and_none():
    args = make("head", **DIMS)
    check({**args, "beta": jnp.full_like(args["beta"], 2.0)}, rounded_beta=True)
    ones = {**args, "beta": jnp.ones_like(args["beta"])}
    without = {n: x for n, x in args.items() if n != "beta"}
    np.testing.assert_allclose(gated_delta_rule(**without), gated_delta_rule(**ones), atol=1e-6)


def test_triangular_systems():
    """Rows of 2 below the diagonal, whose inverse has entries of 2 and whose powers overflow."""
    n = array(np.tril(np.full((64, 64), 2.0), -1), jnp.float32)
    r = normal(64, 5)
    exact = np.eye(64) + np.asarray(n, np.float64)
    x, back = jax.vjp(jax.jit(solve), n, r)
    want = np.linalg.solve(exact, np.asarray(r, np.float64))
    check_close(x, want)
    dn, dr = back(r)
    want_dr = np.linalg.solve(exact.T, np.asarray(r, np.float64))
    check_close(dr, want_dr)
    check_close(dn, np.tril(-want_dr @ want.T, -1))


def test_rounding_does_not_grow_with_length():
    """Tokens that hardly decay: rounding does not accumulate."""
    args = make("head", b=1, s=2048, h=1, hk=1, dk=8, dv=8)
    args["g"] = args["g"] * 1e-3
    o = gated_delta_rule(**args)
    check_close(o, oracle.gated_delta_rule(**args).o)


# ---- states -----------------------------------------------------------------------------------


def test_decoding_continues():
    """All tokens at once equal 20 at once and then one after the other."""
    args = make("channel", **{**DIMS, "s": 24})
    state = args.pop("initial_state")
    run = jax.jit(partial(gated_delta_rule, return_state=True, normalize_qk=True))
    full, last = run(**args, initial_state=state)
    o, state = run(**{n: x[:, :20] for n, x in args.items()}, initial_state=state)
    outs = [o]
    for t in range(20, 24):
        o, state = run(**{n: x[:, t : t + 1] for n, x in args.items()}, initial_state=state)
        outs.append(o)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), full, atol=2e-6)
    np.testing.assert_allclose(state, last, atol=2e-6)


def test_empty_sequences_and_padding():
    args = make("head", **PACKED)
    o, state, grads = differentiate(args, jnp.zeros(5, jnp.int32))
    np.testing.assert_array_equal(o, 0)
    np.testing.assert_array_equal(state, args["initial_state"])
    np.testing.assert_array_equal(grads["initial_state"], cotangents(o, state)[1])
    for name in set(args) - {"initial_state"}:
        np.testing.assert_array_equal(grads[name], 0)


@pytest.mark.parametrize("cu", [None, np.zeros(3, np.int32)])
def test_no_tokens(cu):
    args = make("head", **{**DIMS, "s": 0, "b": 1 if cu is not None else 2, "states": 2})
    o, state = gated_delta_rule(**args, cu_seqlens=cu, return_state=True)
    assert o.shape == args["value"].shape
    np.testing.assert_array_equal(state, args["initial_state"])


# ---- dtypes, shapes, memory, transformations --------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_dtypes_match_the_reference(dtype):
    check(make("head", **DIMS, dtype=dtype))


def test_float64_matches_the_reference():
    with jax.enable_x64(True):
        args = make("channel", **DIMS, dtype=np.float64)
        check(args)
        mixed = {**args, "query": args["query"].astype(jnp.float32)}
        o, state = gated_delta_rule(**mixed, return_state=True)
        assert (o.dtype, state.dtype) == (jnp.float32, jnp.float64)


@pytest.mark.parametrize(
    ("h", "hk", "dk", "dv", "s"), [(6, 3, 1, 7, 17), (3, 1, 5, 1, 16), (2, 2, 3, 3, 1)]
)
def test_any_shape(h, hk, dk, dv, s):
    args = make("head", b=1, s=s, h=h, hk=hk, dk=dk, dv=dv)
    o, state = gated_delta_rule(**args, return_state=True)
    want = oracle.gated_delta_rule(**args)
    check_close(o, want.o)
    check_close(state, want.state)


@pytest.mark.parametrize(("gate", "cu"), [("none", None), ("head", None), ("channel", CU)])
def test_nothing_is_promoted(gate, cu):
    args = make(gate, **(DIMS if cu is None else PACKED))
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        options = (("normalize_qk", True),)
        jax.eval_shape(partial(differentiate.__wrapped__, options=options), args, cu)


def test_gradients_keep_a_state_per_chunk():
    """The gradient keeps a state per chunk, none per token."""
    s, d = 4096, 64
    args = make("head", b=1, s=s, h=1, hk=1, dk=d, dv=d)
    grad = jax.jit(jax.grad(lambda a: gated_delta_rule(**a).sum()))
    used = grad.lower(args).compile().memory_analysis().temp_size_in_bytes / (4 * s * d)
    print(f"temporaries of {used:.1f} row arrays; a state per token would be {d}")
    assert used < 24


def test_transformations_keep_results():
    args = make("channel", b=1, s=18, h=2, hk=1, dk=4, dv=3)
    pairs = {name: jnp.stack([x, 0.5 * x]) for name, x in args.items()}
    check_transformations(partial(gated_delta_rule, cfg={"time_tile": 4}), pairs)


def test_shard_map():
    """Some arguments sharded over the heads, others replicated."""
    args = make("head", **{**DIMS, "b": 1, "h": 2, "states": 2})
    del args["g"], args["beta"]
    heads = P(None, None, "x")
    run = partial(gated_delta_rule, cu_seqlens=jnp.array([0, 20, 45]), cfg={"time_tile": 16})
    check_shard_map(run, args, {n: heads for n in ("query", "key", "value")}, heads)


def test_a_chunk_is_a_power_of_two():
    with pytest.raises(ValueError, match="time_tile"):
        gated_delta_rule(**make("head", **DIMS), cfg={"time_tile": 24})
