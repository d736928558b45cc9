"""The call of mla_attention."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ejkernel.types.arrays import result_dtype
from ejkernel.types.calls import drawn, settle
from ejkernel.types.calls.softmax import SoftmaxCall
from ejkernel.types.calls.spec import Arguments
from ejkernel.types.calls.words import Array, F, Flags, I
from ejkernel.types.mask_info import MaskInfo
from ejkernel.types.problem import Problem

Struct = jax.ShapeDtypeStruct


class FlashMLA(SoftmaxCall):
    """Multi-head latent attention for training and prefill.

    Its facts are those of flash attention on what it expands to; a kernel gets query, key_value,
    w_kc, w_vc, b_q and b_k as they are, those given, and the rest as flash attention does
    (``ejkernel.types.latent`` is the way from one to the other).
    """

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

    @staticmethod
    def _expanded(a: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of flash attention, abstract where they are made."""
        q, latent, w_kc, w_vc, b_k = (
            a[name] for name in ("query", "key_value", "w_kc", "w_vc", "b_k")
        )
        rope = 0 if b_k is None else b_k.shape[-1]
        heads, (batch, kv_len, _) = w_kc.shape[1], latent.shape
        dims = {"key": w_kc.shape[2] + rope, "value": w_vc.shape[2]}
        weights = {"key": w_kc, "value": w_vc}
        made = {
            name: Struct((batch, kv_len, heads, dim), result_dtype(latent, weights[name]))
            for name, dim in dims.items()
        }
        made["query"] = Struct((*q.shape[:3], dims["key"]), q.dtype)
        return {**a, **made, "cum_seqlens_q": a["cu_seqlens"]}

    @classmethod
    def problem(cls, a: Mapping[str, Any]) -> Problem:
        return super().problem(cls._expanded(a))

    @staticmethod
    def read_mask(a: Mapping[str, Any], read: Callable[[MaskInfo], Any]) -> Any:
        return SoftmaxCall.read_mask(FlashMLA._expanded(a), read)

    @classmethod
    def operands(cls, a: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
        own = {name: a[name] for name in ("query", "key_value", "w_kc", "w_vc", "b_q", "b_k")}
        given = {name: x for name, x in own.items() if x is not None}
        return given | cls.beside(cls._expanded(a), problem)

    @classmethod
    def without_work(cls, a: Mapping[str, Any], problem: Problem) -> tuple[Any, ...] | None:
        return super().without_work(cls._expanded(a), problem)

    @classmethod
    def samples(cls, a: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Sequences of equal length."""
        cu, names = a["cu_seqlens"], ("query", "key_value", "w_kc", "w_vc", "b_q", "b_k", "bias")
        found = drawn.normal(a, rng, *names, "softmax_aux")
        if cu is not None:
            found["cu_seqlens"] = drawn.starts(cu.shape[0] - 1, a["query"].shape[1])
        return found
