"""The call of ragged_page_attention."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.types.calls import canonicalize, values
from ejkernel.types.calls.paged import RaggedCall
from ejkernel.types.calls.spec import Arguments
from ejkernel.types.calls.words import Array, B, Cache, F, I, invalid, out_of_range
from ejkernel.types.serving.operands import broadcast_operands, in_order, tree_operands
from ejkernel.types.serving.plan import AttentionPlan
from ejkernel.types.serving.problem import RaggedProblem


class RaggedPageAttention(RaggedCall):
    """Mixed prefill and decode over a paged cache that already holds the new tokens."""

    name = "ragged_page_attention"
    outputs = ("tokens heads head_dim", "tokens heads")
    normal_samples = True

    @staticmethod
    def signature(
        queries: F[Array, "tokens heads head_dim"],
        kv_pages: Cache[Array, "pages page_size combined_kv_heads head_dim"],
        context_lens: I[Array, " sequences"],
        block_tables: I[Array, "sequences max_blocks"],
        query_start_loc: I[Array, " sequences_plus_1"],
        num_seqs: int | I[Array, ""] | I[Array, "1"],
        softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
        *,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
        sliding_window: int | tuple[int, int] | None = None,
        k_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
        v_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
        tree_mask: B[Array, "tokens max_new"] | None = None,
        positions: I[Array, " tokens"] | None = None,
        return_lse: bool = False,
        plan: AttentionPlan | None = None,
    ) -> None: ...

    @classmethod
    def check_values(cls, a: Arguments) -> None:
        count = values.concrete_value(a["num_seqs"])
        if count is not None:  # rows past the valid ones may hold anything
            total, value = a["context_lens"].shape[0], int(count.reshape(()))
            if not 0 <= value <= total:
                legal = f"0 to {total}, the rows of context_lens"
                raise out_of_range("num_seqs", legal, value)
            cls.check_sequences(a, value)
            cls.check_tables(a, value)
        values.integer_to_array(a, "num_seqs")

    @classmethod
    def canonicalize(cls, a: Arguments) -> None:
        """Checks that pages interleave keys and values: one row of each per head."""
        heads, odd = divmod(a["kv_pages"].shape[2], 2)
        if odd:
            legal = "an even axis 2: keys and values of each kv head, interleaved"
            raise invalid("kv_pages", legal, a["kv_pages"])
        canonicalize.check_groups("kv_pages", a["queries"].shape[1], heads, a["kv_pages"])
        super().canonicalize(a)
        canonicalize.scalar_index(a, "num_seqs")
        cls.canonicalize_tree(a)

    @classmethod
    def count_all(cls, a: Arguments) -> None:
        a["num_seqs"] = jnp.asarray(a["context_lens"].shape[0], jnp.int32)

    @classmethod
    def with_rows(cls, a: Arguments, tables: Any, lengths: Any) -> Arguments:
        count = jnp.asarray(a["queries"].shape[0], jnp.int32)
        return {**super().with_rows(a, tables, lengths), "num_seqs": count}

    @classmethod
    def problem(cls, a: Mapping[str, Any]) -> RaggedProblem:
        cache = a["kv_pages"]
        return RaggedProblem.from_arguments(a, cache, a["context_lens"], cache.shape[2] // 2)

    @classmethod
    def stage_operands(cls, arrays: Mapping[str, Any], problem: RaggedProblem) -> dict[str, Any]:
        """Returns the operands of the first stage."""
        operands = {
            "q": arrays["queries"],
            "k": arrays["kv_pages"],
            "lens": arrays["context_lens"],
            "tables": arrays["block_tables"],
            "starts": arrays["query_start_loc"],
            "valid": arrays["num_seqs"].reshape(1),
            **cls.plan_operands(arrays),
            **tree_operands(arrays),
        }
        return in_order(operands | broadcast_operands(arrays))

    @classmethod
    def samples(cls, a: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Returns samples that use all rows of the table."""
        return super().samples(a, rng) | {"num_seqs": np.int32(a["block_tables"].shape[0])}
