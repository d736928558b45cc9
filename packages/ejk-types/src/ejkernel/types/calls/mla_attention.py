"""The call of mla_attention."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from ejkernel.types.arrays import result_dtype
from ejkernel.types.attention.problem import Problem
from ejkernel.types.calls import canonicalize
from ejkernel.types.calls.softmax import SoftmaxCall
from ejkernel.types.calls.spec import Arguments
from ejkernel.types.calls.words import Array, AttentionMask, F, I, Key, invalid
from ejkernel.types.masks.mask_info import MaskInfo

Struct = jax.ShapeDtypeStruct
LATENT = ("query", "key_value", "w_kc", "w_vc", "b_q", "b_k")


class FlashMLA(SoftmaxCall):
    """Multi-head latent attention for training and prefill.

    Its problem is the problem of flash attention on the expanded keys and values. A kernel gets
    query, key_value, w_kc, w_vc and, where the call has them, b_q and b_k unchanged, and the other
    operands as flash attention does (``ejkernel.types.attention.latent`` expands them).
    """

    name = "mla_attention"
    seeds = ("dropout_seed",)
    sequence_axes = ("q_len", "kv_len")
    normal_samples = True

    @staticmethod
    def signature(
        query: F[Array, "batch q_len heads q_dim"],
        key_value: F[Array, "batch kv_len latent"],
        w_kc: F[Array, "latent kv_heads nope_dim"],
        w_vc: F[Array, "latent kv_heads v_dim"],
        b_q: F[Array, "batch q_len rope_dim"] | None = None,
        b_k: F[Array, "batch kv_len rope_dim"] | None = None,
        cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
        *,
        mask_info: MaskInfo | None = None,
        attention_mask: AttentionMask | None = None,
        bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
        softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        causal_offset: int = 0,
        sliding_window: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        dropout_prob: float = 0.0,
        dropout_seed: int | I[Array, ""] | Key[Array, ""] | None = None,
        return_lse: bool = False,
    ) -> None: ...

    @classmethod
    def canonicalize(cls, a: Arguments) -> None:
        """Rotary forms, head groups and the default scale."""
        query, key_value, w_kc, b_q, b_k = (a[name] for name in (*LATENT[:3], *LATENT[4:]))
        heads, kv_heads, nope = query.shape[2], w_kc.shape[1], w_kc.shape[2]
        canonicalize.check_groups("w_kc", heads, kv_heads, w_kc)
        if b_q is not None and b_k is None:
            raise ValueError("b_q: given without b_k, expected both, b_k alone or neither")
        rope = 0 if b_k is None else b_k.shape[-1]
        want = nope + (rope if b_q is None else 0)
        if query.shape[-1] != want:
            parts = "nope_dim + rope_dim" if b_q is None and b_k is not None else "nope_dim"
            raise invalid("query", f"last axis {want} = {parts}", query)
        if a["softmax_scale"] is None:
            a["softmax_scale"] = float(max(nope + rope, 1)) ** -0.5
        super().canonicalize(a)
        if a["cu_seqlens"] is not None and query.shape[1] != key_value.shape[1]:
            legal = f"kv_len equal to q_len {query.shape[1]} with cu_seqlens"
            raise invalid("key_value", legal, key_value)

    @staticmethod
    def _expanded(a: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of flash attention; expanded arrays are abstract."""
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
        latent = {name: a[name] for name in LATENT if a[name] is not None}
        return latent | cls.other_operands(cls._expanded(a), problem)

    @classmethod
    def empty_outputs(cls, a: Mapping[str, Any], problem: Problem) -> tuple[Any, ...] | None:
        return super().empty_outputs(cls._expanded(a), problem)
