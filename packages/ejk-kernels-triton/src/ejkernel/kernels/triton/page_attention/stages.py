"""Stages of decoding over a cache: partial results of every split, and their merge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.kernel import TritonKernel
from ejkernel.kernels.triton.page_attention.tiles import share_count
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.stages import Stage, StagedKernel
from ejkernel.ops.xla_gradients import XlaGradients

ONLY_MERGED = ("v_scale", "sink")  # operands that only the merge reads


def decode(work: Work, arrays: Arrays) -> Arrays:
    """Returns partial results of every split, or the output where each sequence has one split."""
    from ejkernel.kernels.triton.page_attention.split_kernel import PagedSplit

    launch = PagedSplit(work.problem, work.tiles, _share_count(work))
    if launch.direct:
        return call(launch, **arrays)
    return call(launch, **{name: x for name, x in arrays.items() if name not in ONLY_MERGED})


def merge(work: Work, arrays: Arrays) -> Arrays:
    """Returns the output of partial results, and the log-sum-exp if the call returns it."""
    from ejkernel.kernels.triton.page_attention.merge_kernel import PagedMerge

    if "o" in arrays:
        return {}
    launch = PagedMerge(work.problem, work.tiles, _share_count(work))
    merged = call(launch, **{n: arrays[n] for n in launch.batching if n in arrays})
    return {"o": merged["o"], **({"lse": merged["lse_out"]} if "lse_out" in merged else {})}


def _share_count(work: Work) -> int:
    p, t = work.problem, work.tiles
    return t.splits * p.batch if t.splits else share_count(p, t, work.target)


class CacheKernel(XlaGradients, TritonKernel, StagedKernel):
    """A kernel over a cache, differentiated by the XLA kernel of its operation."""


class DecodeKernel(CacheKernel):
    """A kernel of the newest tokens of each sequence over a cache."""

    stages: ClassVar[Mapping[str, Stage]] = {"decode": decode, "merge": merge}
