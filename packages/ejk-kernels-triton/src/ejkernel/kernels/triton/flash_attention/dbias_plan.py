"""The launch of the gradient of flash attention's bias."""

from __future__ import annotations

from dataclasses import dataclass

from ejkernel.kernels.triton.flash_attention.plans import AttentionPlan
from ejkernel.kernels.triton.flash_attention.terms import gradient_factor
from ejkernel.kernels.triton.launch import Launch, Out, struct


@dataclass(frozen=True)
class DbiasPlan(AttentionPlan):
    """q, k, v, do, base, delta, bias -> dbias float32, shaped like the bias.

    ``sum_batch`` batch rows and ``sum_heads`` heads share one row of the bias.
    """

    sum_batch: int = 1
    sum_heads: int = 1

    @property
    def gradient(self) -> float:
        return gradient_factor(self.problem)

    def outputs(self):
        p = self.problem
        rows, heads = p.batch // self.sum_batch, p.heads // self.sum_heads
        return (struct("float32", rows, heads, p.q_len, p.kv_len),)

    def launch(self, target):
        from ejkernel.kernels.triton.flash_attention.dbias_kernel import flash_bwd_dbias

        p, t = self.problem, self.tiles
        arguments, constants = self.common(maps=False)
        q_blocks, kv_blocks = -(-p.q_len // t.block_q), -(-p.kv_len // t.block_kv)
        rows = (p.batch // self.sum_batch) * (p.heads // self.sum_heads)
        arguments |= {name: self.heads(name, t.block_q) for name in ("q", "do")}
        arguments |= {name: self.heads(name, t.block_kv) for name in ("k", "v")}
        arguments |= {name: self.operand(name) for name in ("base", "delta")}
        arguments |= {
            "dbias": Out(0),
            "q_blocks": q_blocks,
            "kv_blocks": kv_blocks,
            "sum_batch": self.sum_batch,
            "sum_heads": self.sum_heads,
        }
        return Launch(
            flash_bwd_dbias, arguments, constants, (q_blocks * kv_blocks * rows,), t.num_warps, 1
        )
