"""Ragged attention that writes, first launch of a call that may only decode: schedule and write.

One program computes the schedule, the others write new keys and values to the cache, finding the
sequences of their rows themselves: a launch less than one after the other. Where a call has many
rows, those that write would compare too many of them with too many sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import struct
from ejkernel.kernels.triton.serving.launch import RaggedLaunch, sequential
from ejkernel.kernels.triton.serving.schedule import RaggedScheduleLaunch, ragged_schedule
from ejkernel.kernels.triton.serving.write import RaggedWrite, count_blocks, write_block
from ejkernel.types.serving.problem import ITEMSIZE


@triton.jit
def ragged_prepare(
    packed, keys, values, tables, k_scale, v_scale, cache_in, decode, sequences, header,
    long_prefill, cache, schedule_sizes, LANES: tl.constexpr, schedule_tile, write_sizes,
    write_tile, PTX: tl.constexpr,
):  # fmt: skip
    """Parameters as of ``ragged_schedule`` and of ``ragged_write``."""
    pid = tl.program_id(0)
    if pid == 0:
        ragged_schedule(
            packed.starts, packed.lens, packed.valid, decode, sequences, header, long_prefill,
            schedule_sizes, LANES, schedule_tile,
        )  # fmt: skip
    else:
        block = (pid - 1) // write_tile.KV_HEADS
        head = (pid - 1) % write_tile.KV_HEADS
        write_block(
            block, head, keys, values, tables, packed, None, None, None, k_scale, v_scale,
            cache_in, cache, write_sizes, write_tile, PTX,
        )  # fmt: skip


@dataclass(frozen=True)
class RaggedPrepare(RaggedLaunch):
    """Launch of ``ragged_prepare``; the results are the schedule's, and the cache."""

    kernel = ragged_prepare
    batching: ClassVar = sequential("starts lens valid keys values tables k_scale v_scale cache_in")

    @property
    def schedule(self) -> RaggedScheduleLaunch:
        """The launch of the schedule alone."""
        return RaggedScheduleLaunch(self.problem, self.tiles, self.target, operands=self.operands)

    def outputs(self):
        cache = struct(self.problem.paged.key_dtype, *(self.shape("cache_in") or ()))
        return {**self.schedule.outputs(), "cache": cache}

    def in_place(self):
        return {"cache": "cache_in"}

    def grid(self, target):
        return (1 + count_blocks(self.problem) * self.problem.paged.kv_heads,)

    def options(self, target):
        return {"num_warps": 4, "num_stages": 1}

    def arguments(self, target):
        schedule = self.schedule.arguments(target)
        write = RaggedWrite(self.problem, self.tiles, self.target, operands=self.operands)
        view = "int8" if ITEMSIZE[self.problem.paged.key_dtype] == 1 else None
        written = write.arguments(target)
        names = ("packed", "keys", "values", "k_scale", "v_scale", "cache_in", "PTX")
        return {
            **{name: written[name] for name in names},
            "decode": schedule["decode"],
            "long_prefill": schedule["long_prefill"],
            "cache": self.result("cache", view),
            "schedule_sizes": schedule["sizes"],
            "LANES": schedule["LANES"],
            "schedule_tile": schedule["tile"],
            "write_sizes": written["sizes"],
            "write_tile": written["tile"],
        }
