"""plan_ragged_attention: the same results, and calls that it does not belong to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import (
    InvalidArgument,
    check_call,
    plan_ragged_attention,
    ragged_page_attention,
    ragged_page_attention_v3,
)
from ejkernel.types.serving.schedule import ScheduleSizes, ragged_schedule
from ejktest.drawn import normal

T, N, PAGE = 9, 3, 4
LENS = np.array([7, 12, 5], np.int32)
STARTS = np.array([0, 1, 5, 8], np.int32)
TABLE = np.random.default_rng(0).permutation(12).reshape(N, 4).astype(np.int32)
ENDS = np.array([1, 1, N], np.int32)
Q, K, V = normal(T, 4, 8), normal(T, 2, 8, seed=1), normal(T, 2, 8, seed=2)
PAGES = normal(12, PAGE, 4, 8, seed=3)


def made(count=N, **options):
    return plan_ragged_attention(LENS, STARTS, count, tokens=T, **options)


def read(q, plan, lens=LENS, starts=STARTS, count=N):
    return ragged_page_attention(q, PAGES, lens, TABLE, starts, count, plan=plan, platform="xla")


def update(q, pages, plan):
    arrays = q, K, V, pages, LENS, TABLE, STARTS, ENDS
    return ragged_page_attention_v3(*arrays, plan=plan, platform="xla")


def test_results_are_the_same_bits():
    plan = made(max_query_len=4)
    np.testing.assert_array_equal(read(Q, plan), read(Q, None))
    for a, b in zip(update(Q, PAGES, plan), update(Q, PAGES, None), strict=True):
        np.testing.assert_array_equal(a, b)
    grads = (jax.grad(lambda q, p=p: read(q, p).sum())(Q) for p in (plan, None))
    np.testing.assert_array_equal(*grads)


def test_it_stands_for_starts_lengths_and_their_number():
    """A call with a plan reads the shapes of these alone."""
    wrong = {"lens": jnp.ones(N, jnp.int32), "starts": jnp.full(N + 1, 3), "count": jnp.int32(1)}
    np.testing.assert_array_equal(read(Q, made(2), **wrong), read(Q, None, count=2))


def test_one_plan_for_a_scan_over_layers_with_a_donated_cache():
    def layers(q, pages, plan):
        def layer(q, pages):
            return update(q, pages, plan)

        return jax.lax.scan(layer, q, pages)

    stacked = jnp.stack([PAGES, PAGES + 1])
    expected = jax.jit(layers)(Q, stacked, None)
    planned = jax.jit(
        lambda q, pages: layers(q, pages, plan_ragged_attention(LENS, STARTS, N, tokens=T)),
        donate_argnums=1,
    )
    jax.tree.map(np.testing.assert_array_equal, planned(Q, jnp.copy(stacked)), expected)


def test_mapped_plans():
    counts = jnp.array([N, 2])
    plans = jax.vmap(lambda n: plan_ragged_attention(LENS, STARTS, n, tokens=T))(counts)
    found = jax.vmap(lambda plan: read(Q, plan))(plans)
    np.testing.assert_allclose(found, jnp.stack([read(Q, made(n)) for n in (N, 2)]), atol=1e-6)


def test_rows_of_starts_out_of_order():
    """Every row belongs to one sequence at most, as in the schedule of a call."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        starts = rng.integers(-3, 14, 6).astype(np.int32)
        lens, count = rng.integers(-2, 30, 5).astype(np.int32), int(rng.integers(0, 6))
        plan = plan_ragged_attention(jnp.asarray(lens), jnp.asarray(starts), count, tokens=11)
        sizes = ScheduleSizes(11, 40, 1, 1, 16, 4, 4, 8, 1, 1, 1)
        work = ragged_schedule(starts, lens, count, sizes)
        first, end = work.first_rows, work.sequences[0]
        expected = np.zeros((4, 11), np.int32)
        for i in range(count):
            rows = slice(first[i], end[i])
            expected[:, rows] = np.array([[i], [first[i]], [end[i]], [max(lens[i], 0)]])
        np.testing.assert_array_equal(plan.rows, expected)


@pytest.mark.parametrize(("rows", "sequences"), [(T - 1, N), (T, N - 1)], ids=["rows", "sequences"])
def test_another_call_refuses_it(rows, sequences):
    other = plan_ragged_attention(LENS[:sequences], STARTS[: sequences + 1], 2, tokens=rows)
    message = rf"^plan: expected a plan of 9 rows and 3 sequences.*given one of {rows} rows and"
    with pytest.raises(InvalidArgument, match=message):
        read(Q, other)
    with pytest.raises(InvalidArgument, match=r"^plan: expected AttentionPlan or None, given int"):
        read(Q, 7)


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (lambda x: jnp.stack([x, x]), r"lens int32\[2, 3\], starts int32\[2, 4\]"),  # of two layers
        (lambda x: x.astype(jnp.float32), r"lens float32\[3\]"),
        (lambda x: x[:3], r"lens int32\[3\], starts int32\[3\], rows int32\[3, 9\]"),
        (lambda x: None, "lens NoneType None"),
    ],
)
def test_other_arrays_than_those_of_a_plan(change, given):
    plan = jax.tree.map(change, made())
    with pytest.raises(InvalidArgument, match=f"^plan: expected lens .*, given {given}"):
        read(Q, plan)
    with pytest.raises(InvalidArgument, match=f"^plan: expected lens .*, given {given}"):
        update(Q, PAGES, plan)


@pytest.mark.parametrize(
    ("error", "match", "values"),
    [
        (InvalidArgument, "context_lens: ", {"context_lens": [1, 2]}),
        (InvalidArgument, r"query_start_loc: expected int\[4\]", {"query_start_loc": STARTS[1:]}),
        (ValueError, r"num_seqs: given 4, expected 0 to 3", {"num_seqs": 4}),
        (InvalidArgument, "num_seqs: ", {"num_seqs": 1.0}),
        (InvalidArgument, "tokens: ", {"tokens": 2.0}),
        (ValueError, "max_query_len: given 0, expected at least 1", {"max_query_len": 0}),
        (ValueError, r"query_start_loc\[1:3\]", {"query_start_loc": STARTS[[0, 2, 1, 3]]}),
    ],
)
def test_wrong_arguments(error, match, values):
    arguments = {"context_lens": LENS, "query_start_loc": STARTS, "num_seqs": N, "tokens": T}
    with pytest.raises(error, match=match):
        plan_ragged_attention(**(arguments | values))


def test_a_plan_of_another_step_is_found_on_the_host():
    arguments = Q, PAGES, LENS, TABLE, STARTS, N
    check_call(ragged_page_attention, *arguments, plan=made(max_query_len=4))
    later = plan_ragged_attention(LENS + 1, STARTS, N, tokens=T)
    with pytest.raises(ValueError, match=r"plan: given lens\[0\] = 8, expected 7"):
        check_call(ragged_page_attention, *arguments, plan=later)
    with pytest.raises(ValueError, match="plan: given max_query_len=3, expected at least the 4"):
        check_call(ragged_page_attention, *arguments, plan=made(max_query_len=3))
