"""Priorities of the Hopper kernels against the kernels for every GPU, by measured speed."""

from __future__ import annotations

from ejkernel.kernels.pallas.gpu.common.schedule import band_costs
from ejkernel.types.attention.problem import Problem

# Kernels that run on every GPU have priority 100; these go before them, or between them and
# libraries for calls that they do faster.
AHEAD, BEHIND = 110, 90

# Measured on an H200, forward and backward, against the Triton kernels: 544 keys a row 0.82, 576
# 0.79, packed documents of 8k 0.86, 448 queries of 1500 keys 0.57; 1024 keys 1.00, 2080 keys 1.08.
FEW_KEYS = 768
FEW_QUERIES = 512


def priority(problem: Problem) -> int:
    """Returns the priority: behind the kernels for every GPU for narrow heads and short loops.

    A loop over few tiles of 64 columns does not amortize its prologue and epilogue, and with few
    blocks of queries the programs of many keys wait to add to dq in order.

    Also behind them with one query, for which they split the keys between programs.
    """
    rules = problem.rules
    if problem.q_len == 1:
        return BEHIND
    if max(problem.dim, problem.value_dim) > 64:
        return AHEAD
    if rules.arrays or problem.q_len <= FEW_QUERIES:
        return BEHIND
    block = 64
    seen = band_costs(problem.q_len, problem.kv_len, rules.band, block, block).mean() * block
    return BEHIND if seen <= FEW_KEYS else AHEAD


def of_pattern(problem: Problem) -> int:
    """Returns the priority of a pattern: ahead with heads of 128 and full tiles, as measured.

    On an H200 at 16k, one block in ten of 128 under a causal mask: forward 0.203 ms against 0.273
    of the Triton kernels, with gradients 0.80 against 1.05.
    """
    assert problem.pattern_blocks is not None
    lengths = (problem.q_len, problem.kv_len)
    blocks = zip(problem.pattern_blocks, lengths, strict=True)
    full_tiles = all(block % 128 == 0 or block >= length for block, length in blocks)
    measured = problem.dim == problem.value_dim == 128 and problem.q_len > FEW_QUERIES
    return AHEAD if full_tiles and measured else BEHIND
