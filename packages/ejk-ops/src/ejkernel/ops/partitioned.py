"""A kernel whose passes the compiler may partition: each device runs them on its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.batch_invariance import batch_invariant
from ejkernel.ops.core.flat_tree import replace_at
from ejkernel.ops.core.keys import has_gradient
from ejkernel.ops.differentiate import Arrays, Work, differentiable, same_axes
from ejkernel.ops.partition import automatic_devices, run_region
from ejkernel.ops.region import Words


def run_partitioned(
    work: Work, arguments: Mapping[str, Any], cfg: Any = None
) -> tuple[jax.Array, ...]:
    """Returns the outputs of ``work.kernel.forward`` for canonical arguments, with gradients.

    ``cfg``: the config of the call, for devices that share a sequence.
    """
    if work.kernel.context is not None and work.kernel.shares_sequence(arguments):
        arguments = work.kernel.sharded_call.without_packing(arguments)
    kernel = PartitionedKernel(work.kernel, arguments, cfg)
    return differentiable(replace(work, kernel=kernel), same_axes(kernel.arrays_of(arguments)))


class PartitionedKernel:
    """The kernel of one call, each of its passes a region of the call's canonical arguments.

    It is differentiated in place of the kernel, with the tiles of the unsharded call. Arrays
    of NumPy stay constants, from which a kernel may read which blocks a mask shows.

    Attributes:
        rule: how the arrays of the call may be sharded.
    """

    def __init__(self, kernel: Any, arguments: Mapping[str, Any], cfg: Any = None) -> None:
        self.kernel, self.call, self.cfg = kernel, kernel.call, cfg
        self.forward_again = kernel.forward_again
        sequence = {"sequence": True} if kernel.shares_sequence(arguments) else {}
        self.rule = self.call.sharding_rule(arguments, **sequence)
        self._axes: dict[str, list[tuple[str, ...]]] = self.call.array_axes(arguments)
        leaves, self._tree = jax.tree.flatten([arguments[name] for name in self._axes])
        # types in place of arrays: the compiler asks when the trace of the call is over
        self._leaves = [x if isinstance(x, np.ndarray) else _type_of(x) for x in leaves]
        self._constants = {i for i, x in enumerate(leaves) if isinstance(x, np.ndarray)}
        self._arguments = {**arguments, **self._by_name(self._leaves)}
        axes = [words for several in self._axes.values() for words in several]
        shapes = [x.shape for x in leaves]
        self._words = list(map(self.rule.words, axes, shapes))
        # states that devices which share the sequence keep for the gradients: axes and types
        self._saved_states: list[tuple[str, Any]] = []
        devices = automatic_devices(leaves)
        if self.call.passes_states and self.rule.sequence and devices > 1:
            self._saved_states = self.call.saved_state_types(self._arguments, devices)

    def __repr__(self) -> str:
        return f"partitioned {self.kernel!r}"

    def arrays_of(self, arguments: Mapping[str, Any]) -> Arrays:
        """Returns the arrays of a call except the constants, by index."""
        leaves = jax.tree.leaves([arguments[name] for name in self._axes])
        # zeros in front, as JAX flattens dicts in the order of their keys
        return {f"{i:03}": x for i, x in enumerate(leaves) if i not in self._constants}

    # ---- the passes -------------------------------------------------------------------------

    def without_gradients(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        """The forward pass of a call that nobody differentiates."""

        def run(work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
            forward = getattr(work.kernel, "without_gradients", work.kernel.forward)
            return forward(work, arrays)[0], ()

        return self._run_forward(run, work, arrays, saves=False)

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        """The outputs, and the arrays that ``backward`` reads besides."""
        return self._run_forward(self._forward_of_gradient, work, arrays)

    def _forward_of_gradient(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        """Runs ``forward``; without a ``backward`` as JAX does where it differentiates it."""
        if self.kernel.has_backward:
            return work.kernel.forward(work, arrays)
        # JAX can differentiate this again
        floats, others = _split(arrays)
        outputs, _ = jax.vjp(lambda floats: work.kernel.forward(work, floats | others)[0], floats)
        return outputs, ()

    def _run_forward(
        self, forward: Callable[..., Any], work: Work, arrays: Arrays, *, saves: bool = True
    ) -> tuple[tuple[Any, ...], Any]:
        structures: list[Any] = []

        saved_states = self._saved_states if saves else []

        def run_pass(shard: Any, *leaves: Any) -> tuple[Any, ...]:
            a = self._local_arguments(shard, leaves)
            if self._passes_states(shard):
                _, outputs, types = structures[0]
                words = self._words_of_results(types, outputs, saves=saves)
                types = _parts_of(shard, types, words)
                return self._shared_results(shard, a, types, outputs, len(saved_states))
            local = self._local_work(work, shard, a)
            outputs, saved = forward(local, self._operands(local, a))
            # of devices that do not share the sequence, nobody reads the states
            states = [jnp.zeros(x.shape, x.dtype) for x in self._on_device(shard, saved_states)]
            flat, structure = jax.tree.flatten((tuple(outputs), (saved, states)))
            structures.append((structure, len(outputs), list(map(_type_of, flat))))
            return tuple(flat)

        results = run_region(
            run_pass,
            list(arrays.values()),
            self._words_of(arrays),
            lambda types: self._words_of_results(types, structures[0][1], saves=saves),
            self.rule,
        )
        return jax.tree.unflatten(structures[0][0], results)

    def backward(
        self,
        work: Work,
        arrays: Arrays,
        outputs: tuple[Any, ...],
        saved: Any,
        cotangents: tuple[Any, ...],
    ) -> Mapping[str, Any]:
        """Returns gradients of the arrays of floats; JAX makes them without a ``backward``."""
        results, structure = jax.tree.flatten((outputs, saved))
        smooth = [i for i, x in enumerate(arrays.values()) if has_gradient(x)]
        first, last = len(arrays), len(arrays) + len(results)

        def run_pass(shard: Any, *inputs: Any) -> tuple[Any, ...]:
            leaves, results, cotangents = inputs[:first], inputs[first:last], inputs[last:]

            def arguments_of(*floats: Any) -> dict[str, Any]:
                return self._local_arguments(shard, replace_at(leaves, smooth, floats))

            floats = [leaves[i] for i in smooth]
            if self._passes_states(shard):
                words = of_results[: len(outputs)]
                return self._shared_gradients(
                    shard, arguments_of, floats, results, cotangents, words
                )
            return self._local_gradients(
                self._local_work(work, shard, arguments_of(*floats)),
                arguments_of,
                floats,
                jax.tree.unflatten(structure, results),
                cotangents,
            )

        words = self._words_of(arrays)
        of_results = self._words_of_results(results, len(outputs))
        gradients = run_region(
            run_pass,
            [*arrays.values(), *results, *cotangents],
            [*words, *of_results, *of_results[: len(outputs)]],
            lambda _: [words[i] for i in smooth],
            self.rule,
            summed=True,
        )
        return dict(zip([list(arrays)[i] for i in smooth], gradients, strict=True))

    def _local_gradients(
        self,
        local: Work,
        arguments_of: Callable[..., Any],
        floats: Sequence[Any],
        results: Any,
        cotangents: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        """Returns gradients of ``floats`` where a device needs no states of others.

        Args:
            local: the call on this device.
            arguments_of: the arguments of that call for values of ``floats``.
            results: outputs, and (arrays that the forward pass saved, saved states).
            cotangents: of the outputs.
        """

        def operands(*floats: Any) -> Arrays:
            return self._operands(local, arguments_of(*floats))

        if not self.kernel.has_backward:
            _, pull = jax.vjp(
                lambda *floats: tuple(local.kernel.forward(local, operands(*floats))[0]), *floats
            )
            return pull(cotangents)
        outputs, (saved, _) = results
        of_floats, pull, others = jax.vjp(
            lambda *floats: _split(operands(*floats)), *floats, has_aux=True
        )
        gradients = local.kernel.backward(local, of_floats | others, outputs, saved, cotangents)
        return pull({name: _gradient(gradients, name, x) for name, x in of_floats.items()})

    # ---- devices that pass states on --------------------------------------------------------

    def _sequence_word(self, shard: Any) -> str:
        """Returns the word of the sequence that devices share, "" where each has all of it."""
        words = self.rule.sequence[:1] if shard is not None else ()
        return next((word for word in words if shard.parts(word) > 1), "")

    def _passes_states(self, shard: Any) -> bool:
        return self.call.passes_states and bool(self._sequence_word(shard))

    def _run_local(self, a: Mapping[str, Any]) -> Any:
        return self.kernel.run_canonical(cfg=self.cfg, **a)

    def _shared_results(
        self, shard: Any, a: Mapping[str, Any], types: Sequence[Any], outputs: int, states: int
    ) -> tuple[Any, ...]:
        """Returns the results of the forward pass on one device, which have these types.

        The first are ``outputs``, the last ``states``; what the kernel saves for its backward
        pass, between them, that pass computes, so it is zeros here.
        """
        first_state = len(types) - states
        saved = [jnp.zeros(x.shape, x.dtype) for x in types[outputs:first_state]]
        results, saved_states = self._shared_outputs(shard, a, types[:outputs], types[first_state:])
        return *results, *saved, *saved_states

    def _shared_gradients(
        self,
        shard: Any,
        arguments_of: Callable[..., Any],
        floats: Sequence[Any],
        results: Sequence[Any],
        cotangents: tuple[Any, ...],
        words: Sequence[Words],
    ) -> tuple[Any, ...]:
        """Returns gradients of ``floats`` on one of the devices that share a sequence.

        Args:
            arguments_of: the arguments of this device for values of ``floats``.
            results: of the forward pass on this device.
            cotangents, words: of the outputs.
        """
        if self._saved_states:
            states = results[-len(self._saved_states) :]
            return self.call.share_gradients(
                arguments_of, floats, shard, self._run_local, states, cotangents
            )
        types = list(map(_type_of, results[: len(words)]))
        # what devices have in common is a sum: each would count its cotangent again
        once = zip(cotangents, words, strict=True)
        cotangents = tuple(self._counted_once(shard, x, of_axes) for x, of_axes in once)

        def run(*floats: Any) -> tuple[Any, ...]:
            return self._shared_outputs(shard, arguments_of(*floats), types)[0]

        return jax.vjp(run, *floats)[1](cotangents)

    def _shared_outputs(
        self,
        shard: Any,
        a: Mapping[str, Any],
        types: Sequence[Any],
        saved_states: Sequence[Any] = (),
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the outputs of ``forward`` on one device, and the states that it saves.

        Outputs that the call does not request are zeros.

        Args:
            types, saved_states: the types of both on this device.
        """
        states: tuple[Any, ...] = ()
        if saved_states:
            outputs, states = self.call.share_and_save(a, shard, self._run_local, saved_states)
        else:
            outputs = self.call.share_sequence(a, shard, self._run_local)
        shaped = [x.reshape(t.shape) for x, t in zip(outputs, types, strict=False)]
        return (*shaped, *(jnp.zeros(t.shape, t.dtype) for t in types[len(shaped) :])), states

    def _on_device(self, shard: Any, saved_states: Sequence[tuple[str, Any]]) -> list[Any]:
        """Returns the types of saved states on one device; without a shard, of the whole call."""
        types = [kind for _, kind in saved_states]
        if shard is None:
            return types
        words = [self.rule.words(axes.split(), kind.shape) for axes, kind in saved_states]
        return _parts_of(shard, types, words)

    def _counted_once(self, shard: Any, x: jax.Array, words: Words) -> jax.Array:
        """Returns zeros in place of an array that other devices of the sequence have as well."""
        word = self._sequence_word(shard)
        return x if word in words else jnp.where(shard.index(word) == 0, x, 0)

    # ---- the call of one device -------------------------------------------------------------

    def _local_arguments(self, shard: Any, leaves: Sequence[Any]) -> dict[str, Any]:
        """The canonical arguments on one shard; of the unsharded call where that is None."""
        remaining, every = iter(leaves), list(self._leaves)
        for i, x in enumerate(every):
            if i not in self._constants:
                every[i] = next(remaining)
            elif shard is not None:
                every[i] = _part(x, self._words[i], shard)
        a = {**self._arguments, **self._by_name(every)}
        if shard is not None:
            single = {name: words[0] for name, words in self._axes.items() if len(words) == 1}
            shard.pick_key_heads(a, single)
            self.call.to_shard(a, shard)
        return a

    def _by_name(self, leaves: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self._axes, jax.tree.unflatten(self._tree, leaves), strict=True))

    def _local_work(self, work: Work, shard: Any, a: Mapping[str, Any]) -> Work:
        if shard is None:
            return replace(work, kernel=self.kernel, fallback=None)
        kernel, axes = self.kernel, shard.layout.axes(self._sequence_word(shard))
        if not axes and not kernel.tiles_of_shard:
            return replace(work, kernel=kernel, problem=kernel.problem(a), fallback=None)
        if axes and kernel.context is not None:
            kernel = kernel.sharded_call(kernel, axes)
        problem = kernel.problem(a)
        # a share of the queries alone has other rules than the whole mask, a ring other heads to
        # exchange, and a region is traced when it is lowered
        with batch_invariant(work.batch_invariant):
            tiles = kernel.tiles(problem, work.target, self.cfg)
        return replace(work, kernel=kernel, problem=problem, tiles=tiles, fallback=None)

    def _operands(self, work: Work, a: Mapping[str, Any]) -> Arrays:
        operands = work.kernel.operands(a, work.problem)
        arrays = {name: x for name, x in operands.items() if x is not None}
        return same_axes(work.kernel.precompute(work, arrays))

    # ---- words ------------------------------------------------------------------------------

    def _words_of(self, arrays: Arrays) -> list[Words]:
        return [self._words[int(index)] for index in arrays]

    def _words_of_results(
        self, types: Sequence[Any], outputs: int, *, saves: bool = True
    ) -> list[Words]:
        """The words of the results of the forward pass: its outputs, and the arrays it saves.

        ``saves``: whether the last of them are saved states.
        """
        forms: list[tuple[str, ...]] = []
        for axes in self.kernel.forward_axes(self._arguments, outputs):
            named = axes.startswith("=")
            forms.append(self._axes[axes[1:]][0] if named else tuple(axes.split()))
        saved_states = [tuple(axes.split()) for axes, _ in self._saved_states] if saves else []
        forms += [tuple(self.kernel.saved_axes.split())] * (
            len(types) - outputs - len(saved_states)
        )
        forms += saved_states
        return [self.rule.words(form, x.shape) for form, x in zip(forms, types, strict=True)]


