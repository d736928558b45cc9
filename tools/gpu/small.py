"""Cases of Hopper's kernels in a few tiles, on a chip of few multiprocessors.

For what watches every access, and takes long: racecheck (``check_memory --small``), ``races``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from jax.sharding import AbstractDevice

from ejktest import attention_at_size, ragged_cases

CORES = 3
CHIP = AbstractDevice("NVIDIA H200", CORES, "gpu")
# query rows, keys, heads, key heads, and options that differ
FLASH = {
    "odd causal": ((400, 400, 2, 1), {}),
    "segments q>k": ((300, 260, 2, 1), {}),
    "segments cap d64": ((300, 300, 2, 1), {}),
    "sinks cap window": ((330, 330, 2, 1), {"sliding_window": 100}),
    "pairs": ((500, 512, 1, 1), {}),  # programs of a cluster
    "odd full d128": ((700, 100, 2, 1), {}),  # tiles of one block
    "odd full d192/128": ((200, 330, 2, 1), {}),
    "odd causal d256": ((200, 200, 2, 1), {}),
}
SPARSE = {
    "causal 128": ((500, 500, 2, 1), {"pattern": ((128, 128), 0.6, (1, 2))}),
    "across in sixteens": ((290, 330, 2, 1), {"pattern": ((96, 48), 0.5, (1, 2))}),
    "none seen": ((200, 200, 1, 1), {"pattern": ((128, 128), -1.0, (1, 1))}),
    "segments cap": ((300, 300, 2, 1), {"pattern": ((128, 64), 0.5, (1, 2))}),
    "256 d256": ((300, 300, 2, 1), {"pattern": ((256, 256), 0.6, (1, 1))}),
}
MIXES = {
    "singles": ragged_cases.Mix((1, 1, 137), (100, 70, 200), h=8, hk=2, ps=32),
    "rows": ragged_cases.Mix((259, 0, 3, 133), (259, 5, 77, 300), h=4, hk=2, ps=64, cap=20.0),
}


@contextlib.contextmanager
def sizes() -> Generator[None]:
    """Cases of ``attention_at_size`` that are here are as small inside."""
    kept = attention_at_size.CASES.copy(), attention_at_size.SPARSE.copy()
    tables = attention_at_size.CASES, attention_at_size.SPARSE
    for table, cases in zip(tables, (FLASH, SPARSE), strict=True):
        for name, ((q, kv, h, hk), options) in cases.items():
            shape, others = table[name]
            table[name] = ((1, q, kv, h, hk, *shape[5:]), others | options)
    try:
        yield
    finally:
        for table, cases in zip(tables, kept, strict=True):
            table.update(cases)
