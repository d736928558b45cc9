# ruff: noqa: E501 (tables of messages, one line each)
"""check_call: what a scheduler gets wrong is found on the host, by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel.modules as modules
from ejkernel.modules import check_call
from ejktest.calls import CALLS, call


def device(**values):
    """Arguments with every array on a device, where a call does not read it."""
    return {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in values.items()}


def ragged_v3(**other):
    """Two sequences of 2 and 5 rows, contexts of 6 and 5 tokens, over 6 pages of 4 tokens."""
    rows = np.ones((8, 2, 16), np.float32)
    arrays = {
        "queries": rows, "keys": rows[:, :1], "values": rows[:, :1],
        "kv_cache": np.zeros((6, 4, 2, 16), np.float32),
        "kv_lens": np.array([6, 5, 99], np.int32),
        "block_tables": np.array([[0, 1], [2, 3], [-7, 99]], np.int32),
        "query_start_loc": np.array([0, 2, 7, 0], np.int32),
        "distribution": np.array([0, 2, 2], np.int32),
    }  # fmt: skip
    return device(**{**arrays, **other})


def integers(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize("name", CALLS)
def test_legal_calls_pass(name):
    c = call(name)
    check_call(name, **c.arrays, **c.static)


def test_floats_may_be_shapes():
    shapes = jax.eval_shape(lambda: ragged_v3())
    integers = {n: x for n, x in ragged_v3().items() if jnp.issubdtype(x.dtype, jnp.integer)}
    check_call("ragged_page_attention_v3", **{**shapes, **integers}, platform="xla")
    with pytest.raises(ValueError, match=r"^kv_lens: given a shape, expected values"):
        check_call("ragged_page_attention_v3", **shapes)


WRONG = [
    ({"kv_lens": integers(9, 5, 0)}, r"^kv_lens\[0\]: given 9, expected 0 to 8"),
    ({"kv_lens": integers(1, 5, 0)}, r"^kv_lens\[0\]: given 1, expected at least its 2 query rows"),
    ({"block_tables": integers(0, 1, 2, 6, 0, 0)}, r"block_tables\[1, 1\]: given 6, expected a page from 0 to 5"),
    ({"query_start_loc": integers(0, 5, 3, 0)}, r"^query_start_loc\[1:3\]: given \(5, 3\)"),
    ({"query_start_loc": integers(0, 2, 9, 0), "kv_lens": integers(6, 8, 0)}, r"^query_start_loc\[2\]: given 9, expected at most the 8 rows"),
    ({"distribution": integers(1, 2, 2)}, r"^distribution\[0\]: given 1, .* expected at most 0: query_start_loc gives it 2 rows"),
    ({"distribution": integers(0, 2, 4)}, r"^distribution"),
    ({"block_tables": integers(0, 2, 2, 3, 0, 0)}, r"given page 2 to write token 4 of sequence 0 and token 0 of sequence 1 to its row 0"),
    ({"block_tables": integers(0, 1, 2, 2, 0, 0)}, r"given page 2 to write token 0 of sequence 1 and token 4 of sequence 1 to its row 0"),
]  # fmt: skip


@pytest.mark.parametrize(("other", "message"), WRONG, ids=lambda x: None)
def test_what_a_scheduler_gets_wrong_is_named(other, message):
    arguments = ragged_v3(**other)
    with pytest.raises(ValueError, match=message):
        check_call("ragged_page_attention_v3", **arguments)
    if "distribution" not in other:
        jax.eval_shape(modules.ragged_page_attention_v3, **arguments)  # a call does not look


def test_pages_that_are_only_read_may_be_shared():
    # both contexts begin with page 0; only their last tokens are written
    arguments = ragged_v3(
        kv_lens=integers(6, 8, 0),
        block_tables=integers(0, 1, 0, 3, 0, 0),
        query_start_loc=integers(0, 2, 4, 4),
    )
    check_call(modules.ragged_page_attention_v3, **arguments)


def test_groups_and_bounds_that_a_call_clips():
    lhs, rhs = jnp.ones((8, 16)), jnp.ones((2, 16, 16))
    with pytest.raises(ValueError, match=r"^sum\(group_sizes\): given 9, expected at most the 8"):
        check_call("grouped_matmul", lhs, rhs, jnp.array([4, 5]))
    check_call(modules.GroupedMatmul, lhs, rhs, jnp.array([4, 4]))
    query, key = jnp.ones((2, 1, 16)), jnp.ones((2, 8, 1, 16))
    ends = jnp.array([3, 9])
    with pytest.raises(ValueError, match=r"^sequence_end\[1\]: given 9, expected 0 to 8"):
        check_call("ragged_decode_attention", query, key, key, ends * 0, ends)
    start, end = np.array([0, 6], np.int32), np.array([4, 5], np.int32)
    with pytest.raises(ValueError, match=r"^sequence_start\[1\]: given 6, expected 0 to .*is 5"):
        check_call("ragged_decode_attention", query, key, key, start, end)
    with pytest.raises(ValueError, match=r"^cu_seqlens\[-1\]: given 9, expected at most the 8"):
        check_call("mean_pooling", jnp.ones((8, 4)), jnp.array([0, 9]))


def test_wrong_forms_and_traced_arrays():
    lhs, rhs = jnp.ones((8, 16)), jnp.ones((2, 16, 16))
    with pytest.raises(modules.InvalidArgument, match="group_sizes"):
        check_call("grouped_matmul", lhs, rhs, jnp.ones(2))
    with pytest.raises(TypeError, match="missing the argument 'group_sizes'"):
        check_call("grouped_matmul", lhs, rhs)
    with pytest.raises(ValueError, match=r"^group_sizes: given a traced array, expected values"):
        jax.jit(lambda n: check_call("grouped_matmul", lhs, rhs, n))(jnp.array([4, 4]))
    with pytest.raises(TypeError, match=r"^operation: given 3"):
        check_call(3)