def _parts_of(shard: Any, types: Sequence[Any], words: Sequence[Words]) -> list[Any]:
    """Returns the types of arrays on one device, of arrays with these words."""
    local = []
    for x, of_axes in zip(types, words, strict=True):
        parts = [shard.parts(word) if word else 1 for word in of_axes]
        shape = tuple(n // part for n, part in zip(x.shape, parts, strict=True))
        local.append(jax.ShapeDtypeStruct(shape, x.dtype))
    return local


def _type_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _split(arrays: Arrays) -> tuple[Arrays, Arrays]:
    """The arrays of floats, and all others."""
    floats = {n: x for n, x in arrays.items() if has_gradient(x)}
    return floats, {name: x for name, x in arrays.items() if name not in floats}


def _gradient(gradients: Mapping[str, Any], name: str, x: jax.Array) -> jax.Array:
    """A gradient by name in the dtype of its array, zero where there is none."""
    gradient = gradients.get(name)
    return jnp.zeros_like(x) if gradient is None else gradient.astype(x.dtype)


def _part(x: Any, words: Words, shard: Any) -> Any:
    """The part of a constant that belongs to a shard."""
    for axis, word in enumerate(words):
        if word and shard.parts(word) > 1:
            size = x.shape[axis] // shard.parts(word)
            x = jax.lax.dynamic_slice_in_dim(x, shard.index(word) * size, size, axis)
    return x
