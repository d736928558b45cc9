"""The call of blocksparse_attention."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ejkernel.types.calls import settle
from ejkernel.types.calls.softmax import SoftmaxCall
from ejkernel.types.calls.spec import Arguments
from ejkernel.types.calls.words import Array, B, F, Flags, I
from ejkernel.types.mask_info import MaskInfo
from ejkernel.types.problem import Problem


class BlockSparseAttention(SoftmaxCall):
    """Attention over the blocks a pattern allows.

    A kernel also gets the pattern, bool ``[#b, #h, q blocks, kv blocks]``, where there is one.
    """

    name = "blocksparse_attention"
    outputs = ("batch q_len heads v_dim", "batch q_len heads")
    asks_for_more = "return_lse"
    seeds = ("dropout_seed",)

    @staticmethod
    def takes(
        query: F[Array, "batch q_len heads head_dim"],
        key: F[Array, "batch kv_len kv_heads head_dim"],
        value: F[Array, "batch kv_len kv_heads v_dim"],
        softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
        bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
        *,
        block_mask: B[Array, "#batch #heads q_blocks kv_blocks"]
        | B[Array, "q_blocks kv_blocks"]
        | None = None,
        mask_builder: Callable[[int, int, int], Array] | None = None,
        q_block_size: int = 128,
        kv_block_size: int = 128,
        mask_info: MaskInfo | None = None,
        attention_mask: Flags[Array, "#batch #heads #q_len #kv_len"]
        | Flags[Array, "#batch q_len kv_len"]
        | Flags[Array, "#batch kv_len"]
        | None = None,
        causal: bool = False,
        causal_offset: int = 0,
        sliding_window: int | tuple[int, int] | None = None,
        chunk_size: int | None = None,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        dropout_prob: float = 0.0,
        dropout_seed: int | I[Array, ""] | None = None,
        return_lse: bool = False,
    ) -> None: ...

    @staticmethod
    def check_values(a: Arguments) -> None:
        settle.build_block_mask(a)

    @staticmethod
    def canonicalise(a: Arguments) -> None:
        settle.grouped_heads(a)
        settle.block_mask(a)
        settle.softmax_options(a)
        settle.dropout(a)
        settle.sinks(a)
        settle.masks(a)

    @classmethod
    def problem(cls, a: Mapping[str, Any]) -> Problem:
        blocks = None if a["block_mask"] is None else (a["q_block_size"], a["kv_block_size"])
        return replace(super().problem(a), pattern_blocks=blocks)

    @classmethod
    def operands(cls, a: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
        pattern = a["block_mask"]
        found = super().operands(a, problem)
        return found if pattern is None else {**found, "pattern": pattern}

    @classmethod
    def samples(cls, a: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """A pattern that shows a few blocks."""
        pattern = a["block_mask"]
        return {} if pattern is None else {"block_mask": rng.random(pattern.shape) < 0.2}
