"""Readiness of chunks that other programs of the same launch prepare: counters in global memory.

A counter is that of GROUP chunks of a batch row and one key head. A program that has prepared a
chunk adds 1, after the stores of all its threads; a program that scans waits, before the first
chunk of a group, until the counter has all of them. Preparing programs never wait.

Groups, since a scan waits for the counter's value, about 0.5 microseconds, before it can start the
copies of a chunk. Eight chunks are 13 microseconds of a scan, and the first group of 16 key heads
is 128 chunks: no more than there are programs that prepare.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton

_GROUP = 8
GROUP = tl.constexpr(_GROUP)
# Every thread reads the counter, so that each may load what was stored before. Threads of a scan
# load nothing that depends on the counter but at addresses that depend on the result: the assembly
# is pure to the compiler, which moves it forward with the copies of later chunks.
WAIT = tl.constexpr("""
{
    .reg .pred p;
    .reg .b32 count;
    mov.b32 $0, 0;
    setp.eq.s32 p, $2, 0;
    @p bra ready;
again:
    ld.acquire.gpu.global.b32 count, [$1];
    setp.ge.s32 p, count, $2;
    @p bra ready;
    nanosleep.u32 64;
    bra again;
ready:
}
""")
OUTSIDE = tl.constexpr(-(2**28))  # of every array


def count_counters(batch: int, pieces: int, kv_heads: int) -> int:
    """Returns the number of counters of a call."""
    return batch * -(-pieces // _GROUP) * kv_heads


@triton.jit
def find_counter(counters, batch, piece, kv_head, sizes):
    """Returns the address of the counter of a chunk."""
    groups = (sizes.pieces + GROUP - 1) // GROUP
    return counters + (batch * groups + piece // GROUP) * sizes.kv_heads + kv_head


@triton.jit
def report_chunk(counters, batch, piece, kv_head, sizes):
    """Counts a prepared chunk."""
    # all threads have stored before one of them says so
    tl.debug_barrier()
    tl.atomic_add(find_counter(counters, batch, piece, kv_head, sizes), 1, sem="release")


@triton.jit
def wait_for_chunk(counters, batch, kv_head, i, first, last, sizes, PTX: tl.constexpr):
    """Waits until chunk ``i`` of a scan is prepared, and returns 0: addresses depend on it.

    Copies that run ahead wait past the last chunk too: for the last one. Without PTX, in the
    interpreter, programs run one after another: another count than that of a full group gives an
    address outside of every array.
    """
    i = tl.maximum(tl.minimum(i, last - first - 1), 0)
    if sizes.REVERSED:
        piece = last - 1 - i
        enters = piece % GROUP == GROUP - 1
    else:
        piece = first + i
        enters = piece % GROUP == 0
    piece = tl.minimum(tl.maximum(piece, 0), sizes.pieces - 1)
    members = tl.minimum(sizes.pieces - piece // GROUP * GROUP, GROUP)
    expected = tl.where(enters | (i == 0), members, 0)
    counter = find_counter(counters, batch, piece, kv_head, sizes)
    if PTX:
        ready = tl.inline_asm_elementwise(
            WAIT, "=r,l,r", [counter.to(tl.int64), expected], tl.int32, is_pure=True, pack=1
        )
    else:
        count = tl.load(counter)
        ready = tl.where((expected == 0) | (count == expected), 0, OUTSIDE)
    return ready
