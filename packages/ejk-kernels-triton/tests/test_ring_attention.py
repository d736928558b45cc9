"""Triton's flash kernels on a ring, run by the interpreter, against the float64 oracle.

The devices of the ring are a mapped axis with a name: interpreted kernels run on one device.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejktest.attention import Call, arrays, check, run

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import ring_attention
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import interpret_mode

N = 2


def order(length: int, layout: str) -> np.ndarray:
    """Where every token of the shards comes from."""
    chunks = np.arange(length).reshape(2 * N, -1)
    return chunks[[0, 3, 1, 2]].ravel() if layout == "zigzag" else chunks.ravel()


def on_ring(layout: str, q, k, v, *, bias, softmax_aux, **options):
    """The operation on the full arrays, a device for each half."""
    rows, cols = (order(x.shape[1], layout) for x in (q, k))

    def shards(x, axis, index):
        x = jnp.take(jnp.asarray(x), index, axis)
        return jnp.stack(jnp.split(x, N, axis))

    given = {"query": shards(q, 1, rows), "key": shards(k, 1, cols), "value": shards(v, 1, cols)}
    if bias is not None:
        given["bias"] = shards(jnp.take(bias, cols, 3), 2, rows)
    if "q_segment_ids" in options:
        given["q_segment_ids"] = shards(options.pop("q_segment_ids"), 1, rows)
    options["cfg"] = {**options["cfg"], "context_parallel": "ring"}
    attend = partial(
        ring_attention, axis_name="sp", layout=layout, softmax_aux=softmax_aux, **options
    )
    out = jax.vmap(lambda x: attend(**x), axis_name="sp")(given)
    back = np.argsort(rows)
    return jax.tree.map(lambda x: jnp.concatenate(list(x), 1)[:, back], out)


SMALL = {"b": 1, "q": 32, "k": 32, "h": 2, "hk": 1, "d": 16, "blocks": (16, 16)}
IDS = np.array([[0] * 11 + [3] * 9 + [-1] * 4 + [1] * 8], np.int32)
CALLS = {
    "zigzag": Call("causal", mask={"causal": True}, sinks=(2,), **SMALL),
    "contiguous": Call(
        "all",
        mask={"causal": True, "q_segment_ids": IDS, "sliding_window": (20, 0)},
        bias=(1, 2), dropout=0.3, cap=3.0, **SMALL,
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", CALLS)
def test_against_oracle(layout: str) -> None:
    call = CALLS[layout]
    x = arrays(call)
    with interpret_mode(), compile_for(cuda_target(80)):
        check(call, x, *run(partial(on_ring, layout), call, x))
