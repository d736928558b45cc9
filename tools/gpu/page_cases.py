"""What ``check_page`` runs: calls to check with their oracle, calls to time."""

from __future__ import annotations

import dataclasses

import numpy as np
from tools.gpu.common import jax, jnp

BF, HALF, F32 = jnp.bfloat16, jnp.float16, jnp.float32
I8, E4, E5 = jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call: contexts, heads, sizes, dtypes."""

    lens: tuple
    h: int = 32
    hk: int = 8
    d: int = 128
    dv: int = 128
    ps: int = 16
    q: object = BF
    kv: object = BF

    @property
    def bytes(self):
        """Of keys and values inside the contexts."""
        return sum(self.lens) * self.hk * (self.d + self.dv) * jnp.dtype(self.kv).itemsize


def draw(s: Shape, seed=0):
    """q, caches of exactly the pages needed and three more, lengths, shuffled tables."""
    rng = np.random.default_rng(seed)
    columns = max(1, max(-(-n // s.ps) for n in s.lens))
    counts = [-(-n // s.ps) for n in s.lens]
    pages = sum(counts) + 3
    order = rng.permutation(pages)
    tables = np.full((len(s.lens), columns), -1, np.int32)
    start = 0
    for row, n in zip(tables, counts, strict=True):
        row[:n] = order[start : start + n]
        start += n
    tables[tables < 0] = rng.choice([-1, 2**30, -(2**31), pages], (tables < 0).sum())
    a, b, c = jax.random.split(jax.random.key(seed), 3)

    @jax.jit
    def make(a, b, c):
        q = jax.random.normal(a, (len(s.lens), s.h, s.d), F32).astype(s.q)
        k = jax.random.normal(b, (pages, s.ps, s.hk, s.d), BF)
        v = jax.random.normal(c, (pages, s.ps, s.hk, s.dv), BF)
        if s.kv == I8:
            k, v = (jnp.clip(jnp.round(x * 40), -128, 127) for x in (k, v))
        return q, k.astype(s.kv), v.astype(s.kv)

    return (*make(a, b, c), jnp.asarray(s.lens, jnp.int32), jnp.asarray(tables))


def oracle(s, q, k, v, lens, tables, *, window=None, cap=None, aux=None, ks=1.0, vs=1.0):
    """Row by row in float32 with full products."""
    high = dict(precision="highest")
    t = tables.shape[1] * s.ps

    def row(x):
        q, n, table = x
        table = jnp.clip(table, 0, k.shape[0] - 1)
        kk = k[table].reshape(t, s.hk, s.d).astype(F32)
        vv = v[table].reshape(t, s.hk, s.dv).astype(F32)
        j = jnp.arange(t)
        seen = j < n
        if window is not None:
            seen &= j >= n - 1 - window
        kk, vv = (jnp.where(seen[:, None, None], x, 0.0) for x in (kk, vv))
        g = q.astype(F32).reshape(s.hk, -1, s.d)
        x = jnp.einsum("hgd,thd->hgt", g, kk, **high) * (s.d**-0.5 * ks)
        x = cap * jnp.tanh(x / cap) if cap else x
        x = jnp.where(seen, x, -jnp.inf)
        m = jnp.max(x, -1, keepdims=True)
        m = jnp.where(m == -jnp.inf, 0.0, m)
        p = jnp.exp(x - m)
        total = p.sum(-1, keepdims=True)
        if aux is not None:
            total += jnp.exp(aux.reshape(s.hk, -1, aux.shape[1]) - m).sum(-1, keepdims=True)
        p = p / jnp.where(total == 0.0, 1.0, total)
        return jnp.einsum("hgt,thd->hgd", p, vv, **high).reshape(s.h, s.dv) * vs

    return jax.lax.map(row, (q, lens, tables))


UNEVEN = (4096, 16, 1, 0, 777, 2048, 3000, 65)
CASES = {
    "page 16": (Shape(UNEVEN), {}),
    "page 64": (Shape(UNEVEN, ps=64), {}),
    "page 1": (Shape(UNEVEN[4:], ps=1), {}),
    "page 3": (Shape(UNEVEN[4:], ps=3), {}),
    "page 256": (Shape(UNEVEN, ps=256), {}),
    "long single": (Shape((100001,)), {}),
    "no context": (Shape((0, 0, 0)), {}),
    "batch 1500": (Shape(tuple(i % 97 for i in range(1500)), h=8, hk=2, d=64, dv=64), {}),
    "splits 1": (Shape(UNEVEN), dict(num_splits=1)),
    "splits 5": (Shape(UNEVEN), dict(num_splits=5)),
    "splits 1 sinks": (Shape(UNEVEN), dict(num_splits=1, sinks=2)),
    "window": (Shape(UNEVEN), dict(window=300)),
    "cap": (Shape(UNEVEN), dict(cap=5.0)),
    "sinks": (Shape(UNEVEN), dict(sinks=3)),
    "window cap sinks": (Shape(UNEVEN, ps=64), dict(window=1000, cap=20.0, sinks=1)),
    "mha": (Shape(UNEVEN, h=8, hk=8), {}),
    "mqa 8": (Shape(UNEVEN, h=8, hk=1), {}),
    "mqa 32": (Shape(UNEVEN, h=32, hk=1), {}),
    "mqa 64": (Shape(UNEVEN, h=64, hk=1), {}),
    "mqa 128": (Shape(UNEVEN, h=128, hk=1), {}),
    "group 5": (Shape(UNEVEN, h=10, hk=2), {}),
    "d16": (Shape(UNEVEN, d=16, dv=16), {}),
    "d64": (Shape(UNEVEN, d=64, dv=64), {}),
    "d80": (Shape(UNEVEN, d=80, dv=80), {}),
    "d96": (Shape(UNEVEN, d=96, dv=96), {}),
    "d112": (Shape(UNEVEN, d=112, dv=112), {}),
    "d192/128": (Shape(UNEVEN, d=192, dv=128), {}),
    "d256": (Shape(UNEVEN, d=256, dv=256), {}),
    "d256 mqa 64": (Shape(UNEVEN, h=64, hk=1, d=256, dv=256), {}),
    "float16": (Shape(UNEVEN, q=HALF, kv=HALF), {}),
    "float32": (Shape(UNEVEN, q=F32, kv=F32), {}),
    "float32 d256": (Shape(UNEVEN, q=F32, kv=F32, d=256, dv=256), {}),
    "int8": (Shape(UNEVEN, kv=I8), dict(ks=0.025, vs=0.03)),
    "int8 page 1": (Shape(UNEVEN[4:], kv=I8, ps=1, d=72, dv=40), dict(ks=0.025, vs=0.03)),
    "e4m3": (Shape(UNEVEN, kv=E4), dict(ks=0.5, vs=2.0)),
    "e5m2": (Shape(UNEVEN, kv=E5), dict(ks=0.5, vs=2.0)),
    "e4m3 d64 window": (Shape(UNEVEN, kv=E4, d=64, dv=64), dict(window=77)),
    "e4m3 d80": (Shape(UNEVEN, kv=E4, d=80, dv=80), dict(ks=0.5, vs=2.0)),
    "e5m2 d256 page 64": (Shape(UNEVEN, kv=E5, d=256, dv=256, ps=64), dict(ks=0.5, vs=2.0)),
    "int8 mqa 64": (Shape(UNEVEN, kv=I8, h=64, hk=1), dict(ks=0.025, vs=0.03)),
    "float16 q, e4m3": (Shape(UNEVEN, q=HALF, kv=E4), dict(num_splits=1)),
    "float32 q, int8": (Shape(UNEVEN, q=F32, kv=I8), dict(ks=0.025, vs=0.03)),
}
QUICK = (
    "page 16", "page 64", "page 1", "long single", "splits 1", "splits 5", "window cap sinks",
    "mqa 64", "d80", "d256", "float32", "int8", "e4m3",
)  # fmt: skip
# output rounding is 2e-3 in bfloat16; probabilities rounded to it add as much
BOUND = {"bfloat16": 6e-3, "float16": 1e-3, "float32": 2e-5}


def uneven(batch=64, mean=4096, low=16, high=16384):
    """Contexts between low and high whose mean is exactly ``mean``."""
    rng = np.random.default_rng(1)
    n = np.exp(rng.uniform(np.log(low), np.log(high), batch))
    n[:2] = low, high
    for _ in range(100):
        n[2:] = np.clip(n[2:] * (batch * mean - n[:2].sum()) / n[2:].sum(), low, high)
    n = n.astype(int)
    n[np.argmax((n > low + batch) & (n < high - batch))] += batch * mean - n.sum()
    return tuple(int(x) for x in n)


EVEN = (8192,) * 64
TIMED = {
    "B64 8k page 16": Shape(EVEN),
    "B64 8k page 64": Shape(EVEN, ps=64),
    "B64 8k page 1": Shape(EVEN, ps=1),
    "B64 8k page 256": Shape(EVEN, ps=256),
    "B1 128k page 16": Shape((131072,)),
    "B1 128k page 64": Shape((131072,), ps=64),
    "B64 4k even": Shape((4096,) * 64),
    "B64 4k uneven": Shape(uneven()),
    "B64 8k int8": Shape(EVEN, kv=I8),
    "B64 8k e4m3": Shape(EVEN, kv=E4),
    "B64 8k e5m2": Shape(EVEN, kv=E5),
    "B64 8k int8 page 64": Shape(EVEN, kv=I8, ps=64),
    "B64 8k e4m3 page 64": Shape(EVEN, kv=E4, ps=64),
    "B1 128k int8": Shape((131072,), kv=I8),
    "B64 4k uneven int8": Shape(uneven(), kv=I8),
    "B64 8k D64": Shape(EVEN, d=64, dv=64),
    "B16 8k D256": Shape((8192,) * 16, d=256, dv=256),
    "B64 8k MQA 64": Shape(EVEN, h=64, hk=1),
    "B256 512": Shape((512,) * 256),
    "B8 1k": Shape((1024,) * 8),
}
QUICK_TIMED = (
    "B64 8k page 16", "B64 8k page 64", "B1 128k page 16", "B64 4k even", "B64 4k uneven",
    "B64 8k int8", "B64 8k e4m3",
)  # fmt: skip


# the bfloat16 cache that an 8-bit one is compared with
AGAINST = {
    "B64 8k int8": "B64 8k page 16",
    "B64 8k e4m3": "B64 8k page 16",
    "B64 8k e5m2": "B64 8k page 16",
    "B64 8k int8 page 64": "B64 8k page 64",
    "B64 8k e4m3 page 64": "B64 8k page 64",
    "B1 128k int8": "B1 128k page 16",
    "B64 4k uneven int8": "B64 4k uneven",
}
