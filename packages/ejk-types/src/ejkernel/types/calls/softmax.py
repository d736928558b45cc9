"""What the calls of flash-type attention leave to a kernel: facts, arrays, results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types import attention as arg
from ejkernel.types import softmax
from ejkernel.types.call import mask_of, problem_of, read_mask
from ejkernel.types.calls import drawn
from ejkernel.types.calls.spec import Call
from ejkernel.types.mask_info import MaskInfo
from ejkernel.types.problem import Problem
from ejkernel.types.structure import split_mask

QKV = {"q": "query", "k": "key", "v": "value"}


def _packed(a: Mapping[str, Any]) -> bool:
    """Whether the mask has yet to be joined with cumulative lengths."""
    return a.get("cum_seqlens_q") is not None


class SoftmaxCall(Call):
    """A call of query, key, value and a mask.

    A kernel gets q, k, v in one dtype and, where the call has them, bias ``[#b, #h, q, k]``, sink
    float32 ``[1, h]`` (all sinks of a head as one logit), mask (a MaskInfo) and seed int32
    ``[1, 3]``; it gives o ``[b, q, h, dv]`` and the natural lse float32 ``[b, h, q]``.
    """

    @classmethod
    def problem(cls, a: Mapping[str, Any]) -> Problem:
        return problem_of(
            a,
            dropout=float(a.get("dropout_prob") or 0.0),
            biased=a.get("bias") is not None,
            seed_batches=max(a["query"].shape[0], 1),
            logits_dtype=jnp.dtype(a.get("logits_dtype", "float32")).name,
            rules=cls.read_mask(a, lambda mask: split_mask(mask)[0]),
        )

    @staticmethod
    def read_mask(a: Mapping[str, Any], read: Callable[[MaskInfo], Any]) -> Any:
        """What ``read`` finds in the mask of a call, from shapes alone. May raise Unsupported."""
        mask = a["mask_info"]
        return read_mask(a, read) if _packed(a) or jax.tree.leaves(mask) else read(mask)

    @classmethod
    def operands(cls, a: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
        given = {letter: a[name].astype(problem.dtype) for letter, name in QKV.items()}
        return given | cls.beside(a, problem)

    @staticmethod
    def beside(a: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
        """What a kernel gets beside q, k and v."""
        given = {
            "bias": arg.bias_of_rows(a.get("bias"), problem.q_len),
            "sink": arg.sink_logit(a.get("softmax_aux")),
            "mask": mask_of(a) if _packed(a) else a["mask_info"],
            "seed": arg.seed_words(a.get("dropout_seed")) if problem.dropout > 0.0 else None,
        }
        return {name: x for name, x in given.items() if x is not None}

    @classmethod
    def without_work(cls, a: Mapping[str, Any], problem: Problem) -> tuple[Any, ...] | None:
        nothing = softmax.without_work(a["query"], a["key"], a["value"])
        return None if nothing is None else (nothing[0], nothing[1].swapaxes(1, 2))

    @classmethod
    def named(cls, outputs: tuple[Any, ...], saved: Any) -> tuple[tuple[Any, ...], Any]:
        return softmax.named(*outputs), softmax.named_lse(saved)

    @classmethod
    def results(cls, a: Mapping[str, Any], outputs: tuple[Any, ...]) -> Any:
        o, lse = outputs
        o = o.astype(a["query"].dtype)
        return (o, lse.swapaxes(1, 2)) if a.get("return_lse") else o

    @classmethod
    def samples(cls, a: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Packed calls: documents of equal length."""
        found = {}
        for name, array in (("cum_seqlens_q", "query"), ("cum_seqlens_k", "key")):
            if a.get(name) is not None:
                found[name] = drawn.starts(a[name].shape[0] - 1, a[array].shape[1])
        return found
