"""CallKernel: a kernel as one object, from the question whether it can to its gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from ejkernel.ops import env
from ejkernel.ops.differentiate import Arrays, Work, differentiable, same_axes
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.params import warpgroups_of
from ejkernel.ops.second_order import operation


class CallKernel:
    """One kernel for the calls of one operation.

    ``call`` (a ``Call`` of ejk-types, or anything with its methods) says what a call takes, how it
    is checked and settled, its static facts (``problem``), its arrays (``operands``) and what a
    call without work returns. A backend's base class says ``target`` and ``missing``; a kernel
    says the rest. Everything else is made here: the public function with the operation's
    signature, ``supports``, ``heuristic`` and ``candidates`` for the registry, the override by a
    config, gradients, mesh axes.

    Tiles are frozen dataclasses: what ``choose`` and ``near`` return is what runs. Those that a
    config can change say how themselves, by ``honouring(cfg, problem, target)`` and ``fields``.
    """

    call: ClassVar[Any]
    has_backward: ClassVar[bool] = True
    """Whether ``backward`` has the gradients; else, under ``compiled``, JAX differentiates."""
    forward_again: ClassVar[bool] = False
    """Whether JAX can differentiate ``forward`` and ``backward``, at least in forward mode."""
    takes_warpgroups: ClassVar[bool] = False
    """Whether ``honour`` reads ``WarpgroupParams``."""
    own_tiles: ClassVar[bool] = False
    """Whether no config names tiles: they are the kernel's own choice."""

    def __init__(self) -> None:
        cfg = inspect.Parameter("cfg", inspect.Parameter.KEYWORD_ONLY, default=None)
        signature = inspect.signature(self.call.takes)
        parameters = [*signature.parameters.values(), cfg]
        self.__signature__ = signature.replace(parameters=parameters)
        self.__name__ = self.__qualname__ = self.call.name
        about = f"What it takes and returns, and its source: see the operation {self.__name__}."
        self.__doc__ = f"{inspect.getdoc(type(self))}\n\n{about}"

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{type(self).__name__}"

    def __reduce__(self) -> Any:
        # as for a function: the kernel of this name in its module is not copied
        shared = getattr(inspect.getmodule(type(self)), self.__name__, None) is self
        return self.__name__ if shared else (type(self), ())

    # ---- what a backend says ----------------------------------------------------------------

    def missing(self) -> str | None:
        """What keeps every kernel of the backend from running here; None when nothing does."""
        return None

    def target(self) -> Any:
        """The device kernels are made for; hashable."""
        return None

    outputs: ClassVar[Callable[[Work, Arrays], tuple[Any, ...]]] = staticmethod(differentiable)
    """The outputs of ``forward``, with gradients."""

    # ---- what a kernel says -----------------------------------------------------------------

    def problem(self, a: Mapping[str, Any]) -> Any:
        """Static facts of a call whose arguments are canonical (and may be abstract)."""
        return self.call.problem(a)

    def operands(self, a: Mapping[str, Any], problem: Any) -> Arrays:
        """The arrays of such a call, by the names ``forward`` knows them by; None: not given."""
        return self.call.operands(a, problem)

    def without_work(self, a: Mapping[str, Any], problem: Any) -> tuple[Any, ...] | None:
        """The outputs of a call that ``forward`` is not asked for; None for every other call."""
        return self.call.without_work(a, problem)

    def results(self, a: Mapping[str, Any], outputs: tuple[Any, ...]) -> Any:
        """What the call returns, from what ``forward`` computed."""
        return self.call.results(a, outputs)

    def refuse(self, problem: Any, target: Any) -> str | None:
        """Why a call cannot be done, beginning with the argument's name; None = it can."""
        return None

    def refused(self, reason: str) -> Exception:
        """What a call that is refused raises."""
        return self.call.Unsupported(reason)

    def comments(self, problem: Any, target: Any) -> tuple[str, ...]:
        """Sentences about how a call is done, from its facts."""
        return ()

    def choose(self, problem: Any, target: Any, /) -> Any:
        """The tiles of a call, from its facts alone."""
        return None

    def near(self, problem: Any, target: Any, chosen: Any, /) -> Iterable[Any]:
        """Tiles worth timing beside the chosen ones."""
        return ()

    def honour(self, chosen: Any, cfg: Any, problem: Any, target: Any) -> Any:
        """The chosen tiles with what a config says instead, by their ``honouring``."""
        honouring = getattr(chosen, "honouring", None)
        return chosen if honouring is None else honouring(cfg, problem, target)

    def fields(self, chosen: Any) -> dict[str, Any]:
        """Tiles as fields of the operation's config, which ``honour`` reads back: their own."""
        return dict(getattr(chosen, "fields", {}))

    def known(self, work: Work, arrays: Arrays) -> Arrays:
        """The arrays, with what both passes need of those whose values are known.

        Such arrays are numpy here and no longer in ``forward``.
        """
        return arrays

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        """The outputs, and what else ``backward`` wants kept."""
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
        return self.settled(cfg=cfg, **self.call.bind(a, typecheck=env.typecheck()))

    def settled(self, *, cfg: Any = None, **given: Any) -> Any:
        """The call of canonical arguments by name; what is left out has its default."""
        a = {**self.call.boundary.defaults, **given}
        problem, target = self.problem(a), self.target()
        reason = self.refuse(problem, target)
        if reason is not None:
            raise self.refused(reason)
        outputs = self.without_work(a, problem)
        if outputs is None:
            tiles = self.tiles(problem, target, cfg)
            work = Work(self, problem, tiles, target, operation(self.call.name))
            given = self.operands(a, problem)
            arrays = self.known(work, {name: x for name, x in given.items() if x is not None})
            outputs = self.outputs(work, same_axes(arrays))
        return self.results(a, outputs)

    def tiles(self, problem: Any, target: Any, cfg: Any = None) -> Any:
        """The tiles that run: what a config says, else the chosen ones."""
        groups = None if cfg is None else warpgroups_of(cfg)
        if groups is not None and not self.takes_warpgroups:
            raise ConfigError(
                f"cfg: fwd_params: warpgroups={groups}: {self!r} takes FwdParams without it"
            )
        return self.honour(self.choose(problem, target), cfg, problem, target)

    # ---- what the registry asks -------------------------------------------------------------

    def facts(self, inv: Any) -> tuple[Any, str | None]:
        """The problem of an invocation, and why it cannot be done; remembered with it."""
        known = inv.facts.get(self)
        if known is None:
            try:
                problem = self.problem(inv.arguments)
                known = problem, self.refuse(problem, self.target())
            except self.call.Unsupported as error:
                known = None, str(error)
            inv.facts[self] = known
        return known

    def supports(self, inv: Any) -> str | None:
        """None, or why this kernel cannot do the call."""
        return self.missing() or self.facts(inv)[1]

    def heuristic(self, inv: Any) -> dict[str, Any]:
        """Config fields of the chosen tiles."""
        return {} if self.own_tiles else self.fields(self.choose(self.facts(inv)[0], self.target()))

    def candidates(self, inv: Any) -> list[dict[str, Any]]:
        """Config fields worth timing, the chosen tiles' first, each once."""
        if self.own_tiles:
            return [{}]
        problem, target = self.facts(inv)[0], self.target()
        chosen = self.choose(problem, target)
        found: list[dict[str, Any]] = []
        for tiles in (chosen, *self.near(problem, target, chosen)):
            fields = self.fields(tiles)
            found += [fields] if fields not in found else []
        return found

    def remarks(self, inv: Any) -> tuple[str, ...]:
        """What ``explain`` adds about a call that this kernel does."""
        return self.comments(self.facts(inv)[0], self.target())

    def sample_inputs(self, inv: Any, rng: np.random.Generator) -> tuple[tuple, dict[str, Any]]:
        """Valid arguments where random floats and zeros are not."""
        return (), self.call.samples(inv.arguments, rng)
