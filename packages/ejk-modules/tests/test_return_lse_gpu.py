"""Log-sum-exps of operations over a cache on a GPU: Triton's against XLA's, and merged."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel.modules as modules
from ejktest.at_size import BOUND, relative

pytestmark = pytest.mark.gpu

H, HK, D, PS = 32, 8, 128, 16
ROWS, LENS = (1, 0, 300, 1, 5, 64), (4096, 0, 3000, 17, 777, 64)


@pytest.fixture(scope="module")
def calls():
    """Operation, array arguments and options by name."""
    keys = jax.random.split(jax.random.key(0), 4)
    columns = 4096 // PS
    pages = columns * len(LENS)
    kv = jax.random.normal(keys[0], (pages, PS, 2 * HK, D), jnp.bfloat16)
    table = np.random.default_rng(0).permutation(pages).astype(np.int32)
    table, lens = table.reshape(len(LENS), columns), np.array(LENS, np.int32)
    starts = np.cumsum([0, *ROWS]).astype(np.int32)
    tokens = int(starts[-1]) + 5
    new = [jax.random.normal(k, (tokens, HK, D), jnp.bfloat16) for k in keys[1:3]]
    q = jax.random.normal(keys[3], (tokens, H, D), jnp.bfloat16)
    sinks = jnp.linspace(-1, 3, H)[:, None]
    options = {"sliding_window": 500, "softmax_aux": sinks, "logits_soft_cap": 20.0}
    paged = q[: len(LENS)], kv[:, :, 0::2], kv[:, :, 1::2], lens, table
    rows = [kv[: 4 * columns, :, i::2].reshape(4, 4096, HK, D) for i in (0, 1)]
    ends = np.array([0, 40, 7, 9]), np.array([4096, 40, 900, 10])
    ragged = q, kv, lens, table, starts, len(LENS)
    ends_of_kinds = np.array([0, 0, len(LENS)], np.int32)
    return {
        "page": ("page_attention", paged, {}),
        "page one split": ("page_attention", paged, {"num_splits": 1, **options}),
        "contiguous": ("ragged_decode_attention", (q[:4], *rows, *ends), {}),
        "ragged": ("ragged_page_attention", ragged, {}),
        "ragged options": ("ragged_page_attention", ragged, options),
        "v3": (
            "ragged_page_attention_v3",
            (q, *new, kv, lens, table, starts, ends_of_kinds), {},
        ),
    }  # fmt: skip


NAMES = ("page", "page one split", "contiguous", "ragged", "ragged options", "v3")


@pytest.mark.parametrize("name", NAMES)
def test_triton_equals_xla(name, calls):
    operation, arguments, options = calls[name]
    function = getattr(modules, operation)

    def run(platform):
        call = jax.jit(lambda *x: function(*x, return_lse=True, platform=platform, **options))
        return call(*arguments)

    (out, lse, *_), (wanted, wanted_lse, *_) = run("triton"), run("xla")
    assert lse.dtype == jnp.float32
    hidden = np.isneginf(wanted_lse)
    assert hidden.any() and np.array_equal(np.isneginf(lse), hidden)
    assert relative(out, wanted) <= BOUND["bfloat16"]
    np.testing.assert_allclose(np.where(hidden, 0, lse), np.where(hidden, 0, wanted_lse), atol=5e-3)
    without = jax.jit(lambda *x: function(*x, platform="triton", **options))(*arguments)
    first = without[0] if isinstance(without, tuple) else without
    assert relative(out, first) <= BOUND["bfloat16"]


def test_pages_in_two_parts(calls):
    """A context in two calls, merged, is that of one call."""
    q, k, v, lens, tables = calls["page"][1]
    half = lens // 2 // PS * PS
    shifted = np.full_like(tables, -1)
    for row, table, n in zip(shifted, tables, half // PS, strict=True):
        row[: len(table) - n] = table[n:]
    parts = [
        modules.page_attention(q, k, v, *x, return_lse=True, platform="triton")
        for x in ((half, tables), (lens - half, shifted))
    ]
    out, _ = modules.merge_attention(*zip(*parts, strict=True))
    whole = modules.page_attention(q, k, v, lens, tables, platform="triton")
    assert relative(out, whole) <= BOUND["bfloat16"]
