"""Loaders of latent decoding on Hopper: which rows of the cache a step has, and their copies.

A step is 64 tokens of the cache: 512 columns in two halves, which are values, too, and 64 rotary
columns. ``LatentLoader`` copies 16-bit rows; ``EightBitLatentLoader`` converts 8-bit ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.convert import convert_rows
from ejkernel.kernels.pallas.gpu.common.tma import tiled

LATENT, ROPE = 512, 64
STEP_SHIFT = 6
STEP = 1 << STEP_SHIFT  # tokens of a step
HALVES = 2  # of the value columns, one for each value warpgroup
HALF = LATENT // HALVES
COLUMNS = 128  # of one matmul of values
STAGES = 3  # steps of 16-bit values in shared memory
EIGHT_BIT_STAGES = 2  # the same where the cache has 8 bits
EIGHT_BIT_STAGED = 2  # steps whose 8-bit rows are in shared memory


class LatentStep(NamedTuple):
    """A step of a unit: its sequence, its number in the sequence, and the sequence's length."""

    sequence: Any
    j: Any
    length: Any

    @property
    def steps(self) -> Any:
        """Steps of the sequence."""
        return lax.shift_right_logical(self.length + (STEP - 1), STEP_SHIFT)

    @property
    def is_last(self) -> Any:
        """Returns whether it is the sequence's last step."""
        return self.j + 1 == self.steps

    def is_complete(self, n: Any) -> Any:
        """Returns whether the unit, whose n-th step this is, has had all of the sequence."""
        return (n >= self.j) & self.is_last


