"""Attention over parts of the keys, merged, against attention over all of them."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import InvalidArgument, flash_attention, merge_attention
from ejktest.drawn import array, normal
from ejktest.oracles.attention import Case, attention, gradients
from ejktest.tolerance import check_close

ENDS = (0, 3, 3, 8, 13)
"""Parts of the keys; the second is empty."""


def visible(sinks):
    """Row 2 of sequence 0 sees nothing, row 1 of sequence 1 keys of the last part only."""
    seen = np.random.default_rng(0).random((2, 1, 5, 13)) < 0.5
    seen[1, :, 1, :8] = False
    if sinks is not None:  # they belong to the first part, of which every row sees a key
        seen[..., 0] = True
    seen[0, :, 2] = False
    return seen


def operands(dtype=jnp.float32):
    shapes = (2, 5, 4, 8), (2, 13, 2, 8), (2, 13, 2, 6)
    return [normal(*shape, dtype=dtype) for shape in shapes]


def merged(q, k, v, sinks, *, seen):
    outs, lses = [], []
    for i, (start, end) in enumerate(pairwise(ENDS)):
        o, lse = flash_attention(
            q, k[:, start:end], v[:, start:end], softmax_aux=None if i else sinks,
            attention_mask=array(seen[..., start:end]), return_lse=True, platform="xla",
        )  # fmt: skip
        outs, lses = [*outs, o], [*lses, lse]
    return merge_attention(outs, lses)


@pytest.mark.parametrize("sinks", [None, normal(4, 2, seed=5)], ids=["", "sinks"])
def test_values_and_gradients(sinks):
    seen, arrays = visible(sinks), [*operands(), sinks]
    case = Case(*arrays[:3], sinks=sinks, see=seen)
    do, dlse = normal(2, 5, 4, 6, seed=1), normal(2, 5, 4, seed=2)

    @jax.jit
    def run(arrays, do, dlse):
        out, pull = jax.vjp(lambda *x: merged(*x, seen=seen), *arrays)
        return out, pull((do, dlse))

    (o, lse), found = run(arrays, do, dlse)
    expected, plain = (attention(case, plain=p) for p in (False, True))
    check_close(o, expected.o, plain.o)
    check_close(lse, expected.lse, plain.lse, name="lse")
    assert np.isneginf(lse[0, 2]).all() and not np.asarray(o[0, 2]).any()
    expected, plain = (gradients(case, do, dlse, plain=p) for p in (False, True))
    for name, x in zip(("dq", "dk", "dv", "dsinks"), found, strict=True):
        if x is not None:
            check_close(x, getattr(expected, name), getattr(plain, name), name=name, factor=3.0)


def test_dtypes_of_the_first_part_and_extreme_weights():
    rows, heads = (3,), 2
    o = [normal(*rows, heads, 4, seed=i, dtype=jnp.bfloat16) for i in range(3)]
    lse = np.asarray([[[0, 300]] * 3, [[-np.inf] * 2] * 3, [[0, -300]] * 3], np.float32)
    o[1] = o[1] * jnp.bfloat16(np.nan)  # counts nothing
    out, total = jax.jit(lambda o, lse: merge_attention(o, list(lse)))(o, lse)
    assert (out.dtype, total.dtype) == (jnp.bfloat16, jnp.float32)
    first, last = np.asarray(o[0], np.float64), np.asarray(o[2], np.float64)
    check_close(out[:, 0], (first[:, 0] + last[:, 0]) / 2, name="equal weights")
    np.testing.assert_array_equal(out[:, 1], o[0][:, 1])
    check_close(total, np.asarray([[np.log(2), 300]] * 3), name="lse")
    alone = merge_attention([np.asarray(o[0])], [lse[0]])
    np.testing.assert_array_equal(alone[0], o[0])
    with jax.enable_x64(True):
        wide = merge_attention([normal(2, 3, 4, dtype=jnp.float64)], [normal(2, 3)])
        assert (wide[0].dtype, wide[1].dtype) == (jnp.float64, jnp.float32)


def test_wrong_parts():
    o, lse = normal(2, 3, 4), normal(2, 3)
    for outs, lses, words in (
        ([], [], "outs: expected a list of one array or more"),
        (o, lse, "outs: expected a list"),
        ([o], [lse, lse], "lses: expected 1 arrays, one for each of outs, given 2"),
        ([o, o[:1]], [lse, lse], r"outs\[1\]: expected float\[2, 3, 4\], as outs\[0\]"),
        ([o, o], [lse, lse[:, :2]], r"lses\[1\]: expected float\[2, 3\]"),
        ([o, array([1, 2])], [lse, lse], r"outs\[1\]: expected float\[..., heads, v_dim\], given"),
        ([lse[0]], [lse[0, 0]], r"outs\[0\]: expected float\[..., heads, v_dim\]"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            merge_attention(outs, lses)
