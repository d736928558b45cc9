"""Calls of flash-type attention: problem, arrays and results of their kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax

from ejkernel.types.arrays import result_dtype
from ejkernel.types.attention import operands as arg
from ejkernel.types.attention import softmax
from ejkernel.types.attention.problem import Problem
from ejkernel.types.calls import canonicalize
from ejkernel.types.calls.spec import Call
from ejkernel.types.masks.combine import mask_of
from ejkernel.types.masks.mask_info import MaskInfo
from ejkernel.types.masks.structure import Rules, split_mask

QKV = {"q": "query", "k": "key", "v": "value"}
_MASKS = ("mask_info", "attention_mask", "cum_seqlens_q", "cum_seqlens_k")


def _packed(a: Mapping[str, Any]) -> bool:
    """Returns whether the mask has yet to be joined with cumulative lengths."""
    return a.get("cum_seqlens_q") is not None


def _rules(mask: MaskInfo) -> Rules:
    return split_mask(mask)[0]


class AttentionCall(Call):
    """A call whose kernel saves a logsumexp per row."""

    outputs = ("batch q_len heads v_dim", "batch q_len heads")

    @classmethod
    def name_residuals(cls, outputs: tuple[Any, ...], saved: Any) -> tuple[tuple[Any, ...], Any]:
        return softmax.name_residuals(*outputs), softmax.name_lse(saved)


class SoftmaxCall(AttentionCall):
    """A call of query, key, value and a mask.

    A kernel gets q, k, v in one dtype and, where the call has them, bias ``[#b, #h, q, k]``, sink
    float32 ``[1, h]`` (all sinks of a head as one logit), mask (a MaskInfo) and seed int32
    ``[1, 3]``; it gives o ``[b, q, h, dv]`` and the natural lse float32 ``[b, h, q]``.
    """

    merged: ClassVar[Mapping[str, str]] = {**canonicalize.MERGED_MASKS, "init_bias": "bias"}

    @classmethod
    def distributed_axes(cls, a: Any) -> Mapping[str, str]:
        # where devices share a sequence, a bias has the keys of all of them
        return {"bias": "#batch #heads #q_len kv_total"} if cls.sequence_axes else {}

    @classmethod
    def forward_axes(cls, a: Mapping[str, Any], count: int) -> tuple[str, ...]:
        return ("batch q_len heads v_dim", "batch heads q_len")

    @classmethod
    def problem(cls, a: Mapping[str, Any]) -> Problem:
        q, k, v = a["query"], a["key"], a["value"]
        packed = a.get("cum_seqlens_q") is not None
        return Problem(
            batch=q.shape[0],
            q_len=q.shape[1],
            kv_len=k.shape[1],
            heads=q.shape[2],
            kv_heads=k.shape[2],
            dim=q.shape[3],
            value_dim=v.shape[3],
            dtype=result_dtype(q.dtype, k.dtype, v.dtype).name,
            scale=a["softmax_scale"],
            soft_cap=a.get("logits_soft_cap"),
            dropout=float(a.get("dropout_prob") or 0.0),
            biased=a.get("bias") is not None,
            **cls.mods_of(a),
            seed_batches=max(q.shape[0], 1),
            rules=cls.read_mask(a, _rules) if packed else split_mask(a["mask_info"])[0],
        )

    @classmethod
    def mods_of(cls, a: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of the problem for the functions of a call, if it takes any."""
        return {}

    @staticmethod
    def read_mask(a: Mapping[str, Any], read: Callable[[MaskInfo], Any]) -> Any:
        """Returns the result of ``read`` on the mask, from shapes alone. May raise Unsupported."""
        packed = _packed(a)
        arrays = {name: a.get(name) for name in _MASKS} if packed else a["mask_info"]
        if not jax.tree.leaves(arrays):
            return read(a["mask_info"])
        results: list[Any] = []

        def probe(arrays: Any) -> None:
            results.append(read(mask_of({**a, **arrays}) if packed else arrays))

        jax.eval_shape(probe, arrays)
        return results[0]

    @classmethod
    def operands(cls, a: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
        qkv = {letter: a[name].astype(problem.dtype) for letter, name in QKV.items()}
        return qkv | cls.other_operands(a, problem)

    @classmethod
    def other_operands(cls, a: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
        """Returns the operands of a kernel other than q, k and v."""
        return {
            "bias": arg.bias_of_rows(a.get("bias"), problem.q_len),
            "sink": arg.sink_logit(a.get("softmax_aux")),
            "mask": mask_of(a) if _packed(a) else a["mask_info"],
            "seed": arg.seed_words(a.get("dropout_seed")) if problem.dropout > 0.0 else None,
        }

    @classmethod
    def empty_outputs(cls, a: Mapping[str, Any], problem: Problem) -> tuple[Any, ...] | None:
        nothing = softmax.empty_outputs(a["query"], a["key"], a["value"])
        return None if nothing is None else (nothing[0], nothing[1].swapaxes(1, 2))

    @classmethod
    def output_dtype(cls, a: Mapping[str, Any]) -> Any:
        """Returns the dtype of o."""
        return a["query"].dtype

    @classmethod
    def results(cls, a: Mapping[str, Any], outputs: tuple[Any, ...]) -> Any:
        o, lse = outputs
        o = o.astype(cls.output_dtype(a))
        return (o, lse.swapaxes(1, 2)) if a.get("return_lse") else o
