"""``prepare`` and ``scan`` in one launch: chunks are prepared while earlier ones are scanned.

A scan has few programs, which wait for their own matmuls. In this launch the first ``preparers``
programs prepare all chunks, in the order in which scans need them, and the others scan; what is
prepared goes through global memory, see ``readiness``. The results are the same as in two launches
of ``prepare_chunks`` and ``scan_chunks``.

No scan waits for ever: programs that prepare wait for nothing, and all programs are on the GPU at
the same time, else the launch is refused. Programs start in order, so the first ones prepare.

Bound: that of the scan, after the first chunks were prepared: a round of the preparing programs.
With 32 columns and two stages of copies a program of 128 channels takes half of the shared memory
and of the registers of a multiprocessor, which then prepares next to a scan. Inverses and scores
are loaded by address: a descriptor of a result would be a second parameter with its memory. Not
measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.gated_delta_rule.chunks import FACTORS, ChunkLaunch
from ejkernel.kernels.triton.gated_delta_rule.prepare import (
    PrepareLaunch,
    inverse_precision,
    prepare_chunk,
)
from ejkernel.kernels.triton.gated_delta_rule.readiness import count_counters, report_chunk
from ejkernel.kernels.triton.gated_delta_rule.scan import (
    ScanLaunch,
    scan_chunks,
    scan_programs,
)
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, struct
from ejkernel.kernels.triton.targets import Target


@triton.jit
def prepare_and_scan(
    query, key, value, gate, beta, initial, cu, counters_in, inverse, scores, factors, decays, out,
    final, counters, sizes, items, preparers, scale, NORMALIZE: tl.constexpr,
    FACTORS: tl.constexpr, INVERSE_PRECISION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Prepares all chunks in the first programs and scans them in the others.

    ``counters_in``: operand in whose memory ``counters`` are, all 0 before.
    """
    program = tl.program_id(0)
    if program < preparers:
        batches = items // (sizes.pieces * sizes.kv_heads)
        item = program
        # no range, for which Triton 3.9 waits for the matmuls of these copies in a way that fails
        while item < items:
            kv_head = item % sizes.kv_heads
            chunk = item // sizes.kv_heads
            batch = chunk % batches
            piece = chunk // batches
            if sizes.REVERSED:
                piece = sizes.pieces - 1 - piece
            slot = (batch * sizes.pieces + piece).to(tl.int64)
            prepare_chunk(
                slot, kv_head, query, key, gate, beta, cu, inverse, scores, factors, decays, sizes,
                scale, NORMALIZE, FACTORS, INVERSE_PRECISION,
            )  # fmt: skip
            report_chunk(counters, batch, piece, kv_head, sizes)
            item += preparers
    else:
        scan_chunks(
            query, key, value, None, inverse, scores, factors, decays, initial, cu, out, final,
            None, None, counters, preparers, sizes, FACTORS, PTX,
        )  # fmt: skip


@dataclass(frozen=True)
class OverlappedScanLaunch(ChunkLaunch):
    """Launch of ``prepare_and_scan``, of one gate per head or none.

    Results: all of ``PrepareLaunch``, out and final of ``ScanLaunch``, and the counters, which must
    be 0 before.
    """

    kernel = prepare_and_scan
    programs_wait = True
    batching: ClassVar = dict.fromkeys(
        ("query", "key", "value", "gate", "beta", "initial", "cu", "counters_in"), BATCHED
    )

    def outputs(self):
        p, t = self.problem, self.tiles
        scanned = ScanLaunch(p, t, for_gradients=False).outputs()
        return {
            **PrepareLaunch(p, t).outputs(),
            "out": scanned["out"],
            "final": scanned["final"],
            "counters": struct("int32", self.counters),
        }

    @property
    def counters(self) -> int:
        """Number of counters of all batch rows."""
        return count_counters(self.problem.batch, self.pieces, self.problem.kv_heads)

    def in_place(self):
        return {"counters": "counters_in"}

    def grid(self, target):
        return (self.tiles.preparers + scan_programs(self),)

    def interpreter_arguments(self, target):
        # programs run one after the other, those that prepare first
        return {"PTX": False}

    def arguments(self, target: Target):
        p = self.problem
        return self.row_tiles(target, "query", "key", "value") | {
            "sizes": self.sizes(target),
            "items": self.slots * p.kv_heads,
            "preparers": self.tiles.preparers,
            "scale": float(p.scale),
            "NORMALIZE": p.normalize,
            "FACTORS": FACTORS,
            "INVERSE_PRECISION": inverse_precision(target),
            "PTX": True,
        }
