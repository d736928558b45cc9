"""Programs that count each other: who merges the partial results of a launch, and when.

A counter is 0 before the launch. A program adds 1 when it has stored its partial results, and sees
the results of all programs that added before it. So the last one may merge (``few_rows``); or the
others wait for it and all share the rows (``merge_at_end``), which takes less time where there are
many.

Nothing says that all programs of a launch run at the same time. So a program that has waited in
vain adds GAVE_UP and ends. The additions to a counter have an order: either the last program sees
that another one gave up, and merges all rows by itself, or that one sees that all have finished.
Rows may then be merged twice, with the same bits.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton

GAVE_UP = tl.constexpr(1 << 16)  # programs that count each other are fewer


@triton.jit
def count_finished(counter):
    """Counts this program as finished; returns the counter before."""
    # all threads have stored before one of them says so
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def wait_for_programs(counter, programs, POLLS: tl.constexpr):
    """Counts this program as finished and waits for all ``programs``, for POLLS looks at most.

    Returns (whether all have finished, whether this one must do the part of others too).
    """
    before = count_finished(counter)
    finished = before % GAVE_UP + 1
    is_alone = (finished == programs) & (before >= GAVE_UP)
    polls = 0
    while (finished < programs) & (polls < POLLS):
        finished = tl.atomic_add(counter, 0, sem="acquire", scope="gpu") % GAVE_UP
        polls += 1
    if finished < programs:
        finished = tl.atomic_add(counter, GAVE_UP, sem="acq_rel", scope="gpu") % GAVE_UP
    return finished == programs, is_alone
