"""Stages of decoding over a cache: partial results of every split, and their merge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ejkernel.kernels.triton.bridge import call_plan
from ejkernel.kernels.triton.kernel import TritonKernel
from ejkernel.kernels.triton.launch import shapes_of
from ejkernel.kernels.triton.page_attention.plans import MergePlan, SplitPlan
from ejkernel.kernels.triton.page_attention.tiles import share_count
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.stages import Stage, StagedKernel
from ejkernel.ops.xla_gradients import XlaGradients

PARTIAL = ("acc", "m", "l", "starts")  # partial results, and the first work unit of each sequence
ONLY_MERGED = ("v_scale", "sink")  # operands that only the merge reads


def decode(work: Work, arrays: Arrays) -> Arrays:
    """Returns partial results of every split, or the output where each sequence has one split."""
    p, t, shares = work.problem, work.tiles, _share_count(work)
    plan = SplitPlan(p, t, shares, shapes_of(arrays))
    if plan.direct:
        return {"o": call_plan(plan, *arrays.values())[0]}
    read = {name: x for name, x in arrays.items() if name not in ONLY_MERGED}
    partial = call_plan(SplitPlan(p, t, shares, shapes_of(read)), *read.values())
    return dict(zip(PARTIAL, partial, strict=False))


def merge(work: Work, arrays: Arrays) -> Arrays:
    """Returns the output of partial results, and the log-sum-exp if the call returns it."""
    if "o" in arrays:
        return {}
    read = {name: arrays[name] for name in (*PARTIAL, *ONLY_MERGED) if name in arrays}
    plan = MergePlan(work.problem, work.tiles, _share_count(work), shapes_of(read))
    return dict(zip(("o", "lse"), call_plan(plan, *read.values()), strict=False))


def _share_count(work: Work) -> int:
    p, t = work.problem, work.tiles
    return t.splits * p.batch if t.splits else share_count(p, t, work.target)


class CacheKernel(XlaGradients, TritonKernel, StagedKernel):
    """A kernel over a cache, differentiated by the XLA kernel of its operation."""


class DecodeKernel(CacheKernel):
    """A kernel of the newest tokens of each sequence over a cache."""

    stages: ClassVar[Mapping[str, Stage]] = {"decode": decode, "merge": merge}
