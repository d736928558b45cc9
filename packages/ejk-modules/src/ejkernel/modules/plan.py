"""Plans of ragged attention: what all layers of a step have in common, computed once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules._op import own_errors
from ejkernel.types.arrays import is_symbolic
from ejkernel.types.calls import values
from ejkernel.types.calls.words import Array, I, invalid, out_of_range
from ejkernel.types.masks.segments import check_starts
from ejkernel.types.serving.plan import AttentionPlan, make_plan


def plan_ragged_attention(
    context_lens: I[Array, " sequences"],
    query_start_loc: I[Array, " sequences_plus_1"],
    num_seqs: int | I[Array, ""] | I[Array, "1"],
    *,
    tokens: int,
    max_query_len: int | None = None,
) -> AttentionPlan:
    """Finds the sequence of every packed row once, for the attention of all layers of a step.

    Every layer of a model calls :func:`ragged_page_attention` or :func:`ragged_page_attention_v3`
    with the same starts and lengths, and each call searches for the sequences of its rows. Given a
    plan as ``plan=``, it does not. ``max_query_len`` also says which kernels the step needs: with
    1, for sequences that all decode, a call of up to 1024 rows on a GPU is one kernel, and one
    more for what it writes. The results are the same as without a plan.

    Args:
        context_lens: int32 ``[sequences]``, tokens per sequence, the new ones included
            (``kv_lens`` of v3).
        query_start_loc: int32 ``[sequences + 1]``, the first row of each sequence.
        num_seqs: valid sequences (``distribution[2]`` of v3).
        tokens: rows of the queries, with rows that belong to no sequence.
        max_query_len: rows that a sequence has at most. A promise, part of the program: another
            number compiles another one. Longer sequences are attended to as well, but slowly. None:
            any number.

    Returns:
        A pytree of int32 arrays. It works under ``jit``, in a scan over layers, and under ``vmap``
        where the calls are mapped as well. It belongs to calls of ``tokens`` rows and as many
        sequences, of any heads, pages and windows; other calls refuse it.

    Raises:
        InvalidArgument: wrong dtype, rank or sizes that disagree.
        ValueError: a number out of range, or starts in a numpy array that decrease.
    """
    with own_errors():
        _check(context_lens, query_start_loc, num_seqs, tokens, max_query_len)
    count = jnp.asarray(num_seqs, jnp.int32).reshape(())
    rows = tokens if is_symbolic(tokens) else int(tokens)
    return make_plan(context_lens, query_start_loc, count, rows, max_query_len)


def _check(lens: Any, starts: Any, count: Any, tokens: Any, max_query_len: Any) -> None:
    """Checks the arguments of a plan.

    Raises:
        InvalidArgument, ValueError: it names the argument.
    """
    for name, x in (("context_lens", lens), ("query_start_loc", starts)):
        if not _is_index(x) or x.ndim != 1:
            axis = "sequences" if name == "context_lens" else "sequences + 1"
            raise invalid(name, f"int[{axis}]", x)
    n = lens.shape[0]
    if starts.shape[0] != n + 1:
        raise invalid("query_start_loc", f"int[{n + 1}] for context_lens of {n} sequences", starts)
    is_number = isinstance(count, (int, np.integer)) and not isinstance(count, bool)
    if not is_number and not (_is_index(count) and count.shape in ((), (1,))):
        raise invalid("num_seqs", "int or int[] or int[1]", count)
    number = values.concrete_value(count)
    if number is not None and not 0 <= int(np.reshape(number, ())) <= n:
        legal = f"0 to {n}, the sequences of context_lens"
        raise out_of_range("num_seqs", legal, int(np.reshape(number, ())))
    for name, x, least in (("tokens", tokens, 0), ("max_query_len", max_query_len, 1)):
        if x is None and name == "max_query_len":
            continue
        if name == "tokens" and is_symbolic(x):
            continue
        if not isinstance(x, (int, np.integer)) or isinstance(x, bool):
            raise invalid(name, "a Python int", x)
        if x < least:
            raise out_of_range(name, f"at least {least}", x)
    if isinstance(starts, np.ndarray) and number is not None:
        check_starts(starts[: int(np.reshape(number, ())) + 1], "query_start_loc")


def _is_index(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray)) and jnp.issubdtype(x.dtype, jnp.integer)
