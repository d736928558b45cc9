"""Linear attention: the recurrence for a few tokens, chunks for the others; three operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.xla.kernel import XlaKernel
from ejkernel.kernels.xla.linear_attention import core, step, tiles
from ejkernel.kernels.xla.linear_attention.inputs import rows_and_states
from ejkernel.kernels.xla.linear_attention.layout import Plain, packed
from ejkernel.kernels.xla.linear_attention.tiles import Chunk
from ejkernel.ops.call_kernel import CallKernel
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.execution.program_cache import bounded_jit
from ejkernel.types import calls
from ejkernel.types.arrays import is_symbolic
from ejkernel.types.attention.softmax import name_output
from ejkernel.types.calls import arguments

GATES = ("g", "g_gamma", "gk", "gv")


@bounded_jit
def _in_chunks(
    rows: Any,
    table: jax.Array,
    cu_seqlens: jax.Array | None,
    *,
    chunked: Callable[..., tuple[jax.Array, jax.Array]],
    chunk: int,
    reverse: bool,
) -> tuple[jax.Array, jax.Array]:
    length = rows.q.shape[1]
    if cu_seqlens is None:
        layout = Plain(length, chunk, reverse)
    else:
        layout = packed(cu_seqlens, length, chunk, reverse)
    rows = jax.tree.map(layout.split, rows)
    o, ends = chunked(rows, layout.initial(table), layout.links())
    return layout.merge(o), layout.final(ends, table)


_in_steps = bounded_jit(step.stepwise)


class LinearKernel(XlaKernel):
    """A recurrence of matrix states: token by token for a few of them, else by chunks.

    The parts are jitted on their own: layers that differ only in values share their loops.

    Attributes:
        advance: the next state and the output of one token.
        chunked: the outputs and the states after every chunk.
    """

    by_rows = True

    advance: ClassVar[Callable[..., tuple[jax.Array, jax.Array]]] = staticmethod(step.advance)
    chunked: ClassVar[Callable[..., tuple[jax.Array, jax.Array]]] = staticmethod(core.chunked)

    def choose(self, problem: Any, target: Any) -> Chunk:
        cu = problem.cu_seqlens
        return tiles.choose(problem.query.shape[1], 1 if cu is None else cu.shape[0] - 1)

    def gates(self, problem: Any, arrays: Arrays) -> Arrays:
        """Log decays by the names of ``GATES``."""
        return {name: arrays[name] for name in GATES if name in arrays}

    def inputs(self, problem: Any, arrays: Arrays) -> tuple[Any, jax.Array]:
        """Rows ``[batch, seq, heads, channels]`` and initial states ``[b or n, heads, dk, dv]``."""
        return rows_and_states(arrays, self.gates(problem, arrays), problem.softmax_scale)

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, dtype, cu = work.problem, arrays["query"].dtype, arrays.get("cu_seqlens")
        rows, states = self.inputs(p, arrays)
        (b, s, h, dk), dv = rows.q.shape, rows.v.shape[3]
        if 0 in (b, s, h, dk, dv, states.shape[0]):
            return (jnp.zeros((b, s, h, dv), dtype), states), ()
        if not is_symbolic(s) and s < tiles.STEP_LIMIT:
            o, states = _in_steps(rows, states, cu, advance=self.advance, reverse=p.reverse)
        else:
            o, states = _in_chunks(
                rows,
                states,
                cu,
                chunked=self.chunked,
                chunk=work.tiles.time_tile,
                reverse=p.reverse,
            )
        return (name_output(o.astype(dtype)), states), ()


class RecurrentAttention(LinearKernel):
    """Linear attention with gates, one ``[dk, dv]`` state a head.

    Everything accumulates in float32, in float64 when query, key or value is float64; states are
    returned in that dtype. ``cfg``: ``time_tile``, the chunk length, a power of two.
    Differentiable in reverse mode in query, key, value, every gate and initial_state, through the
    output and the state, in memory ``s + (s / chunk) dk dv`` per head.
    """

    call = calls.RecurrentAttention
    reads = arguments.RECURRENCE | {"g", "g_gamma", "gk", "gv"}


class GLAttention(LinearKernel):
    """Gated linear attention, log decays g and g_gamma.

    ``cfg``: ``time_tile``, the chunk length, a power of two. Differentiable as
    ``recurrent_attention``.
    """

    call = calls.GLAttention
    reads = arguments.RECURRENCE | {"g", "g_gamma"}


class LightningAttention(LinearKernel):
    """Linear attention with one decay a head and layer.

        gamma[m] = -(8 / h) * (1 - layer_idx / num_layers) * m        for head m of h

    ``cfg``: ``time_tile``, the chunk length, a power of two. Differentiable in query, key, value
    and initial_state, as ``recurrent_attention``.
    """

    call = calls.LightningAttention
    reads = arguments.RECURRENCE | {"layer_idx", "num_layers"}

    def gates(self, problem: Any, arrays: Arrays) -> Arrays:
        decay = slopes(problem.query.shape[2], problem.layer_idx, problem.num_layers)
        return {"g_gamma": jnp.asarray(decay, jnp.result_type(float))}

    def on_shards(self, a: Mapping[str, Any]) -> tuple[CallKernel, Mapping[str, Any]]:
        """A shard has some of the heads, and decays count all of them."""
        same = {n: x for n, x in a.items() if n not in ("layer_idx", "num_layers")}
        return gla_attention, same | {"g_gamma": self.call.log_decays(a)}


def slopes(heads: int, layer: int, layers: int) -> np.ndarray:
    """Log decay per token of every head, float64 ``[h]``: steeper with the head, 0 at the top."""
    return -8.0 / max(heads, 1) * (1.0 - layer / layers) * np.arange(heads)


recurrent_attention = RecurrentAttention()
gla_attention = GLAttention()
lightning_attention = LightningAttention()
