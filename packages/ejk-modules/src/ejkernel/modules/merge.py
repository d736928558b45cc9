"""Attention over a union of key sets, from the attention over each of them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules._op import own_errors
from ejkernel.types.arrays import is_eight_bit
from ejkernel.types.attention.softmax import merge_parts
from ejkernel.types.calls.words import Array, F, invalid
from ejkernel.types.errors import InvalidArgument


def merge_attention(
    outs: Sequence[F[Array, "*rows heads v_dim"]], lses: Sequence[F[Array, "*rows heads"]]
) -> tuple[jax.Array, jax.Array]:
    """Attention over the union of disjoint key sets, from the outputs over each of them.

    With outputs o_i and log-sum-exps lse_i of the same queries over key sets i::

        lse = log(sum_i exp(lse_i))
        o   = sum_i exp(lse_i - lse) * o_i

    Use it to attend to a shared prefix and to each sequence's own tokens in two calls, or to keys
    that lie on several devices. Attention sinks belong to one of the calls only, to one in which
    every row sees a key: a row that sees none there has no sinks either.

    Args:
        outs: outputs ``[..., heads, v_dim]``, at least one, all of one shape.
        lses: their log-sum-exps ``[..., heads]``, as ``return_lse=True`` gives them. A part with
            -inf counts nothing, also where its output is NaN.

    Returns:
        ``(out, lse)`` of the same shapes, in the dtypes of the first part. A row that sees no key
        in any part gives 0 and -inf. Computed in float32, in float64 if an array is float64.

    Raises:
        InvalidArgument: no parts, wrong dtypes, or shapes that disagree.

    Differentiable in outs and lses.

    Source: Dao et al. 2022, "FlashAttention" (arXiv 2205.14135), section 3.1.
    """
    with own_errors():
        _check(outs, lses)
    arrays = [[jnp.asarray(x) for x in group] for group in (outs, lses)]
    out, lse = merge_parts(*arrays)
    return out.astype(arrays[0][0].dtype), lse.astype(arrays[1][0].dtype)


def _check(outs: Any, lses: Any) -> None:
    """Checks the parts of a call.

    Raises:
        InvalidArgument: it names the list, or the array in it.
    """
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)) or not parts:
            raise invalid(name, "a list of one array or more", parts)
        for i, x in enumerate(parts):
            is_float = isinstance(x, Array) and jnp.issubdtype(x.dtype, jnp.floating)
            if not is_float or is_eight_bit(x):
                axes = "..., heads, v_dim" if name == "outs" else "..., heads"
                raise invalid(f"{name}[{i}]", f"float[{axes}]", x)
    if len(outs) != len(lses):
        legal = f"{len(outs)} arrays, one for each of outs"
        raise InvalidArgument(f"lses: expected {legal}, given {len(lses)}")
    shape = outs[0].shape
    if len(shape) < 2:
        raise invalid("outs[0]", "float[..., heads, v_dim]", outs[0])
    for name, parts, legal in (("outs", outs, shape), ("lses", lses, shape[:-1])):
        for i, x in enumerate(parts):
            if tuple(x.shape) != tuple(legal):
                sizes = ", ".join(map(str, legal))
                raise invalid(f"{name}[{i}]", f"float[{sizes}], as outs[0] has it", x)
