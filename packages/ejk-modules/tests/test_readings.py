# ruff: noqa: E501 (tables of messages, one line each)
"""Masks and caches whose shape has two readings: refused, or the error says both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel.modules as modules
from ejkernel.ops import InvalidArgument
from ejktest.calls import call
from ejktest.drawn import array
from ejktest.variants import shapes_of


def ones(*shape):
    return array(np.ones(shape), jnp.float32)


MASKED = ("flash_attention", "attention", "scaled_dot_product_attention", "blocksparse_attention", "mla_attention")  # fmt: skip
SQUARE = dict(batch=4, q_len=4, kv_len=4, q_blocks=1, kv_blocks=1)
AMBIGUOUS = [
    (SQUARE, (4, 4), r"mask\[:, None, None, :\] if its axes are \[batch, kv_len\], attention_mask\[None, None\] if its axes are \[q_len, kv_len\]\), got bool\[4, 4\]"),
    (SQUARE, (4, 4, 4), r"mask\[:, None\] if its axes are \[batch, q_len, kv_len\], attention_mask\[None\] if its axes are \[heads, q_len, kv_len\]\), got bool\[4, 4, 4\]"),
    ({"batch": 4}, (4, 12, 12), r"attention_mask\[None\] if its axes are \[heads, q_len, kv_len\]"),
]  # fmt: skip
CLEAR = [
    (SQUARE, (1, 4)),
    (SQUARE, (4, 1, 1, 4)),
    (SQUARE, (1, 1, 4, 4)),
    (SQUARE, (4, 1, 4, 4)),
    ({**SQUARE, "batch": 1, "q_len": 1}, (1, 4)),
    ({"batch": 4}, (4, 12)),
    ({"batch": 12}, (12, 12, 12)),
]


def masked(operation, sizes, mask):
    c = call(operation)
    arrays = {**shapes_of(c, **sizes), "attention_mask": jax.ShapeDtypeStruct(mask, bool)}
    return jax.eval_shape(lambda a: getattr(modules, operation)(**a, **c.static), arrays)


@pytest.mark.parametrize("operation", MASKED)
def test_a_mask_that_means_two_things_is_refused(operation):
    for sizes, mask, message in AMBIGUOUS:
        with pytest.raises(
            InvalidArgument,
            match="attention_mask: expected a mask that has one reading .*" + message,
        ):
            masked(operation, sizes, mask)
    for sizes, mask in CLEAR:
        masked(operation, sizes, mask)


SMALL = np.asarray([[3, 1, 0], [0, 4, 2]], np.int32)
LAYOUTS = [
    # heads before the tokens of a page: a legal shape, as 4 key heads and pages of 2 tokens
    ("page_attention", dict(key_cache=ones(7, 2, 4, 8), value_cache=ones(7, 2, 4, 6)), r"^key_cache: float32\[7, 2, 4, 8\] is read as \[pages, page_size, kv_heads, head_dim\], so that context_lens\[1\]: given 11, .* would fit \[pages, kv_heads, page_size, head_dim\]"),
    ("page_attention", dict(key_cache=ones(2, 7, 4, 8), value_cache=ones(2, 7, 4, 6)), r"^key_cache: .*so that block_tables\[0, 0\]: given 3, .* would fit \[kv_heads, pages, page_size, head_dim\]"),
    ("ragged_page_attention", dict(kv_pages=ones(7, 2, 8, 8)), r"^kv_pages: .*so that context_lens\[1\]: given 9, .* \[pages, combined_kv_heads, page_size, head_dim\]"),
    # shapes that no call may have
    ("page_attention", dict(key_cache=ones(7, 2, 3, 8), value_cache=ones(7, 2, 3, 6)), "^key_cache: expected kv_heads that divide"),
    ("page_attention", dict(key_cache=ones(2, 7, 8, 4)), "^key_cache: expected .*pages, page_size, kv_heads, head_dim.*head_dim=8"),
    ("page_attention", dict(key_cache=ones(7, 2, 4, 2, 4)), r"^key_cache: expected .*pages, page_size, kv_heads, head_dim\]"),
    ("ragged_page_attention", dict(kv_pages=ones(7, 2, 3, 8)), "^kv_pages: expected an even axis 2"),
    ("ragged_page_attention", dict(kv_pages=ones(7, 2, 2, 2, 8)), r"^kv_pages: expected .*pages, page_size, combined_kv_heads, head_dim\]"),
    ("ragged_page_attention_v3", dict(kv_cache=ones(7, 2, 2, 8)), r"^kv_cache: expected \[pages, page_size, 4, 8\] for 2 kv heads"),
    ("ragged_page_attention_v3", dict(kv_cache=ones(2, 7, 4, 4, 8)), r"^kv_cache: expected \[pages, page_size, 4, 1, 128\]"),
    ("mla_decode", dict(latent_cache=ones(7, 1, 2, 12)), r"^latent_cache: expected .*pages, page_size, cache_dim\]"),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "caches", "message"), LAYOUTS)
def test_a_wrong_cache_layout_is_named_before_the_table(operation, caches, message):
    c = call(operation)
    indices = {n: np.asarray(x) for n, x in c.arrays.items() if x.dtype == jnp.int32}
    indices["block_tables"] = SMALL[np.arange(indices["block_tables"].shape[0]) % 2]
    with pytest.raises(ValueError, match=message):
        getattr(modules, operation)(**{**c.arguments, **indices, **caches})
