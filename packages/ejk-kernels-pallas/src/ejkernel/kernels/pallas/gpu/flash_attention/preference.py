"""Which calls the Hopper kernels do faster than the kernels for every GPU."""

from __future__ import annotations

from ejkernel.kernels.pallas.gpu.common.schedule import band_costs
from ejkernel.types.problem import Problem

# Kernels that run on every GPU have priority 100; these go before them, or between them and
# libraries for calls that they do faster.
AHEAD, BEHIND = 110, 90

# Measured on an H200, forward and backward, against the Triton kernels: 544 keys a row 0.82, 576
# 0.79, packed documents of 8k 0.86, 448 queries of 1500 keys 0.57; 1024 keys 1.00, 2080 keys 1.08.
FEW_KEYS = 768
FEW_QUERIES = 512


def priority(problem: Problem) -> int:
    """Behind the kernels for every GPU where heads are narrow and walks are short.

    A walk over few tiles of 64 columns is over before its ends are paid for, and with few blocks
    of queries the programs of many keys wait for their turns to add to dq.

    Behind them with one query, too, for which they cut the keys between programs.
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
