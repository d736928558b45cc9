"""CallKernel: a kernel as one object, from the check of a call to its gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import env
from ejkernel.ops.batch_invariance import is_batch_invariant
from ejkernel.ops.config.choice import is_config_from_file
from ejkernel.ops.core.invocation import BoundCall
from ejkernel.ops.differentiate import Arrays, Work, differentiable, same_axes
from ejkernel.ops.errors import ConfigError, warn_caution
from ejkernel.ops.params import warpgroups_of
from ejkernel.ops.partition import may_be_sharded
from ejkernel.ops.partitioned import run_partitioned
from ejkernel.ops.second_order import current_operation, not_differentiable
from ejkernel.ops.utils.device import device_kind
from ejkernel.ops.varying import vary_like, vary_over


class CallKernel:
    """One kernel for the calls of one operation.

    ``call`` (a ``Call`` of ejk-types, or anything with its methods) defines the arguments of a
    call, how they are checked and canonicalized, its static properties (``problem``), its arrays
    (``operands``) and its outputs where there is nothing to compute. A backend's base class defines
    ``target`` and ``unavailable_reason``. Everything else is made here: the public
    function with the operation's signature, ``supports``, ``heuristic`` and ``candidates`` for the
    registry, the override by a config, gradients, mesh axes.

    Tiles are frozen dataclasses: what ``choose`` and ``neighbours`` return is what runs. Those that
    a config can change say how themselves, by ``apply_config(cfg, problem, target)`` and
    ``fields``.
    """

    call: ClassVar[Any]
    reads: ClassVar[frozenset[str]] = frozenset()
    """Names of the arguments that the kernel reads.

    A call that gives any other argument is refused, so an option that is added to the operation
    later is never ignored. An argument that the ``Call`` has ``merged`` into another one is read
    with that one. An argument of which only some values are supported is read, and
    ``unsupported_reason`` rejects the others. Every call has its required arguments, and in
    canonical form a ``mask_info`` and a ``softmax_scale``: a kernel that does not read them
    supports no call.
    """
    has_backward: ClassVar[bool] = True
    """Whether ``backward`` has the gradients; else, under ``compiled``, JAX differentiates."""
    forward_again: ClassVar[bool] = False
    """Whether JAX can differentiate ``forward`` and ``backward``, at least in forward mode."""
    reads_warpgroups: ClassVar[bool] = False
    """Whether ``apply_config`` reads ``WarpgroupParams``."""
    fixed_tiles: ClassVar[bool] = False
    """Whether no config names tiles: they are the kernel's own choice."""
    partitioned: ClassVar[bool] = True
    """Whether a compiler that partitions programs has to be told how to shard the kernel."""
    context: Any = None
    """The ring kernel that runs a call on a shard of its sequence; None: sequences stay whole."""
    sharded_call: Any = None
    """Makes the call on a shard: ``ShardedCall`` of ejk-types."""
    tiles_of_shard: ClassVar[bool] = False
    """Whether a device chooses tiles for its own part of a call, in place of the whole call's."""
    saved_axes: ClassVar[str] = ""
    """Words of the axes of each array that ``forward`` keeps for ``backward``."""

    def __init__(self) -> None:
        cfg = inspect.Parameter("cfg", inspect.Parameter.KEYWORD_ONLY, default=None)
        signature = inspect.signature(self.call.signature)
        parameters = [*signature.parameters.values(), cfg]
        self.__signature__ = signature.replace(parameters=parameters)
        self.__name__ = self.__qualname__ = self.call.name
        about = f"What it takes and returns, and its source: see the operation {self.__name__}."
        self.__doc__ = f"{inspect.getdoc(type(self))}\n\n{about}"
        self._unread_defaults = self._defaults_of_unread()

    def _defaults_of_unread(self) -> dict[str, Any]:
        """Returns the defaults of the arguments that the kernel does not read, by name.

        Raises:
            TypeError: ``reads`` has a name that the operation does not take.
        """
        defaults = self.call.boundary.defaults
        unknown = sorted(set(self.reads) - defaults.keys())
        if unknown:
            raise TypeError(f"{self!r}: reads {unknown}, which {self.call.name} does not take")
        merged = {name for name, into in self.call.merged.items() if into in self.reads}
        return {n: x for n, x in defaults.items() if n not in self.reads and n not in merged}

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{type(self).__name__}"

    def __reduce__(self) -> Any:
        # as for a function: the kernel of this name in its module is not copied
        shared = getattr(inspect.getmodule(type(self)), self.__name__, None) is self
        return self.__name__ if shared else (type(self), ())

    # ---- what a backend says ----------------------------------------------------------------

    def unavailable_reason(self) -> str | None:
        """Returns the reason why no kernel of the backend can run here, or None."""
        return None

    def target(self) -> Any:
        """The device kernels are made for; hashable."""
        return None

    outputs: ClassVar[Callable[[Work, Arrays], tuple[Any, ...]]] = staticmethod(differentiable)
    """The outputs of ``forward``, with gradients."""

    vary_like: ClassVar[Callable[[Any, Any], Any]] = staticmethod(vary_like)
    vary_over: ClassVar[Callable[[Any, str], Any]] = staticmethod(vary_over)

    # ---- what a kernel says -----------------------------------------------------------------

    def problem(self, a: Mapping[str, Any]) -> Any:
        """Static properties of a call whose arguments are canonical (and may be abstract)."""
        return self.call.problem(a)

    def operands(self, a: Mapping[str, Any], problem: Any) -> Arrays:
        """Returns the arrays of such a call by the names that ``forward`` uses; None: not given."""
        return self.call.operands(a, problem)

    def empty_outputs(self, a: Mapping[str, Any], problem: Any) -> tuple[Any, ...] | None:
        """Returns the outputs of a call that needs no ``forward``; None for every other call."""
        return self.call.empty_outputs(a, problem)

    def results(self, a: Mapping[str, Any], outputs: tuple[Any, ...]) -> Any:
        """Returns the result of the call from the outputs of ``forward``."""
        return self.call.results(a, outputs)

    def unread_argument(self, a: Mapping[str, Any]) -> str | None:
        """Returns the name of an argument that the call gives and the kernel does not read.

        An argument is given when its canonical value differs from its default.
        """
        for name, default in self._unread_defaults.items():
            value = a[name]
            # comparing an array gives an array; None is the default of most arguments
            if value is not default and (
                default is None or hasattr(value, "dtype") or value != default
            ):
                return name
        return None

    def unsupported_reason(self, problem: Any, target: Any) -> str | None:
        """Returns why a call is not supported, beginning with the argument's name, or None.

        Arguments that the kernel does not read are refused before.
        """
        return None

    def variant_reason(self, problem: Any) -> str | None:
        """Returns why the bits of a sequence's results depend on the rest of the call, or None.

        A kernel that returns None has the same bits in every batch, for tiles of
        ``sequence_problem`` that went through ``fix_order``.
        """
        return "batch_invariant: its results depend on the batch"

    def sequence_problem(self, problem: Any) -> Any:
        """Returns the problem with fixed values of all that the batch decides.

        Tiles of batch-invariant calls are chosen from it.
        """
        return problem

    def fix_order(self, tiles: Any) -> Any:
        """Returns tiles with which sums have an order that each sequence decides for itself."""
        return tiles

    def unsupported_error(self, reason: str) -> Exception:
        """Returns the error of an unsupported call."""
        return self.call.Unsupported(reason)

    def notes_on(self, problem: Any, target: Any) -> tuple[str, ...]:
        """Returns sentences for ``explain`` about how a call is computed, from its problem."""
        return ()

    def choose(self, problem: Any, target: Any, /) -> Any:
        """The tiles of a call, from its problem alone."""
        return None

    def neighbours(self, problem: Any, target: Any, chosen: Any, /) -> Iterable[Any]:
        """Returns tiles worth timing in addition to the chosen ones."""
        return ()

    def apply_config(self, chosen: Any, cfg: Any, problem: Any, target: Any) -> Any:
        """Returns the chosen tiles with the fields of a config, by their ``apply_config``."""
        apply_config = getattr(chosen, "apply_config", None)
        return chosen if apply_config is None else apply_config(cfg, problem, target)

    def fields(self, chosen: Any) -> dict[str, Any]:
        """Returns the tiles' own fields of the operation's config; ``apply_config`` reads them."""
        return dict(getattr(chosen, "fields", {}))

    def forward_axes(self, a: Mapping[str, Any], count: int) -> tuple[str, ...]:
        """Returns the words of the axes of each of the ``count`` outputs of ``forward``."""
        return self.call.forward_axes(a, count)

    def on_shards(self, a: Mapping[str, Any]) -> tuple[CallKernel, Mapping[str, Any]]:
        """Returns the kernel and the arguments of a call that means the same on every shard."""
        return self, a

    def shares_sequence(self, a: Mapping[str, Any]) -> bool:
        """Returns whether devices may share the sequence of a call by this kernel."""
        call = self.call
        able = self.context is not None or call.passes_states or call.shares_queries
        return able and call.shares_sequence(a)

    def precompute(self, work: Work, arrays: Arrays) -> Arrays:
        """Returns the arrays, and values that both passes derive from arrays the host knows.

        Such arrays are numpy here and no longer in ``forward``.
        """
        return arrays

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        """Returns the outputs, and the other residuals of ``backward``."""
        raise NotImplementedError

    def backward(
        self,
        work: Work,
        arrays: Arrays,
        outputs: tuple[Any, ...],
        saved: Any,
        cotangents: tuple[Any, ...],
    ) -> Mapping[str, Any]:
        """Gradients by the names of the arrays; those left out are zero."""
        raise NotImplementedError

    # ---- the call ---------------------------------------------------------------------------

    def __call__(self, *args: Any, cfg: Any = None, **kwargs: Any) -> Any:
        a = self.call.prepare(args, kwargs)
        # as under jit: 64 bits only where JAX has them
        a = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in a.items()}
        a = self.call.bind(a, typecheck=env.typecheck(), warn=warn_caution)
        return self.run_canonical(cfg=cfg, **a)

    def run_canonical(
        self, *, cfg: Any = None, sequence_axes: tuple[str, ...] = (), **arguments: Any
    ) -> Any:
        """Runs a call of canonical arguments by name; those left out have their defaults.

        ``sequence_axes``: the mesh axes over which devices share the sequence, of which the
        arguments are one device's.
        """
        a = {**self.call.boundary.defaults, **arguments}
        for name, reason in self.call.constant_arguments(a).items():
            a[name] = not_differentiable(a[name], reason)
        if sequence_axes:
            ring, a = self._sequence_shard(a, sequence_axes)
            return ring.run_canonical(cfg=cfg, **a)
        unread = self.unread_argument(a)
        if unread is not None:
            raise self.unsupported_error(_not_supported(unread))
        problem, target = self.problem(a), self.target()
        reason = self.unsupported_reason(problem, target)
        invariant = is_batch_invariant()
        if reason is None and invariant:
            reason = self._variance_reason(a, problem)
        if reason is not None:
            raise self.unsupported_error(reason)
        outputs = self.empty_outputs(a, problem)
        partitioned = self.partitioned or self.shares_sequence(a)
        sharded = partitioned and may_be_sharded(self.call.array_arguments(a))
        if sharded:
            kernel, same = self.on_shards(a)
            if kernel is not self:
                return kernel.run_canonical(cfg=cfg, **same)
        if outputs is None:
            tiles = self.tiles(problem, target, cfg)
            # an explicit config has none: where it fails, the call fails
            fallback = self.tiles(problem, target) if is_config_from_file() else None
            options, name = self.call.options(a), current_operation(self.call.name)
            work = Work(self, problem, options, tiles, target, name, fallback, invariant)
            if sharded:
                outputs = run_partitioned(work, a, cfg)
            else:
                operands = self.operands(a, problem)
                arrays = {name: x for name, x in operands.items() if x is not None}
                outputs = self.outputs(work, same_axes(self.precompute(work, arrays)))
        return self.results(a, outputs)

    def tiles(self, problem: Any, target: Any, cfg: Any = None) -> Any:
        """Returns the tiles that run: from a config, else the chosen ones."""
        groups = None if cfg is None else warpgroups_of(cfg)
        if groups is not None and not self.reads_warpgroups:
            raise ConfigError(
                f"cfg: fwd_params: warpgroups={groups}: {self!r} takes FwdParams without it"
            )
        invariant = is_batch_invariant()
        if invariant:
            problem = self.sequence_problem(problem)
        tiles = self.apply_config(self.choose(problem, target), cfg, problem, target)
        return self.fix_order(tiles) if invariant else tiles

    def _sequence_shard(self, a: Mapping[str, Any], axes: tuple[str, ...]) -> tuple[Any, Any]:
        """Returns the kernel and the arguments of a call on a shard of its sequence."""
        if self.context is None:
            raise self.unsupported_error(f"{self.call.boundary.names[0]}: a sharded sequence")
        return self.context, self.sharded_call.arguments(a, axes)

    def _variance_reason(self, a: Mapping[str, Any], problem: Any) -> str | None:
        """Returns the argument for which, or why, a call is not batch-invariant; None if it is."""
        for name in ("cum_seqlens_q", "cu_seqlens"):
            if a.get(name) is not None:
                return f"{name}: not batch-invariant, tiles begin where the packed rows begin"
        if a.get("dropout_prob"):
            return "dropout_prob: not batch-invariant, dropout counts batch rows"
        return self.variant_reason(problem)

    # ---- what the registry asks -------------------------------------------------------------

    def examine(self, call: BoundCall) -> tuple[Any, str | None]:
        """Returns the problem of a call, and the reason why it is not supported."""
        kernel, a = self, call.arguments
        unread = self.unread_argument(a)
        if unread is not None:
            return None, _not_supported(unread)
        try:
            if call.route.sequence_axes:
                kernel, a = self._sequence_shard(a, call.route.sequence_axes)
            problem = kernel.problem(a)
            return problem, kernel.unsupported_reason(problem, kernel.target())
        except self.call.Unsupported as error:
            return None, str(error)

    def problem_of(self, call: BoundCall) -> Any:
        """Returns the problem of a call that is supported."""
        return call.remember(self, lambda: self.examine(call))[0]

    def supports(self, call: BoundCall) -> str | None:
        """Returns None, or the reason why the call is not supported."""
        reason = self.unavailable_reason()
        if reason is not None:
            return reason
        problem, reason = call.remember(self, lambda: self.examine(call))
        if reason is None and call.route.batch_invariant:
            if call.route.sequence_axes:
                return "batch_invariant: devices share a sequence"
            # packed sequences are a mask in canonical form
            reason = self._variance_reason({**call.arguments, **_packed(call)}, problem)
        return reason

    def heuristic(self, call: BoundCall) -> dict[str, Any]:
        """Returns the config fields of the chosen tiles."""
        if self.fixed_tiles or call.route.sequence_axes:
            return {}
        problem = self.problem_of(call)
        if call.route.batch_invariant:
            problem = self.sequence_problem(problem)
        return self.fields(self.choose(problem, self.target()))

    def candidates(self, call: BoundCall) -> list[dict[str, Any]]:
        """Returns config fields worth timing, each once; the chosen tiles come first."""
        if self.fixed_tiles or call.route.sequence_axes:
            return [{}]
        problem, target = self.problem_of(call), self.target()
        chosen = self.choose(problem, target)
        candidates: list[dict[str, Any]] = []
        for tiles in (chosen, *self.neighbours(problem, target, chosen)):
            fields = self.fields(tiles)
            candidates += [fields] if fields not in candidates else []
        return candidates

    def notes(self, call: BoundCall) -> tuple[str, ...]:
        """Returns what ``explain`` adds about a call that this kernel does."""
        notes: tuple[str, ...] = ()
        if not call.route.sequence_axes:
            notes = self.notes_on(self.problem_of(call), self.target())
        mesh, in_specs, _ = call.route.placement
        if mesh is not None:
            arrays = self._caller_arrays(call)
            placed = self.call.placement_notes(call.arguments, arrays, mesh, in_specs)
            return (*notes, *placed)
        if device_kind() == "tpu":  # whose compiler does not partition kernels
            return notes
        sequence, arrays = self.shares_sequence(call.arguments), self._caller_arrays(call)
        return (*notes, *self.call.sharding_notes(call.arguments, arrays, sequence=sequence))

    def _caller_arrays(self, call: BoundCall) -> dict[str, Any]:
        """Returns the arrays of a call as its caller has them, with their shardings."""
        made = call.made
        a = self.call.boundary.by_name(made.args, dict(made.kwargs or {}))
        return {name: x for name, x in a.items() if jax.tree.leaves(x) and name in call.arguments}

    def sample_inputs(
        self, call: BoundCall, rng: np.random.Generator
    ) -> tuple[tuple, dict[str, Any]]:
        """Returns valid arguments where random floats and zeros are not."""
        return (), self.call.samples(call.arguments, rng)


def _not_supported(argument: str) -> str:
    """Returns the reason against a call that gives an argument the kernel does not read."""
    return f"{argument}: not supported"


def _packed(call: BoundCall) -> Mapping[str, Any]:
    """Returns the arguments of packed sequences that the caller gave."""
    made = call.made.arguments
    return {name: made[name] for name in ("cum_seqlens_q", "cu_seqlens") if name in made}
