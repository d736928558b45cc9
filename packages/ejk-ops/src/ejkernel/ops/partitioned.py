"""A kernel whose passes the compiler may partition: each device runs them on its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.differentiate import Arrays, Work, differentiable, same_axes
from ejkernel.ops.partition import Words, run_region


class PartitionedKernel:
    """The kernel of one call, each of its passes a region of the call's canonical arguments.

    It is differentiated in place of the kernel. Tiles are those of the unsharded call. Arrays of
    NumPy stay constants, from which a kernel may read which blocks a mask shows.

    Attributes:
        arrays: all other arrays of the call, by the names under which they are differentiated.
    """

    forward_again = False

    def __init__(self, kernel: Any, arguments: Mapping[str, Any]) -> None:
        self.kernel, self.call = kernel, kernel.call
        self.rule = self.call.sharding_rule(arguments)
        self._arguments = dict(arguments)
        self._axes: dict[str, list[tuple[str, ...]]] = self.call.array_axes(arguments)
        self._leaves, self._tree = jax.tree.flatten([arguments[name] for name in self._axes])
        axes = [words for argument in self._axes.values() for words in argument]
        shapes = [x.shape for x in self._leaves]
        self._words = list(map(self.rule.words, axes, shapes))
        # zeros in front, as JAX flattens dicts in the order of their keys
        names = [f"{i:03}" for i in range(len(self._leaves))]
        self.arrays: Arrays = {
            n: x for n, x in zip(names, self._leaves, strict=True) if not isinstance(x, np.ndarray)
        }
        self._places = [int(name) for name in self.arrays]
        self._passed: Any = None

    def __repr__(self) -> str:
        return f"partitioned {self.kernel!r}"

    def run(self, work: Work) -> tuple[jax.Array, ...]:
        """Returns the outputs of ``forward``, with gradients."""
        return differentiable(replace(work, kernel=self), same_axes(self.arrays))

    # ---- the passes -------------------------------------------------------------------------

    def without_gradients(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        """The forward pass of a call that nobody differentiates."""
        run = getattr(self.kernel, "without_gradients", self.kernel.forward)
        return self._forward(lambda *given: (run(*given)[0], ()), work, arrays)

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        """The outputs, and what else ``backward`` reads."""
        if not self.kernel.has_backward:
            return self.without_gradients(work, arrays)
        return self._forward(self.kernel.forward, work, arrays)

    def _forward(
        self, forward: Callable[..., Any], work: Work, arrays: Arrays
    ) -> tuple[tuple[Any, ...], Any]:
        def run(shard: Any, *leaves: Any) -> tuple[Any, ...]:
            local = self._local_work(work, shard, leaves)
            outputs, saved = forward(local, self._operands(local, shard, leaves))
            flat, self._passed = jax.tree.flatten((tuple(outputs), saved))
            return tuple(flat)

        found = run_region(
            run, list(arrays.values()), self._words_of_arrays, self._words_of_results, self.rule
        )
        return jax.tree.unflatten(self._passed, found)

    def backward(
        self,
        work: Work,
        arrays: Arrays,
        outputs: tuple[Any, ...],
        saved: Any,
        cotangents: tuple[Any, ...],
    ) -> Mapping[str, Any]:
        """Gradients of the arrays of floats."""
        passed, tree = jax.tree.flatten((outputs, saved))
        smooth = [i for i, x in enumerate(arrays.values()) if _is_smooth(x)]
        count = len(arrays), len(arrays) + len(passed)

        def run(shard: Any, *given: Any) -> tuple[Any, ...]:
            leaves, cotangents = given[: count[0]], given[count[1] :]
            local = self._local_work(work, shard, leaves)
            outputs, saved = jax.tree.unflatten(tree, given[count[0] : count[1]])

            def operands(*floats: Any) -> tuple[Arrays, Arrays]:
                changed = list(leaves)
                for i, x in zip(smooth, floats, strict=True):
                    changed[i] = x
                return _split(self._operands(local, shard, changed))

            floats = [leaves[i] for i in smooth]
            if not self.kernel.has_backward:
                run = lambda *floats: self.kernel.forward(local, _joined(operands(*floats)))[0]
                return jax.vjp(run, *floats)[1](tuple(cotangents))
            differentiated, pull, others = jax.vjp(operands, *floats, has_aux=True)
            found = self.kernel.backward(
                local, differentiated | others, outputs, saved, tuple(cotangents)
            )
            return pull({name: _gradient(found, name, x) for name, x in differentiated.items()})

        words = self._words_of_arrays
        names = [name for i, name in enumerate(arrays) if i in smooth]
        of_outputs = self._words_of_results([*passed])
        found = run_region(
            run,
            [*arrays.values(), *passed, *cotangents],
            [*words, *of_outputs, *of_outputs[: len(cotangents)]],
            lambda _: [words[i] for i in smooth],
            self.rule,
            summed=True,
        )
        return dict(zip(names, found, strict=True))

    # ---- the call of one device -------------------------------------------------------------

    def _local_work(self, work: Work, shard: Any, leaves: Sequence[Any]) -> Work:
        problem = self.kernel.problem(self._local_arguments(shard, leaves))
        return replace(work, kernel=self.kernel, problem=problem, fallback=None)

    def _operands(self, work: Work, shard: Any, leaves: Sequence[Any]) -> Arrays:
        operands = self.kernel.operands(self._local_arguments(shard, leaves), work.problem)
        arrays = {name: x for name, x in operands.items() if x is not None}
        return same_axes(self.kernel.precompute(work, arrays))

    def _local_arguments(self, shard: Any, leaves: Sequence[Any]) -> dict[str, Any]:
        """The canonical arguments on one shard, or with all of their arrays."""
        every = list(self._leaves)
        for i, x in zip(self._places, leaves, strict=True):
            every[i] = x
        if shard is not None:
            for i in set(range(len(every))).difference(self._places):
                every[i] = _part(every[i], self._words[i], shard)
        arrays = jax.tree.unflatten(self._tree, every)
        a = self._arguments | dict(zip(self._axes, arrays, strict=True))
        if shard is not None:
            single = {name: words[0] for name, words in self._axes.items() if len(words) == 1}
            shard.pick_key_heads(a, single)
            self.call.to_shard(a, shard)
        return a

    # ---- words ------------------------------------------------------------------------------

    @property
    def _words_of_arrays(self) -> list[Words]:
        return [self._words[i] for i in self._places]

    def _words_of_results(self, found: Sequence[Any]) -> list[Words]:
        """The words of the arrays that the forward pass gives: its outputs, and what it saves."""
        outputs = [self._named(axes) for axes in self.kernel.forward_axes(self._arguments)]
        count = self._passed.children()[0].num_leaves
        saved = tuple(self.kernel.saved_axes.split())
        words = []
        for i, x in enumerate(found):
            axes = outputs[i] if i < count else saved
            alike = len(axes) == len(x.shape)
            words.append(self.rule.words(axes, x.shape) if alike else ("",) * len(x.shape))
        return words

    def _named(self, axes: str) -> tuple[str, ...]:
        """The words of an output, which may be those of an argument."""
        return self._axes[axes[1:]][0] if axes.startswith("=") else tuple(axes.split())


def _is_smooth(x: Any) -> bool:
    """Returns whether an array has gradients; 8-bit floats have none."""
    return jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize > 1


def _split(arrays: Arrays) -> tuple[Arrays, Arrays]:
    """The arrays of floats, and all others."""
    smooth = {n for n, x in arrays.items() if hasattr(x, "dtype") and _is_smooth(x)}
    return (
        {name: x for name, x in arrays.items() if name in smooth},
        {name: x for name, x in arrays.items() if name not in smooth},
    )


def _joined(arrays: tuple[Arrays, Arrays]) -> Arrays:
    return arrays[0] | arrays[1]


def _gradient(found: Mapping[str, Any], name: str, x: jax.Array) -> jax.Array:
    """A gradient by name in the dtype of its array, zero where there is none."""
    gradient = found.get(name)
    return jnp.zeros_like(x) if gradient is None else gradient.astype(x.dtype)


def _part(x: np.ndarray, words: Words, shard: Any) -> Any:
    """The part of a constant that belongs to a shard."""
    for axis, word in enumerate(words):
        if word and shard.parts(word) > 1:
            size = x.shape[axis] // shard.parts(word)
            x = jax.lax.dynamic_slice_in_dim(jnp.asarray(x), shard.index(word) * size, size, axis)
    return x
