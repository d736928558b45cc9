"""Calls of mean pooling: the comparison with the oracle, and what is compiled ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ejktest.abstract import BF16, abstract_call
from ejktest.drawn import pulled
from ejktest.oracles import pooling
from ejktest.tolerance import check_close


def check_pool(pool: Callable[..., Any], x: jax.Array, cu=None, mask=None, chunk=None) -> jax.Array:
    """Means and gradient of ``pool(x, cu, mask, chunk)`` against the oracle; cu and mask traced."""
    out, (dx,), dout = pulled(lambda x, *others: pool(x, *others, chunk), (x,), cu, mask)
    want, dwant = pooling.mean_pooling(x, cu, chunk_size=chunk, attention_mask=mask, dout=dout)
    assert out.dtype == dx.dtype == x.dtype
    check_close(out, want, name="out")
    check_close(dx, dwant, name="dx")
    return out


COMPILED = {
    "pooling": abstract_call(
        "mean_pooling",
        {},
        arrays={"x": ((8, 8192, 16, 128), BF16)},
        trained=True,
        options={"chunk_size": 64},
    ),
}
