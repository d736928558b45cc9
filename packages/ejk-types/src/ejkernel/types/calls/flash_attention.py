"""The call of flash_attention."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ejkernel.types import mods
from ejkernel.types.attention.problem import Problem
from ejkernel.types.calls import scaled_operands
from ejkernel.types.calls.canonicalize import Arguments
from ejkernel.types.calls.distributed import shift_mods
from ejkernel.types.calls.softmax import SoftmaxCall
from ejkernel.types.calls.words import Array, AttentionMask, F, I, Key, Quantized
from ejkernel.types.masks.mask_info import MaskInfo
from ejkernel.types.mod_blocks import known_block_size


class FlashAttention(SoftmaxCall):
    """Exact attention in linear memory."""

    name = "flash_attention"
    seeds = ("dropout_seed",)
    sequence_axes = ("q_len", "kv_len")

    @staticmethod
    def signature(
        query: Quantized[Array, "batch q_len heads head_dim"],
        key: Quantized[Array, "batch kv_len kv_heads head_dim"],
        value: Quantized[Array, "batch kv_len kv_heads v_dim"],
        bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
        cum_seqlens_q: I[Array, " sequences_plus_1"] | None = None,
        cum_seqlens_k: I[Array, " sequences_plus_1"] | None = None,
        softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
        *,
        mask_info: MaskInfo | None = None,
        attention_mask: AttentionMask | None = None,
        softmax_scale: float | None = None,
        dropout_prob: float = 0.0,
        dropout_seed: int | I[Array, ""] | Key[Array, ""] | None = None,
        causal: bool = False,
        causal_offset: int = 0,
        sliding_window: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        return_lse: bool = False,
        precision: jax.lax.PrecisionLike = None,
        logits_dtype: DTypeLike = jnp.float32,
        score_mod: Callable[..., Any] | None = None,
        mask_mod: Callable[..., Any] | None = None,
        q_scale: float
        | F[Array, ""]
        | F[Array, "#batch #heads"]
        | F[Array, "batch heads q_blocks"]
        | None = None,
        k_scale: float
        | F[Array, ""]
        | F[Array, "#batch #kv_heads"]
        | F[Array, "batch kv_heads kv_blocks"]
        | None = None,
        v_scale: float | F[Array, ""] | F[Array, "#batch #kv_heads"] | None = None,
        out_dtype: DTypeLike | None = None,
    ) -> None: ...

    @classmethod
    def canonicalize(cls, a: Arguments) -> None:
        super().canonicalize(a)
        scaled_operands.canonicalize_scales(a)

    @classmethod
    def constant_arguments(cls, a: Mapping[str, Any]) -> Mapping[str, str]:
        """All arrays of a call of 8-bit operands, which is for inference."""
        if a["query"].dtype != scaled_operands.FLOAT8:
            return {}
        return dict.fromkeys(cls.array_arguments(a), scaled_operands.FORWARD_ONLY)

    @classmethod
    def check_values(cls, a: Arguments) -> None:
        """Functions of a logit's indices become programs and the arrays they close over."""
        super().check_values(a)
        if a["score_mod"] is not None:
            a["score_mod"] = mods.trace_mod(mods.SCORE, a["score_mod"], _logits_dtype(a))
        if a["mask_mod"] is not None:
            a["mask_mod"] = mods.trace_mod(mods.MASK, a["mask_mod"])

    @classmethod
    def shares_sequence(cls, a: Mapping[str, Any]) -> bool:
        dtype, out_dtype = a["query"].dtype, a["out_dtype"]
        if dtype == scaled_operands.FLOAT8:
            return False
        if out_dtype is not None and np.dtype(out_dtype) != dtype:
            return False  # devices that share a sequence have outputs in the dtype of the queries
        for scale in (a["q_scale"], a["k_scale"]):
            if scale is not None and len(getattr(scale, "shape", ())) == 3:
                return False  # blocks count over all tokens
        return super().shares_sequence(a)

    @classmethod
    def problem(cls, a: Mapping[str, Any]) -> Problem:
        problem, out_dtype = super().problem(a), a["out_dtype"]
        if a["query"].dtype == scaled_operands.FLOAT8:
            counts = [1 if a[n] is None else a[n].shape[2] for n in ("q_scale", "k_scale")]
            out_dtype = scaled_operands.output_dtype(a["query"].dtype, out_dtype)
            problem = replace(problem, scale_blocks=tuple(counts))
        if out_dtype is not None:
            problem = replace(problem, out_dtype=np.dtype(out_dtype).name)
        return problem

    @classmethod
    def output_dtype(cls, a: Mapping[str, Any]) -> Any:
        return scaled_operands.output_dtype(a["query"].dtype, a["out_dtype"])

    @classmethod
    def mods_of(cls, a: Mapping[str, Any]) -> dict[str, Any]:
        score, mask = a["score_mod"], a["mask_mod"]
        if score is None and mask is None:
            return {}
        (batch, q_len, heads, _), kv_len = a["query"].shape, a["key"].shape[1]
        return {
            "score_mod": None if score is None else score.form,
            "mask_mod": None if mask is None else mask.form,
            "mask_mod_blocks": known_block_size(mask, q_len, kv_len, batch=batch, heads=heads),
        }

    @classmethod
    def other_operands(cls, a: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
        operands = super().other_operands(a, problem)
        if problem.is_eight_bit:
            operands |= _scales(a)
        if problem.score_mod is None and problem.mask_mod is None:
            return operands
        return operands | mods.leaves_of(a["score_mod"], a["mask_mod"])

    @classmethod
    def to_shard(cls, a: Arguments, shard: Any) -> None:
        super().to_shard(a, shard)
        shift_mods(a, shard)


def _scales(a: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scales of 8-bit operands for kernels, which always have all three."""
    operands = {}
    for name, data in scaled_operands.SCALES.items():
        batch, _, heads, _ = a[data].shape
        shape = (batch, heads) if name == "v_scale" else (batch, heads, 1)
        operands[name] = jnp.ones(shape, jnp.float32) if a[name] is None else a[name]
    return operands


def _logits_dtype(a: Arguments) -> np.dtype:
    """Returns the dtype of the scores that a score_mod gets."""
    wide = jax.config.jax_enable_x64  # ty: ignore[missing-attribute]
    dtypes = [a[name].dtype for name in ("query", "key", "value")]
    dtypes.append(np.dtype(a["logits_dtype"]))
    return np.dtype(np.float64 if wide and np.dtype(np.float64) in dtypes else np.float32)
