"""Operations that read a cache: where the tokens lie, and who may see them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from demo_lm.single.common import features, report, text
from ejktest.oracles import paged as oracle

HEADS, KV_HEADS, DIM, PAGE, COLUMNS = 4, 2, 16, 4, 5
LENS = np.array([17, 3, 9], np.int32)
ROWS = len(LENS)
POOL = ROWS * COLUMNS


def _tables() -> np.ndarray:
    return np.random.default_rng(0).permutation(POOL).reshape(ROWS, COLUMNS).astype(np.int32)


def _paged(x, tables):
    """``[POOL, PAGE, ...]`` holding ``x [ROWS, COLUMNS * PAGE, ...]`` where the tables say."""
    x = np.asarray(x)
    pool = np.zeros((POOL, PAGE, *x.shape[2:]), x.dtype)
    pool[tables] = x.reshape(ROWS, COLUMNS, PAGE, *x.shape[2:])
    return jnp.asarray(pool)


def _rows(heads: int, dim: int, seed: int):
    """Each row of the cache is another piece of the text."""
    data = text(ROWS * COLUMNS * PAGE)
    return features(data, heads, dim, seed)[0].reshape(ROWS, COLUMNS * PAGE, heads, dim)


def _draw(tables, new: np.ndarray) -> None:
    data = text(ROWS * COLUMNS * PAGE).replace(b"\n", b" ").decode()
    print("page:tokens of each sequence, in order ('_' not written, '>' before new tokens)")
    for r in range(ROWS):
        cells = []
        for c in range(COLUMNS):
            chars = ""
            for t in range(c * PAGE, (c + 1) * PAGE):
                chars += ">" if t == LENS[r] - new[r] else ""
                chars += data[r * COLUMNS * PAGE + t] if t < LENS[r] else "_"
            cells.append(f"{tables[r, c]:>2}:{chars}")
        print(f"  {LENS[r]:>2} tokens  " + "  ".join(cells))


def _exact(fn, *arrays):
    with jax.enable_x64(True):
        out = fn(*(jnp.asarray(np.asarray(a), jnp.float64) for a in arrays))
        return jax.tree.map(np.asarray, out)


def _query(n: int, dim: int = DIM):
    return features(text(400)[-n:], HEADS, dim, 9)[0]


def page_attention() -> None:
    tables = _tables()
    k, v = (_paged(_rows(KV_HEADS, DIM, s), tables) for s in (1, 2))
    q = _query(ROWS)
    _draw(tables, np.ones(ROWS, int))
    exact = _exact(
        lambda q, k, v: oracle.page_attention(q, k, v, LENS, tables, scale=DIM**-0.5), q, k, v
    )
    report("page_attention", exact, q, k, v, LENS, tables)


def ragged_decode_attention() -> None:
    k, v = (_rows(KV_HEADS, DIM, s) for s in (1, 2))
    q, start = _query(ROWS), np.array([5, 0, 9], np.int32)
    for r in range(ROWS):
        line = "".join("x" if start[r] <= j < LENS[r] else "·" for j in range(COLUMNS * PAGE))
        print(f"  row {r} reads {line}")
    exact = _exact(
        lambda *a: oracle.ragged_decode_attention(*a, start, LENS, scale=DIM**-0.5), q, k, v
    )
    report("ragged_decode_attention", exact, q, k, v, start, LENS)


def mla_decode() -> None:
    tables, latent, width = _tables(), 16, 24
    cache = _paged(_rows(1, width, 1)[:, :, 0], tables)
    q = _query(ROWS, width)
    _draw(tables, np.ones(ROWS, int))
    exact = _exact(
        lambda q, c: oracle.mla_decode(
            q[:, None], c, LENS, tables, latent, scale=width**-0.5
        )[0][:, 0],
        q, cache,
    )  # fmt: skip
    report("mla_decode", exact, q, cache, LENS, tables, latent_dim=latent)


def _ragged():
    new = np.array([4, 1, 9])  # a continued prefill, a decoding step, a whole prompt
    starts = np.cumsum([0, *new]).astype(np.int32)
    tables = _tables()
    k, v = (np.asarray(_rows(KV_HEADS, DIM, s)) for s in (1, 2))
    both = np.stack([k, v], 3).reshape(*k.shape[:2], 2 * KV_HEADS, DIM)
    _draw(tables, new)
    return new, starts, tables, k, v, _paged(both, tables), _query(int(starts[-1]))


def _ragged_exact(q, pages, tables, starts):
    return _exact(
        lambda q, p: oracle.ragged_page_attention(
            q, p, LENS, tables, starts, ROWS, scale=DIM**-0.5
        ),
        q, pages,
    )  # fmt: skip


def ragged_page_attention() -> None:
    _, starts, tables, _, _, pages, q = _ragged()
    exact = _ragged_exact(q, pages, tables, starts)
    report("ragged_page_attention", exact, q, pages, LENS, tables, starts, ROWS)


def ragged_page_attention_v3() -> None:
    new, starts, tables, k, v, pages, q = _ragged()
    keys, values = (
        jnp.concatenate([x[r, LENS[r] - n : LENS[r]] for r, n in enumerate(new)]) for x in (k, v)
    )
    erased = np.array(pages)
    for r, n in enumerate(new):
        for t in range(LENS[r] - n, LENS[r]):
            erased[tables[r, t // PAGE], t % PAGE] = 0
    args = (q, keys, values, erased, LENS, tables, starts, np.array([0, 0, ROWS], np.int32))
    exact = _ragged_exact(q, pages, tables, starts)
    _, cache = report("ragged_page_attention_v3", exact, *args)
    print(f"cache after the write equals the full cache: {bool(jnp.array_equal(cache, pages))}")
