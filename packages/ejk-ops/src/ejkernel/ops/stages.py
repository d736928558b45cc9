"""Kernels as pipelines of named stages, which may belong to several kernel packages.

A stage is one step of a call (``schedule``, ``decode``, ``merge``): a function of the work and of
the arrays so far, by name, that returns the arrays it adds. A ``StagedKernel`` runs its stages in
order. A ``ComposedKernel`` takes the stages of another package's kernel and replaces some of them,
so that neither package calls the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import jax
from jax.custom_batching import custom_vmap

from ejkernel.ops.call_kernel import CallKernel
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.errors import KernelNotFound, KernelNotSupported
from ejkernel.ops.execution.program_cache import PROGRAMS_LIMIT
from ejkernel.ops.kernel_registry import kernel_registry
from ejkernel.ops.sequential_vmap import sequential_vmap

Stage = Callable[[Work, Arrays], Arrays]


class StagedKernel(CallKernel):
    """A kernel whose forward pass is a pipeline of stages.

    Its ``call`` says what all stages of all packages agree on: ``stage_operands``, the arrays that
    the first stage gets; ``stage_outputs``, the names of the arrays that the last stage leaves;
    ``outputs_of_stages``, the outputs of the call from these; ``fold_batch``, how calls mapped by
    ``jax.vmap`` become one.
    """

    stages: ClassVar[Mapping[str, Stage]]
    """The stages by name, in the order in which they run."""

    def stage_functions(self) -> Mapping[str, Stage]:
        """Returns the stages that run, by name and in order."""
        return self.stages

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        operands = self.call.stage_operands(arrays, work.problem)
        outputs = run_stages(work, operands)
        return self.call.outputs_of_stages(arrays, work.problem, outputs), ()

    def run_stage(self, name: str, work: Work, arrays: Arrays) -> Arrays:
        """Returns the arrays of one stage, for kernels whose passes are stages by themselves."""
        return self.stage_functions()[name](work, arrays)


def run_stages(work: Work, operands: Arrays) -> tuple[jax.Array, ...]:
    """Runs the stages of ``work.kernel``; returns the arrays named by ``stage_outputs``."""
    return fold_mapped(_run_pipeline, work, operands)


def _run_pipeline(work: Work, arrays: Arrays) -> tuple[jax.Array, ...]:
    for stage in work.kernel.stage_functions().values():
        arrays = arrays | stage(work, arrays)
    return tuple(arrays[name] for name in work.kernel.call.stage_outputs(work.problem))


Pipeline = Callable[[Work, Arrays], tuple[jax.Array, ...]]


def fold_mapped(run: Pipeline, work: Work, operands: Arrays) -> tuple[jax.Array, ...]:
    """Returns ``run(work, operands)``; under ``jax.vmap`` as ``fold_batch`` of the call has it."""
    return _foldable(run, work, tuple(operands))(*operands.values())


@functools.lru_cache(maxsize=PROGRAMS_LIMIT)
def _foldable(
    run: Pipeline, work: Work, names: tuple[str, ...]
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns ``run`` as a function of the arrays of these names, with a rule for ``jax.vmap``."""
    mapped = custom_vmap(lambda *operands: run(work, dict(zip(names, operands, strict=True))))

    @mapped.def_vmap
    def rule(size: int, is_batched: Any, *operands: Any) -> tuple[Any, Any]:
        flags = [any(jax.tree.leaves(flag)) for flag in is_batched]
        arrays, batched = (dict(zip(names, x, strict=True)) for x in (operands, flags))
        folded = work.kernel.call.fold_batch(work.problem, size, arrays, batched)
        if folded is None:
            outputs = sequential_vmap(mapped, operands, flags)
        else:
            problem, arrays = folded
            outputs = fold_mapped(run, replace(work, problem=problem), arrays)
            outputs = tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in outputs)
        return outputs, tuple(True for _ in outputs)

    return mapped


class ComposedKernel(StagedKernel):
    """A kernel with the stages of another backend's kernel, some of them replaced.

    The other kernel, ``base``, is found through the registry. It defines the problem of a call, and
    supports and tiles its stages. An argument is read only if both kernels read it.
    """

    base_platform: ClassVar[str]

    @cached_property
    def base(self) -> Any:
        """The kernel whose stages run where this one has none.

        Raises:
            KernelNotFound, KernelNotSupported: it is not installed, or cannot run here.
        """
        return kernel_registry.get(self.call.name, self.base_platform)

    def stage_functions(self) -> Mapping[str, Stage]:
        return {**self.base.stages, **self.stages}

    def replaces(self, stage: str, problem: Any) -> bool:
        """Returns whether a stage of this kernel can do a problem; else the base does it."""
        return True

    def run_stage(self, name: str, work: Work, arrays: Arrays) -> Arrays:
        has_stage = name in self.stages and self.replaces(name, work.problem)
        return (self if has_stage else self.base).stages[name](work, arrays)

    def unavailable_reason(self) -> str | None:
        reason = super().unavailable_reason()
        if reason is None:
            try:
                reason = self.base.unavailable_reason()
            except (KernelNotFound, KernelNotSupported) as error:
                reason = f"some stages belong to the {self.base_platform} kernels: {error}"
        return reason

    def target(self) -> Any:
        return self.base.target()

    def unread_argument(self, a: Mapping[str, Any]) -> str | None:
        return super().unread_argument(a) or self.base.unread_argument(a)

    def problem(self, a: Mapping[str, Any]) -> Any:
        return self.base.problem(a)

    def operands(self, a: Mapping[str, Any], problem: Any) -> Arrays:
        return self.base.operands(a, problem)

    def unsupported_reason(self, problem: Any, target: Any) -> str | None:
        return self.base.unsupported_reason(problem, target)

    def choose(self, problem: Any, target: Any) -> Any:
        return self.base.choose(problem, target)

    def neighbours(self, problem: Any, target: Any, chosen: Any) -> Iterable[Any]:
        return self.base.neighbours(problem, target, chosen)

    def apply_config(self, chosen: Any, cfg: Any, problem: Any, target: Any) -> Any:
        return self.base.apply_config(chosen, cfg, problem, target)
