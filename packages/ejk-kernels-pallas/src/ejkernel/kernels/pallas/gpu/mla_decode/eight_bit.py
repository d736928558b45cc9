"""Latent decoding from 8-bit caches on Hopper: ``steps`` on numbers made 16-bit where they arrive.

Rows of the cache arrive as they are, two steps ahead, beside the memory of two steps of 16-bit
ones. Where a step's values are added, its memory is free: each warpgroup of the values makes its
half of the step after the next there (``widen``), the first columns while the others are still
being added, the others while the exponentials of the next step are computed. The warpgroup of the
scores does the rotary columns, behind the products that need none. Half of what 16-bit rows take is
read, and what is multiplied is the same.

Every 8-bit number is a float16 and a bfloat16, so nothing is rounded.

Bound: that of ``steps``, and what the next scores wait for: shared memory is read once and written
once more (64 sequences of 8192, 128 heads, on an H200: 0.298 ms of float8_e4m3fn, 0.213 of
bfloat16). A third step of 16-bit rows, with 8-bit ones in its memory until they are made, takes the
same; numbers made float16 for queries of bfloat16 take 4% less and 5% to change the queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.mla_decode.runs import STEP
from ejkernel.kernels.pallas.gpu.mla_decode.steps import (
    COLUMNS,
    HALF,
    HALVES,
    LATENT,
    ROPE,
    Steps,
)
from ejkernel.kernels.pallas.gpu.mla_decode.widen import widen

STAGED = 2  # steps whose 8-bit rows are in memory


@dataclass(frozen=True)
class EightBitSteps(Steps):
    """The kernel of one form; ``kind``: dtype of the cache."""

    kind: str = "int8"

    stages = 2

    def load_rope(self, r: Any, boxes: list) -> None:
        self.load(r, boxes, pl.ds(LATENT, ROPE), r.rope_bytes.at[1], r.rope_ready)

    def await_rope(self, r: Any) -> None:
        super().await_rope(r)
        widen(r.rope_bytes.at[1], r.rope, self.kind)
        plgpu.commit_smem()

    def load_half(self, r: Any, boxes: list, n: Any, half: Any) -> None:
        staged = lax.rem(n, STAGED)
        there, landed = r.main_bytes.at[staged, half], r.landed.at[half * STAGED + staged]
        self.load(r, boxes, pl.ds(half * HALF, HALF), there, landed)

    def widen_part(self, r: Any, n: Any, half: Any, part: int) -> None:
        """What one of the products of values reads in step n."""
        staged, slot = lax.rem(n, STAGED), lax.rem(n, self.stages)
        columns = pl.ds(part * COLUMNS, COLUMNS)
        source = r.main_bytes.at[staged, half, :, columns]
        widen(source, r.main.at[slot, half, :, columns], self.kind)

    def widen_first(self, r: Any, n: Any, half: Any) -> None:
        plgpu.barrier_wait(r.landed.at[half * STAGED + lax.rem(n, STAGED)])
        self.widen_part(r, n, half, 0)

    def widen_rest(self, r: Any, n: Any, half: Any) -> None:
        for part in range(1, HALF // COLUMNS):
            self.widen_part(r, n, half, part)
        plgpu.commit_smem()
        plgpu.barrier_arrive(r.ready.at[lax.rem(n, self.stages)])

    def begin(self, r: Any, half: Any, count: Any) -> Any:
        ahead = super().begin(r, half, count)
        for n in (jnp.int32(n) for n in range(self.stages)):
            pl.when(n < count)(lambda n=n: self.widen_first(r, n, half))
            self.ended(r, n - self.stages, ahead, half, count)
            ahead = self.following(r, ahead)
        return ahead

    def boxes_ahead(self, r: Any, ahead: Any) -> Any:
        pass  # what is asked for then has two steps to arrive

    def adding(self, r: Any, n: Any, half: Any, count: Any) -> None:
        n = n + self.stages

        @pl.when(n < count)
        def ahead() -> None:
            plgpu.wgmma_wait(HALF // COLUMNS - 1)
            self.widen_first(r, n, half)

    def added(self, r: Any, n: Any, boxes: Any, half: Any, count: Any) -> None:
        pass

    def ended(self, r: Any, n: Any, ahead: Any, half: Any, count: Any) -> None:
        n = n + self.stages
        pl.when(n < count)(lambda: self.widen_rest(r, n, half))
        more = n + STAGED
        pl.when(more < count)(lambda: self.load_half(r, self.boxes(r, ahead), more, half))

    def named(self, scratch: dict[str, Any]) -> dict[str, Any]:
        rope, rope_bytes = scratch["rope"]
        return scratch | {"rope": rope, "rope_bytes": rope_bytes}

    def _scratch(self) -> dict[str, Any]:
        scratch, boxes = super()._scratch(), STEP // self.copied
        kind = jnp.dtype(self.kind)
        return scratch | {
            "main_bytes": plgpu.SMEM((STAGED, HALVES, STEP, HALF), kind),
            "rope": plgpu.RefUnion(scratch["rope"], plgpu.SMEM((2, STEP, ROPE), kind)),
            "landed": plgpu.Barrier(num_arrivals=boxes, num_barriers=STAGED * HALVES),
            "ready": plgpu.Barrier(num_arrivals=HALVES, num_barriers=self.stages),
        }
