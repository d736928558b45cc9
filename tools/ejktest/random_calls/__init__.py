"""Random calls of every operation: odd shapes, all dtypes, any options together.

A call follows from a seed, its operation and a number alone. Its values are numpy arrays; memory
that no token may see is NaN in half of the calls.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from ejktest.random_calls.cached import contiguous, latent_decoding, paged, ragged
from ejktest.random_calls.dense import ALLOWED, dense, merged, native_sparse, quantized
from ejktest.random_calls.draw import WIDE as WIDE
from ejktest.random_calls.draw import Draw, RandomCall
from ejktest.random_calls.states import convolution, grouped, linear, pooling

DRAWN: dict[str, Callable[[Draw, str], RandomCall]] = {
    **dict.fromkeys(ALLOWED, dense),
    "quantize_attention": quantized,
    "merge_attention": merged,
    "native_sparse_attention": native_sparse,
    "page_attention": paged,
    "mla_decode": latent_decoding,
    "ragged_decode_attention": contiguous,
    "ragged_page_attention": ragged,
    "ragged_page_attention_v3": ragged,
    **dict.fromkeys(
        ("recurrent_attention", "gla_attention", "lightning_attention", "gated_delta_rule"), linear
    ),
    "causal_conv1d": convolution,
    "mean_pooling": pooling,
    "grouped_matmul": grouped,
}
"""How a call of each operation is drawn."""
SERVING = {"page_attention", "mla_decode", "ragged_decode_attention", "ragged_page_attention",
           "ragged_page_attention_v3"}  # fmt: skip


def random_call(operation: str, seed: int, number: int) -> RandomCall:
    """Returns the call of this number."""
    d = Draw(seed, zlib.crc32(operation.encode()), number)
    call = DRAWN[operation](d, operation)
    if d.chance(0.9 if operation in SERVING else 0.3):
        call.gradients = ()
    call.invariant = d.chance(0.2)
    return call
