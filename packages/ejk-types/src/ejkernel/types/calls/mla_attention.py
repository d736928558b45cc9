"""The call of mla_attention."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ejkernel.types.calls import drawn, settle
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.calls.words import Array, F, Flags, I
from ejkernel.types.mask_info import MaskInfo


class FlashMLA(Call):
    """Multi-head latent attention for training and prefill."""

    name = "mla_attention"
    outputs = ("batch q_len heads v_dim", "batch q_len heads")
    asks_for_more = "return_lse"
    seeds = ("dropout_seed",)

    @staticmethod
    def takes(
        query: F[Array, "batch q_len heads q_dim"],
        key_value: F[Array, "batch kv_len latent"],
        w_kc: F[Array, "latent kv_heads nope_dim"],
        w_vc: F[Array, "latent kv_heads v_dim"],
        b_q: F[Array, "batch q_len rope_dim"] | None = None,
        b_k: F[Array, "batch kv_len rope_dim"] | None = None,
        cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
        *,
        mask_info: MaskInfo | None = None,
        attention_mask: Flags[Array, "#batch #heads #q_len #kv_len"]
        | Flags[Array, "#batch q_len kv_len"]
        | Flags[Array, "#batch kv_len"]
        | None = None,
        bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
        softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        causal_offset: int = 0,
        sliding_window: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        dropout_prob: float = 0.0,
        dropout_seed: int | I[Array, ""] | None = None,
        return_lse: bool = False,
    ) -> None: ...

    @staticmethod
    def check_values(a: Arguments) -> None:
        settle.check_packed(a, "cu_seqlens", "query", axis=1)

    @staticmethod
    def canonicalise(a: Arguments) -> None:
        settle.latent(a)
        settle.softmax_options(a)
        settle.dropout(a)
        settle.sinks(a)
        settle.masks(a)

    @classmethod
    def samples(cls, a: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Sequences of equal length."""
        cu, names = a["cu_seqlens"], ("query", "key_value", "w_kc", "w_vc", "b_q", "b_k", "bias")
        found = drawn.normal(a, rng, *names, "softmax_aux")
        if cu is not None:
            found["cu_seqlens"] = drawn.starts(cu.shape[0] - 1, a["query"].shape[1])
        return found