@dataclass(frozen=True)
class LatentLoader:
    """Brings steps of a 16-bit cache to shared memory, for a ``MLADecodeKernel``.

    The value warpgroups call ``load_first``, and in every step ``boxes_before_wait``,
    ``during_matmuls``, ``after_matmuls`` and ``after_step``, in this order.
    """

    kernel: Any

    stages = STAGES

    @property
    def box_tokens(self) -> int:
        """Tokens of one copy."""
        return min(self.kernel.problem.page_size, STEP)

    def boxes(self, r: Any, at: LatentStep) -> list[tuple[int, Any, Any]]:
        """Returns (first token in the step, page, first token in the page) of every copy."""
        p, boxes = self.kernel.problem, []
        page_size = p.page_size
        for token in range(0, STEP, self.box_tokens):
            column = jnp.minimum(lax.div(at.j * STEP + token, page_size), p.max_pages - 1)
            page = jnp.clip(r.tables[at.sequence, column], 0, p.pages - 1)
            first = 0 if page_size <= STEP else lax.rem(at.j, page_size // STEP) * STEP
            boxes.append((token, page, first))
        return boxes

    def load(self, r: Any, boxes: list, columns: Any, target: Any, full: Any) -> None:
        for token, page, first in boxes:
            source = r.cache.at[page, pl.ds(first, self.box_tokens), columns]
            plgpu.copy_gmem_to_smem(source, target.at[pl.ds(token, self.box_tokens)], full)

    def load_rope(self, r: Any, boxes: list) -> None:
        self.load(r, boxes, pl.ds(LATENT, ROPE), r.rope, r.rope_full)

    def wait_rope(self, r: Any) -> None:
        plgpu.barrier_wait(r.rope_full)

    def load_half(self, r: Any, boxes: list, n: Any, half: Any) -> None:
        """Starts to copy half of the columns of step n's values."""
        slot, columns = lax.rem(n, self.stages), pl.ds(half * HALF, HALF)
        self.load(r, boxes, columns, r.main.at[slot, half], r.main_full.at[slot])

    def load_first(self, r: Any, half: Any, count: Any) -> LatentStep:
        """Starts to copy the first steps; returns the first step that is not started."""
        ahead = self.kernel.first_step(r)
        for n in range(self.stages):

            @pl.when(n < count)
            def load(n: int = n, at: Any = ahead) -> None:
                boxes = self.boxes(r, at)
                if self.kernel.stages_rows and n == STAGES - 1:
                    plgpu.barrier_wait(r.q_read)  # queries were in this buffer
                self.load_half(r, boxes, jnp.int32(n), half)

            ahead = self.kernel.next_step(r, ahead)
        return ahead

    def boxes_before_wait(self, r: Any, ahead: LatentStep) -> Any:
        return self.boxes(r, ahead)

    def during_matmuls(self, r: Any, n: Any, half: Any, count: Any) -> None:
        """Does nothing: the buffer of step n is being read."""

    def after_matmuls(self, r: Any, n: Any, boxes: Any, half: Any, count: Any) -> None:
        """Starts the next copy to the buffer of step n, which is free."""
        n = n + self.stages
        pl.when(n < count)(lambda: self.load_half(r, boxes, n, half))

    def after_step(self, r: Any, n: Any, ahead: LatentStep, half: Any, count: Any) -> None:
        """Does nothing more."""

    def named(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Returns the arrays of a program by name, with a name for each view of one buffer."""
        return arrays

    def scratch(self) -> dict[str, Any]:
        dtype, boxes = self.kernel.dtype, STEP // self.box_tokens
        return {
            "main": tiled((self.stages, HALVES, STEP, HALF), dtype),
            "rope": tiled((STEP, ROPE), dtype),
            "main_full": plgpu.Barrier(num_arrivals=HALVES * boxes, num_barriers=self.stages),
            "rope_full": plgpu.Barrier(num_arrivals=boxes),
        }


@dataclass(frozen=True)
class EightBitLatentLoader(LatentLoader):
    """Brings steps of an 8-bit cache to shared memory, and converts them to 16 bits there."""

    stages = EIGHT_BIT_STAGES

    @property
    def cache_dtype(self) -> str:
        return self.kernel.problem.key_dtype

    def load_rope(self, r: Any, boxes: list) -> None:
        self.load(r, boxes, pl.ds(LATENT, ROPE), r.rope_bytes.at[1], r.rope_full)

    def wait_rope(self, r: Any) -> None:
        super().wait_rope(r)
        convert_rows(r.rope_bytes.at[1], r.rope, self.cache_dtype)
        plgpu.commit_smem()

    def load_half(self, r: Any, boxes: list, n: Any, half: Any) -> None:
        staged = lax.rem(n, EIGHT_BIT_STAGED)
        target = r.main_bytes.at[staged, half]
        bytes_full = r.bytes_full.at[half * EIGHT_BIT_STAGED + staged]
        self.load(r, boxes, pl.ds(half * HALF, HALF), target, bytes_full)

    def convert_part(self, r: Any, n: Any, half: Any, part: int) -> None:
        """Converts the columns that one of the matmuls of values reads in step n."""
        staged, slot = lax.rem(n, EIGHT_BIT_STAGED), lax.rem(n, self.stages)
        columns = pl.ds(part * COLUMNS, COLUMNS)
        source = r.main_bytes.at[staged, half, :, columns]
        convert_rows(source, r.main.at[slot, half, :, columns], self.cache_dtype)

    def convert_first(self, r: Any, n: Any, half: Any) -> None:
        bytes_full = half * EIGHT_BIT_STAGED + lax.rem(n, EIGHT_BIT_STAGED)
        plgpu.barrier_wait(r.bytes_full.at[bytes_full])
        self.convert_part(r, n, half, 0)

    def convert_others(self, r: Any, n: Any, half: Any) -> None:
        for part in range(1, HALF // COLUMNS):
            self.convert_part(r, n, half, part)
        plgpu.commit_smem()
        plgpu.barrier_arrive(r.main_full.at[lax.rem(n, self.stages)])

    def load_first(self, r: Any, half: Any, count: Any) -> LatentStep:
        ahead = super().load_first(r, half, count)
        for n in (jnp.int32(n) for n in range(self.stages)):
            pl.when(n < count)(lambda n=n: self.convert_first(r, n, half))
            self.after_step(r, n - self.stages, ahead, half, count)
            ahead = self.kernel.next_step(r, ahead)
        return ahead

    def boxes_before_wait(self, r: Any, ahead: LatentStep) -> Any:
        """Returns nothing: copies start after the step, and have two steps to arrive."""

    def during_matmuls(self, r: Any, n: Any, half: Any, count: Any) -> None:
        """Converts the first columns of a later step, whose buffer the first matmul has read."""
        n = n + self.stages

        @pl.when(n < count)
        def convert() -> None:
            plgpu.wgmma_wait(HALF // COLUMNS - 1)
            self.convert_first(r, n, half)

    def after_matmuls(self, r: Any, n: Any, boxes: Any, half: Any, count: Any) -> None:
        """Does nothing: the other columns are converted after the step."""

    def after_step(self, r: Any, n: Any, ahead: LatentStep, half: Any, count: Any) -> None:
        """Converts the other columns of the later step, and starts the next copy."""
        n = n + self.stages
        pl.when(n < count)(lambda: self.convert_others(r, n, half))
        following = n + EIGHT_BIT_STAGED
        load = lambda: self.load_half(r, self.boxes(r, ahead), following, half)  # noqa: E731
        pl.when(following < count)(load)

    def named(self, arrays: dict[str, Any]) -> dict[str, Any]:
        rope, rope_bytes = arrays["rope"]
        return arrays | {"rope": rope, "rope_bytes": rope_bytes}

    def scratch(self) -> dict[str, Any]:
        scratch, boxes = super().scratch(), STEP // self.box_tokens
        dtype = jnp.dtype(self.cache_dtype)
        return scratch | {
            "main_bytes": plgpu.SMEM((EIGHT_BIT_STAGED, HALVES, STEP, HALF), dtype),
            "rope": plgpu.RefUnion(scratch["rope"], plgpu.SMEM((2, STEP, ROPE), dtype)),
            "bytes_full": plgpu.Barrier(num_arrivals=boxes, num_barriers=EIGHT_BIT_STAGED * HALVES),
            "main_full": plgpu.Barrier(num_arrivals=HALVES, num_barriers=self.stages),
        }
