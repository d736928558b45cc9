"""ragged_decode_attention: one new token per row against a slice of its contiguous cache.

Bound: memory, as for every decoding step; the loop covers the blocks between the earliest start
and the latest end of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels.xla._paged.core import Tiles
from ejkernel.kernels.xla._paged.decode import attend_call, step_tokens
from ejkernel.kernels.xla._paged.layouts import Contiguous
from ejkernel.kernels.xla.kernel import XlaKernel
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.params import config_field
from ejkernel.types import calls
from ejkernel.types.arrays import at_most
from ejkernel.types.calls import arguments


@dataclass(frozen=True)
class Step:
    """Keys of one step of the loop; None follows from the bytes of a row."""

    keys: int | None = None

    def apply_config(self, cfg: Any, problem: Any, target: Any) -> Step:
        params = config_field(cfg, "fwd_params")
        keys = config_field(params, "blocksize_keys") or config_field(params, "kv_blocksize")
        return Step(keys or self.keys)

    @property
    def fields(self) -> dict[str, Any]:
        return {}


class RaggedDecodeAttention(XlaKernel):
    """One token per row over a slice of its cache.

    ``cfg``: ``blocksize_keys`` or ``kv_blocksize`` of ``fwd_params``, the keys of a step.
    Differentiable in every float array.
    """

    by_rows = True

    call = calls.RaggedDecodeAttention
    reads = (
        arguments.QKV | arguments.DECODE_OPTIONS | {"sequence_start", "sequence_end", "return_lse"}
    )
    partitioned = True  # the compiler would end the loops of all devices together

    def choose(self, problem: Any, target: Any) -> Step:
        return Step()

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, tokens = work.problem, work.tiles.keys
        query, key, value = (arrays[name] for name in ("query", "key", "value"))
        b, h, d = query.shape[0], *query.shape[-2:]
        length, hk, dv = value.shape[1:]
        row_bytes = b * hk * (d + dv) * query.dtype.itemsize
        tokens = max(at_most(tokens, length), 1) if tokens else step_tokens(None, length, row_bytes)
        start, stop = (jnp.clip(arrays[f"sequence_{x}"], 0, length) for x in ("start", "end"))
        o, lse = attend_call(
            p,
            Contiguous(length),
            (key, value),
            query.reshape(b, 1, hk, h // max(hk, 1), d),
            Tiles(jnp.arange(b, dtype=jnp.int32), stop[:, None] - 1, start, stop),
            tokens,
            sinks=arrays.get("softmax_aux"),
            scales=(p.softmax_scale,),
        )
        o = o.reshape(*query.shape[:-1], dv).astype(query.dtype)
        return (o, lse.reshape(query.shape[:-1])), ()


ragged_decode_attention = RaggedDecodeAttention()
