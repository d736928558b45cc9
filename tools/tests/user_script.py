"""Code of users, for type checkers only: nothing here is run (tools/user_types.py)."""

from dataclasses import dataclass
from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.pallas import flash_attention as pallas_flash_attention
from ejkernel.kernels.triton import gla_attention as triton_gla_attention
from ejkernel.kernels.xla import flash_attention as xla_flash_attention
from ejkernel.modules import (
    FlashAttention,
    FlashAttentionConfig,
    attention,
    create_default_executor,
    explain,
    flash_attention,
    gla_attention,
    mla_attention,
    page_attention,
    ragged_page_attention_v3,
    recurrent_attention,
    scaled_dot_product_attention,
)
from ejkernel.ops import BwdParams, Explanation, FwdParams, Kernel, autotune
from ejkernel.types import MaskInfo, cu_seqlens_to_lengths, segment_ids_to_mask

x = jnp.ones((1, 8, 2, 16))
host = np.ones((1, 8, 2, 16), np.float32)

out = flash_attention(x, x, x, causal=True, sliding_window=(3, 0))
assert_type(out, jax.Array)
out.at[0].set(1.0)
assert_type(flash_attention(x, x, x, return_lse=False), jax.Array)
assert_type(flash_attention(x, x, x, return_lse=True), tuple[jax.Array, jax.Array])
assert_type(flash_attention(host, host, host), jax.Array)


def chosen_later(with_lse: bool) -> jax.Array:
    answer = flash_attention(x, x, x, return_lse=with_lse)
    assert_type(answer, jax.Array | tuple[jax.Array, jax.Array])
    return answer[0] if isinstance(answer, tuple) else answer


assert_type(attention(x, x, x), tuple[jax.Array, jax.Array])
assert_type(scaled_dot_product_attention(x, x, x), jax.Array)
assert_type(mla_attention(x, x[0], x[0], x[0], return_lse=True), tuple[jax.Array, jax.Array])
o, state = recurrent_attention(x, x, x, return_state=True)
assert_type(state, jax.Array)
assert_type(gla_attention(x, x, x), jax.Array)

tables = jnp.zeros((1, 4), jnp.int32)
pages = jnp.ones((4, 2, 16, 16))
assert_type(page_attention(x[:, 0], pages, pages, tables[:, 0], tables), jax.Array)
lens = jnp.zeros(3, jnp.int32)
written, cache = ragged_page_attention_v3(x[0], x[0], x[0], pages, lens, tables, lens, lens)
assert_type(cache, jax.Array)

config = FlashAttentionConfig(fwd_params=FwdParams(q_blocksize=64), bwd_params=BwdParams())
mapped = FlashAttentionConfig(fwd_params={"q_blocksize": 64})
assert_type(xla_flash_attention(x, x, x, causal=True, cfg=mapped), jax.Array)
assert_type(pallas_flash_attention(x, x, x, return_lse=True), tuple[jax.Array, jax.Array])
assert_type(triton_gla_attention(x, x, x, return_state=True), tuple[jax.Array, jax.Array])
tail = flash_attention(x, x, x, mask_info=MaskInfo.from_causal(), platform="xla", cfg=config)
flash_attention(x, x, x, cfg={"platform": "xla"}, precision="highest", logits_dtype=jnp.float32)


def loss(q: jax.Array) -> jax.Array:
    return flash_attention(q, q, q).sum()


dq = jax.grad(loss)(x)
same: jax.Array = create_default_executor()(FlashAttention(), x, x, x, causal=True)


@dataclass(frozen=True)
class RowTile:
    rows: int = 64


class RowSums(Kernel[RowTile, jax.Array]):
    def __init__(self) -> None:
        super().__init__(name="row_sums")


# a config has the type that its kernel was declared with, an array the class of the one given
assert_type(autotune(RowSums(), x), RowTile)
assert_type(create_default_executor().choose_config(RowSums(), x), RowTile)
assert_type(autotune(FlashAttention(), x, x, x), FlashAttentionConfig)
assert_type(explain("flash_attention", x, x, x), Explanation)
assert_type(cu_seqlens_to_lengths(tables), jax.Array)
counted: np.ndarray = cu_seqlens_to_lengths(np.zeros(3, np.int32))
assert_type(segment_ids_to_mask((tables, tables)), jax.Array)
q_ids, kv_ids, both = segment_ids_to_mask(tables, return_separate_masks=True)
assert_type(both, jax.Array)
assert_type(MaskInfo.from_causal().create_bias(q_len=4, kv_len=4), jax.Array | np.ndarray)
