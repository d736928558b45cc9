"""Calls of mean pooling: the comparison with the oracle, and what is compiled ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ejktest.abstract import BF16, I32, AbstractCall, Arrays, abstract_call
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


def _pooling(shape: tuple[int, ...], *packed: str, **options: Any) -> AbstractCall:
    arrays: Arrays = {"x": (shape, BF16)}
    arrays |= {name: ((65,), I32) for name in packed}
    if options.pop("masked", False):
        arrays["attention_mask"] = (shape[: 1 if packed else 2], "bool")
    return abstract_call("mean_pooling", {}, arrays=arrays, trained=True, options=options)


COMPILED = {"pooling": _pooling((8, 8192, 16, 128), chunk_size=64)}
COMPILED_TPU = {
    "pooling chunks": _pooling((8, 8192, 2048), chunk_size=64),
    "pooling odd chunks": _pooling((8, 1000, 200), chunk_size=37, masked=True),
    "pooling sequences": _pooling((8, 8192, 4096), masked=True),
    "pooling packed": _pooling((65536, 1024), "cu_seqlens", masked=True),
}
