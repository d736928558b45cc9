"""Linear attention through Triton's interpreter, against the float64 recurrence."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.kernels.triton import gla_attention, lightning_attention, recurrent_attention
from ejkernel.kernels.triton.linear_attention import tiles
from ejkernel.kernels.triton.linear_attention.chunk_loop import ChunkLoop
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import interpret_mode
from ejkernel.types import InvalidArgument
from ejkernel.types.masks.structure import Unsupported
from ejktest.cases.linear import check_linear, linear_cotangents
from ejktest.cases.linear import linear_arguments as make
from ejktest.oracles import linear as oracle
from ejktest.tolerance import check_close
from ejktest.transforms import check_transformations

pytest.importorskip("triton")

SMALL = {"time_tile": 16, "dv_tile": 16}
DIMS = dict(b=1, s=20, h=2, hk=1, dk=12, dv=20)
# whole tiles, which go through the copy engine: whole chunks, and runs that end inside one
WHOLE = dict(b=2, s=32, h=1, hk=1, dk=16, dv=32)
RUNS = {**WHOLE, "b": 1, "s": 40, "dv": 16}
KINDS = {
    "none": (),
    "per head": ("g3",),
    "per head and constant": ("g3", "g_gamma"),
    "constant": ("g_gamma",),
    "per key channel": ("g4",),
    "per value channel": ("gv",),
    "head and value": ("g3", "gv"),
    "all": ("g4", "g_gamma", "gk", "gv"),
}
# an empty sequence, one longer than a segment, rows of padding
CU = np.array([0, 3, 3, 37, 38], np.int32)


@pytest.fixture(autouse=True)
def interpreted():
    """A chip so small that segments have several chunks."""
    with interpret_mode(), compile_for(cuda_target(90, 1)):
        yield


def check(args, cu_seqlens=None, *, cfg=SMALL, state_dtype=None, **options):
    """Values and all gradients against the oracle; arrays traced."""

    @jax.jit
    def pull(args, cu):
        run = partial(recurrent_attention, cu_seqlens=cu, return_state=True, cfg=cfg, **options)
        out, back = jax.vjp(lambda args: run(**args), args)
        return *out, back(linear_cotangents(args))[0]

    found = pull(args, cu_seqlens)
    oracle_options = {"state_dtype": state_dtype or args["query"].dtype, "cu_seqlens": cu_seqlens}
    check_linear(args, found, **oracle_options, **options)
    return found


@pytest.fixture
def long_segments(monkeypatch):
    """Segments of two chunks, which small shapes would not get."""
    monkeypatch.setattr(tiles, "segment_of", lambda p, t, target: 2 * t.chunk)


@pytest.mark.parametrize(
    "kind", ["none", "per head and constant", "per key channel", "per value channel"]
)
def test_values_and_gradients(kind):
    check(make(KINDS[kind], **DIMS))


def test_reverse_matches_the_reference(long_segments):
    check(make(KINDS["per head"], **RUNS), reverse=True, softmax_scale=-0.7)


@pytest.mark.parametrize(("kind", "reverse"), [("per head", False), ("all", True)])
def test_packed_sequences_match_the_reference(kind, reverse, long_segments):
    args = make(KINDS[kind], **{**RUNS, "s": 40}, states=4)
    o, *_ = check(args, CU, reverse=reverse)
    np.testing.assert_array_equal(o[:, 38:], 0)


def test_packed_without_the_copy_engine():
    check(make(KINDS["per head"], **{**DIMS, "h": 1, "s": 20}, states=3), np.array([0, 3, 3, 19]))


@pytest.mark.parametrize(("kind", "reverse"), [("none", True), ("all", False)])
def test_a_few_tokens(kind, reverse):
    """One after the other, the state read and written once; gradients as of more tokens."""
    check(make(KINDS[kind], **{**DIMS, "b": 2, "s": 3}), reverse=reverse)


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_few_tokens_with_16_bit_decays(tokens, dtype):
    args = make(KINDS["constant"], **{**DIMS, "s": tokens})
    check(args | {"g_gamma": args["g_gamma"].astype(dtype)})


def test_packed_tokens_of_many_sequences():
    args = make(KINDS["per head and constant"], **{**DIMS, "s": 8}, states=4)
    o, *_ = check(args, np.array([0, 1, 1, 4, 6], np.int32))
    np.testing.assert_array_equal(o[:, 6:], 0)


def test_one_token_is_one_launch_in_the_memory_of_its_state():
    args = make(KINDS["per head"], **{**DIMS, "s": 1})
    run = jax.jit(partial(recurrent_attention, return_state=True))
    traced = str(run.trace(**args).jaxpr)
    assert traced.count("DecodeTokens") == 1
    assert "ChunkLoop" not in traced
    assert "reuse_state=True" in traced


@pytest.mark.parametrize("shared", [(), ("g_gamma",)])
def test_vmap_of_one_token(shared):
    args = make(KINDS["per head and constant"], **{**DIMS, "s": 1})
    both = {n: x if n in shared else jnp.stack([x, x / 2]) for n, x in args.items()}
    axes = {n: None if n in shared else 0 for n in args}
    run = partial(recurrent_attention, return_state=True)
    o, state = jax.jit(jax.vmap(lambda args: run(**args), in_axes=(axes,)))(both)
    alone = jax.jit(run)
    for i in range(2):
        want = alone(**{n: x if n in shared else x[i] for n, x in both.items()})
        np.testing.assert_allclose(o[i], want[0], rtol=1e-6)
        np.testing.assert_allclose(state[i], want[1], rtol=1e-6)


def test_where_products_are_synchronous():
    with compile_for(cuda_target(80, 1)):
        check(make(KINDS["per head"], **RUNS))


def test_whole_chunks(long_segments):
    check(make(KINDS["per head"], **WHOLE))


def test_float32_products_in_three_parts(monkeypatch):
    """Three TF32 parts, as on Hopper; by default the interpreter multiplies in float32."""

    monkeypatch.setattr(ChunkLoop, "interpreter_arguments", lambda launch, target: {})
    args = make(KINDS["per head"], **{**WHOLE, "s": 96})
    want = oracle.linear_attention(**args)
    o, state = recurrent_attention(**args, return_state=True, cfg={**SMALL, "time_tile": 64})
    for found, expected in ((o, want.o), (state, want.state)):
        bound = 2.0**-15 * np.abs(expected).max()  # a product of two parts errs by 2^-9
        np.testing.assert_allclose(found, expected, atol=bound, rtol=0)


def test_the_interpreter_walks_where_hopper_has_a_kernel_by_hand():
    """Full chunks of float32 values, whose kernel in Gluon it cannot run."""
    check(make(KINDS["per head"], b=1, s=128, h=1, hk=1, dk=64, dv=64), cfg=None)


@pytest.mark.parametrize(
    ("kind", "level"),
    [("per head", -20.0), ("per key channel", -20.0), ("head and value", -3e38)],
)
def test_strong_decay(kind, level, long_segments):
    """All tokens at ``level``, but runs of tokens that hardly decay."""
    args = make(KINDS[kind], **RUNS, size=1e-2)
    for name in {"g", "gv"} & args.keys():
        t = jnp.arange(40).reshape(1, -1, *[1] * (args[name].ndim - 2))
        args[name] = jnp.where(t % 7 < 3, level, args[name])
    check(args)


def test_strong_gates_that_cancel():
    args = make(KINDS["per head"], **RUNS)
    sign = jnp.where(jnp.arange(40)[None, :, None] % 2 == 0, 30.0, -30.5)
    check({**args, "g": jnp.broadcast_to(sign, args["g"].shape)})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_dtypes_match_the_reference(dtype):
    args = make(KINDS["per key channel" if dtype == "bfloat16" else "per head"], **RUNS)
    check({name: x.astype(dtype) for name, x in args.items()})


@pytest.mark.parametrize(("shape", "cu"), [(WHOLE, None), ({**RUNS, "s": 80}, CU)])
def test_constants_are_rows_of_one_gate(shape, cu, long_segments):
    """Loops over bfloat16 rows take them as they are; some chunks are all padding."""
    args = make(KINDS["constant"], **{**shape, "h": 2, "hk": 2}, states=4 if cu is not None else 2)
    args = {name: x.astype(jnp.bfloat16) for name, x in args.items()}
    run = partial(recurrent_attention, cu_seqlens=cu, cfg=SMALL, reverse=cu is not None)
    assert "GatePrefixSums" not in str(jax.make_jaxpr(lambda args: run(**args))(args))

    @jax.jit
    def pull(gate):
        def both(smooth, gate):
            g = {"g_gamma": gate} if gate.ndim == 1 else {"g": gate}
            return run(**smooth, **g, return_state=True)

        out, back = jax.vjp(both, {n: x for n, x in args.items() if n != "g_gamma"}, gate)
        return *out, *back(linear_cotangents(args))

    gate = jnp.array([-0.05, -40.0])
    *found, dgate = pull(gate)
    *want, rows = pull(jnp.broadcast_to(gate, args["query"].shape[:3]))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        check_close(x, y.astype(jnp.float32), dtype="bfloat16")
    check_close(dgate, rows.sum((0, 1)), dtype="bfloat16")


@pytest.mark.parametrize("shared", [(), ("g_gamma",)])
def test_vmap_of_constants(shared):
    args = {n: x.astype(jnp.bfloat16) for n, x in make(KINDS["constant"], **RUNS).items()}
    both = {n: x if n in shared else jnp.stack([x, x / 2]) for n, x in args.items()}
    axes = {n: None if n in shared else 0 for n in args}
    run = partial(recurrent_attention, cfg=SMALL)
    found = jax.jit(jax.vmap(lambda args: run(**args), in_axes=(axes,)))(both)
    alone = jax.jit(run)
    for i in range(2):
        want = alone(**{n: x if n in shared else x[i] for n, x in both.items()})
        np.testing.assert_array_equal(found[i], want)


def test_lightning_is_recurrent_with_slopes():
    args = make((), **{**DIMS, "h": 4, "dk": 4, "dv": 4, "s": 20})
    options = dict(layer_idx=1, num_layers=3, return_state=True, cfg=SMALL)
    (o, state), back = jax.vjp(lambda args: lightning_attention(**args, **options), args)
    (grads,) = back((o, jnp.zeros_like(state)))
    want = oracle.linear_attention(**args, g_gamma=oracle.slopes(4, 1, 3), do=o)
    check_close(o, want.o)
    check_close(state, want.state)
    for name in args:
        check_close(grads[name], want.grads[name], name=f"d{name}")


def test_transformations_keep_results():
    args = make(KINDS["per head"], **{**RUNS, "s": 18}, states=2)
    pairs = {name: jnp.stack([x, x / 2]) for name, x in args.items()}
    pairs["cu_seqlens"] = jnp.array([[0, 7, 18], [0, 0, 16]])
    check_transformations(partial(gla_attention, cfg=SMALL), pairs)


@pytest.mark.parametrize("cu", [None, np.zeros(3, np.int32)])
def test_no_tokens(cu):
    args = make((), **{**DIMS, "s": 0}, states=2 if cu is not None else 1)
    o, state = recurrent_attention(**args, cu_seqlens=cu, return_state=True)
    assert o.shape == (1, 0, 2, 20)
    np.testing.assert_array_equal(state, args["initial_state"])


def test_unsupported_calls_are_refused():
    args = make((), **DIMS)
    with pytest.raises(InvalidArgument, match="query"):
        recurrent_attention(**{**args, "query": args["query"][0]})
    with jax.enable_x64(True), pytest.raises(Unsupported, match="float64"):
        recurrent_attention(**{**args, "query": np.zeros((1, 20, 2, 12))})
    wide = make((), **{**DIMS, "dv": 300})
    with pytest.raises(Unsupported, match="300"):
        recurrent_attention(**wide)


@partial(jax.jit, static_argnames="reverse")
def values_and_gradients(args, do, cu=None, *, reverse=False):
    def run(args):
        options = {"return_state": True, "reverse": reverse, "cfg": SMALL}
        o, state = recurrent_attention(**args, cu_seqlens=cu, **options)
        return jnp.sum(o * do) + jnp.sum(jnp.sin(state)), (o, state)

    grads, found = jax.grad(run, has_aux=True)(args)
    return *found, grads


def same(found, expected):
    """A sum in another order: chunks begin elsewhere."""
    bound = 2e-5 * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, atol=bound, rtol=0)


@settings(max_examples=2, deadline=None)
@given(
    lengths=st.tuples(*[st.sampled_from([0, 1, 33, 49])] * 2),
    size=st.sampled_from([0.05, 20.0]),
    seed=st.integers(0, 9),
)
def test_packed_equals_separate_and_twice_reversed_is_forward(lengths, size, seed):
    """Sequences of up to three chunks and one row; decays per channel of keys."""
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    shape = dict(b=1, s=98, h=1, hk=1, dk=16, dv=16, states=2, seed=seed, size=size)
    args = make(KINDS["per key channel"], **shape)
    do = jnp.cos(args["value"])
    o, state, grads = values_and_gradients(args, do, cu)
    for m, (first, last) in enumerate(pairwise(cu)):
        if first == last:
            np.testing.assert_array_equal(state[m], args["initial_state"][m])
            continue
        one = {n: x[:, first:last] for n, x in args.items()}
        one["initial_state"] = args["initial_state"][m : m + 1]
        alone = values_and_gradients(one, do[:, first:last])
        same(o[:, first:last], alone[0])
        same(state[m], alone[1][0])
        for name, x in alone[2].items():
            full_grad = grads[name]
            same(full_grad[m : m + 1] if name == "initial_state" else full_grad[:, first:last], x)
    # all rows the other way round, and the sequences with them
    rows = np.concatenate([np.arange(cu[-1])[::-1], np.arange(cu[-1], 98)])

    def turned(tree):
        return {n: x[::-1] if n == "initial_state" else x[:, rows] for n, x in tree.items()}

    back = values_and_gradients(turned(args), do[:, rows], cu[-1] - cu[::-1], reverse=True)
    same(back[0][:, rows], o)
    same(back[1][::-1], state)
    for name, x in turned(back[2]).items():
        same(x, grads[name])
