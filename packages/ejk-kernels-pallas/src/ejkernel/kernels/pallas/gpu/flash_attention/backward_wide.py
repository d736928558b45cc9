"""What the two kernels for wide heads share: sizes, memory, logits of a tile.

The sums of dk and dv fill the registers of two warpgroups at 64 keys of 256 columns. With so few
keys the partial dq of the fused kernel would cost as much traffic to the L2 cache as both other
reads together, so dq has a kernel of its own that owns query rows: seven products a tile in all
instead of five, and no sum leaves the registers before it is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.common.units import scale
from ejkernel.kernels.pallas.compat import untracked
from ejkernel.types.problem import LOG2E, Problem
from ejkernel.types.structure import Band

CONSUMERS = 2
ROWS = 64  # of a warpgroup's product, and of every tile that is walked over
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
STAGES = 2


@dataclass(frozen=True)
class WidePlan:
    """Everything static about one call; ranges and ids say which operands have a batch axis.

    ``listed``: the ranges are lists of blocks, for dk and dv as ``backward_lists`` makes them, for
    dq as ``forward_lists``.
    """

    problem: Problem
    band: Band
    ids: bool
    ids_batch: bool
    range_batch: bool
    range_head: bool
    listed: bool = False
    bits: bool = False
    bits_batch: bool = False

    @property
    def kv_tail(self) -> bool:
        return self.problem.kv_len % ROWS != 0

    @property
    def masks(self) -> bool:
        return self.ids or self.kv_tail or self.bits or not self.band.empty

    def table_row(self, batch: Any, head: Any) -> tuple[Any, Any]:
        return (batch if self.range_batch else 0, head if self.range_head else 0)


def base2(problem: Problem, s: jax.Array, less: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Base-2 logits of products, with what ``less`` says of their rows, and the slope of a cap."""
    if problem.soft_cap is None:
        return (s + less) * (scale(problem) * LOG2E), None
    tanh = jnp.tanh(s * (problem.scale / problem.soft_cap))
    return tanh * (problem.soft_cap * LOG2E) + less, 1.0 - tanh * tanh


def launch(body: Callable[..., None], name: str, grid: int, out: Any, scratch: Any) -> Callable:
    kernel = plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch,
        grid=(grid,),
        grid_names=("item",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    return untracked(kernel, out)
