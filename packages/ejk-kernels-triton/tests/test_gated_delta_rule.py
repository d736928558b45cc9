"""The gated delta rule through Triton's interpreter, against the float64 recurrence."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from ejkernel.kernels.triton import gated_delta_rule
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import interpret_mode
from ejkernel.types.masks.structure import Unsupported
from ejktest.cases.delta import check_delta, serving_batch
from ejktest.cases.delta import delta_arguments as make
from ejktest.cases.linear import cotangents
from ejktest.grids import without
from ejktest.oracles import delta as oracle
from ejktest.tolerance import check_close
from ejktest.transforms import check_transformations

DIMS = dict(b=2, s=40, h=4, hk=2, dk=12, dv=20)
# where rounding is tested, not which row belongs to which head
NUMBERS = {**DIMS, "b": 1, "h": 2, "hk": 1}
# full tiles, which go through the copy engine
FULL = dict(b=1, s=128, h=1, hk=1, dk=16, dv=32)
PACKED = {**DIMS, "b": 1, "s": 44, "h": 2, "hk": 1, "states": 5}
# an empty sequence, one longer than a chunk, one of a single token, rows of padding
CU = np.array([0, 3, 3, 36, 37, 40], np.int32)
SMALL = {"time_tile": 16, "dv_tile": 16}


@pytest.fixture(autouse=True)
def interpreted():
    with interpret_mode(), compile_for(cuda_target(90)):
        yield


@partial(jax.jit, static_argnames=("tile", "options"))
def differentiate(args, cu_seqlens=None, *, tile=16, options=()):
    """Output, state and gradients of every argument."""

    def apply(args):
        static = dict(options, cfg=SMALL | {"time_tile": tile})
        return gated_delta_rule(**args, cu_seqlens=cu_seqlens, return_state=True, **static)

    out, back = jax.vjp(apply, args)
    return *out, back(cotangents(*out))[0]


def check(args, cu_seqlens=None, *, tile=16, rounded_beta=False, **options):
    """Values and all gradients against the oracle."""
    found = differentiate(args, cu_seqlens, tile=tile, options=tuple(options.items()))
    accuracy = {"state_dtype": args["query"].dtype, "rounded_beta": rounded_beta}
    check_delta(args, found, cu_seqlens=cu_seqlens, **accuracy, **options)
    return found


@pytest.mark.parametrize("gate", without(["none", "head", "channel"], "head"))
def test_values_and_gradients(gate):
    check(make(gate, **DIMS))


@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("reverse", [False, True])
def test_full_chunks(tile, reverse):
    """Through the copy engine; chunks of two and of four blocks."""
    check(make("head", **FULL), tile=tile, reverse=reverse)


@pytest.mark.parametrize(("tile", "reverse"), [(32, True), (64, False)])
def test_full_chunks_with_gates_per_channel(tile, reverse):
    check(make("channel", **FULL), tile=tile, reverse=reverse, normalize_qk=True)


def test_where_matmuls_are_synchronous():
    with compile_for(cuda_target(80)):
        check(make("head", **NUMBERS), tile=32, softmax_scale=-0.7)


@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("s", [5, 40])
def test_reverse_and_normalized(s, gate):
    args = make(gate, **{**NUMBERS, "s": s})
    args["key"] = args["key"] * jnp.linspace(0.0, 9.0, s)[None, :, None, None]
    check(args, reverse=True, normalize_qk=True, softmax_scale=-0.7)


@pytest.mark.parametrize(
    ("gate", "reverse"), without([("head", 0), ("head", 1), ("channel", 1)], ("head", 1))
)
def test_packed_sequences_match_the_reference(gate, reverse):
    o, *_ = check(make(gate, **PACKED), CU, reverse=bool(reverse))
    np.testing.assert_array_equal(o[:, 40:], 0)


@pytest.mark.parametrize("reverse", without([False, True], False))
def test_packed_through_the_copy_engine(reverse):
    gate = "head" if reverse else "channel"
    check(make(gate, **{**PACKED, "dk": 16, "dv": 32}), CU, reverse=reverse, normalize_qk=True)


@pytest.mark.parametrize("reverse", [False, True])
def test_packed_tokens_of_many_sequences(reverse):
    """One after the other, the state read and written once; gradients as of more tokens."""
    o, *_ = check(make("head", **{**PACKED, "s": 8}), np.array([0, 1, 1, 4, 5, 6]), reverse=reverse)
    np.testing.assert_array_equal(o[:, 6:], 0)


def test_many_sequences_of_nothing():
    args = make("head", **PACKED)
    o, state, grads = differentiate(args, jnp.zeros(6, jnp.int32))
    np.testing.assert_array_equal(o, 0)
    np.testing.assert_array_equal(state, args["initial_state"])
    np.testing.assert_array_equal(grads["initial_state"], cotangents(o, state)[1])
    for name in set(args) - {"initial_state"}:
        np.testing.assert_array_equal(grads[name], 0)


@pytest.mark.parametrize("gate", without(["head", "channel"], "head"))
def test_padding_may_hold_nan(gate):
    args = make(gate, **{**PACKED, "h": 1})
    names = set(args) - {"initial_state"}
    dirty = args | {name: args[name].at[:, 40:].set(jnp.nan) for name in names}
    want = differentiate(args, CU, options=(("normalize_qk", True),))
    found = differentiate(dirty, CU, options=(("normalize_qk", True),))
    jax.tree.map(np.testing.assert_array_equal, found, want)


# ---- gates, keys and beta at their limits -----------------------------------------------------


@pytest.mark.parametrize("level", [-50.0, -3.0e38])
def test_strong_decay(level):
    """Runs of tokens that hardly decay between tokens that forget everything."""
    args = make("head", **NUMBERS)
    strong = (np.arange(40) % 7 < 3).reshape(1, -1, 1)
    check({**args, "g": jnp.where(strong, level, args["g"])})


@pytest.mark.parametrize("level", [-50.0, -3.0e38])
def test_strong_decay_of_channels(level):
    """Every channel forgets at other tokens; between these it hardly decays."""
    args = make("channel", **NUMBERS)
    place = np.arange(40)[:, None, None] + 2 * np.arange(12)
    check({**args, "g": jnp.where(place % 7 < 3, level, args["g"] / 64)}, tile=32)


@pytest.mark.parametrize(("gate", "level"), [("head", -50.0), ("channel", -4.0)])
def test_every_token_forgets(gate, level):
    """All at once, or so much that only blocks of 16 tokens decay by less than 2^-112."""
    args = make(gate, **NUMBERS)
    check({**args, "g": jnp.full_like(args["g"], level)}, tile=32)


def repeated(args, length=1.0):
    """The arguments with the first key of every batch row and head at every token."""
    return {**args, "key": jnp.broadcast_to(args["key"][:, :1], args["key"].shape) * length}


@pytest.mark.parametrize("key_length", [1.0, 1.05])
@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_equal_keys_that_reflect_or_grow(key_length, decay):
    """Transitions of eigenvalue -1 (a reflection), and of -1.2: states of 1e16 without decay."""
    args = repeated(make("head", b=1, s=200, h=2, hk=2, dk=8, dv=6), key_length)
    args |= {"beta": jnp.full_like(args["beta"], 2.0), "g": args["g"] * decay}
    check(args, tile=64, rounded_beta=True)


@pytest.mark.parametrize(("tile", "gate"), [(32, "channel"), (64, "head")])
def test_a_serving_batch_at_its_limits(tile, gate):
    args, cu = serving_batch(gate)
    check(args, cu, tile=tile, rounded_beta=True)


def test_beta_between_zero_and_two():
    """A beta of 0 changes no state, and has a gradient."""
    args = make("head", **NUMBERS)
    beta = args["beta"].at[:, ::3].set(2.0).at[:, 1::3].set(0.0)
    check({**args, "beta": beta}, rounded_beta=True)


# ---- dtypes, states, transformations ----------------------------------------------------------


@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_dtypes_match_the_reference(dtype, gate):
    check(make(gate, **NUMBERS, dtype=dtype))


def test_narrow_equal_keys():
    """A bfloat16 key keeps its exact length in a chunk, where normalization divides it."""
    args = repeated(make("head", b=1, s=128, h=2, hk=1, dk=16, dv=16, dtype=jnp.bfloat16))
    args |= {"beta": jnp.full_like(args["beta"], 2.0)}
    o, state = gated_delta_rule(**args, normalize_qk=True, return_state=True)
    want = oracle.gated_delta_rule(**args, normalize_qk=True)
    check_close(o, want.o)
    check_close(state, want.state, dtype=jnp.bfloat16)


@pytest.mark.parametrize("state", [jnp.float32, jnp.bfloat16])
def test_one_token_is_one_launch(state):
    """In the memory of a float32 state."""
    args = make("head", **{**DIMS, "s": 1}, dtype=jnp.bfloat16)
    args["initial_state"] = args["initial_state"].astype(state)
    run = jax.jit(partial(gated_delta_rule, return_state=True, normalize_qk=True))
    program = str(run.trace(**args).jaxpr)
    assert program.count("DecodeLaunch") == 1 and "ScanLaunch" not in program
    assert f"overwrites={state == jnp.float32}" in program
    o, final = run(**args)
    want = oracle.gated_delta_rule(**args, normalize_qk=True)
    check_close(o, want.o)
    check_close(final, want.state)


def test_decoding_continues():
    """All tokens at once equal 36 at once and then one after the other."""
    args = make("head", **NUMBERS)
    state = args.pop("initial_state")
    run = partial(gated_delta_rule, return_state=True, normalize_qk=True, cfg=SMALL)
    full, last = run(**args, initial_state=state)
    o, state = run(**{n: x[:, :36] for n, x in args.items()}, initial_state=state)
    outs = [o]
    for t in range(36, 40):
        o, state = run(**{n: x[:, t : t + 1] for n, x in args.items()}, initial_state=state)
        outs.append(o)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), full, atol=2e-6)
    np.testing.assert_allclose(state, last, atol=2e-6)


def test_transformations_keep_results():
    args = make("head", b=1, s=18, h=2, hk=1, dk=4, dv=3)
    pairs = {name: jnp.stack([x, 0.5 * x]) for name, x in args.items()}
    check_transformations(partial(gated_delta_rule, cfg=SMALL), pairs)


def test_unsupported_calls_are_refused():
    wide = make("head", b=1, s=1, h=1, hk=1, dk=136, dv=8)
    with pytest.raises(Unsupported, match=r"^query: head dim 136"):
        gated_delta_rule(**wide)
