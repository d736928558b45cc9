"""Executor: from a call to the compiled kernel, with a short path for calls seen before."""

from __future__ import annotations

import builtins
import functools
import inspect
import os
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from ejkernel.ops import env, registry
from ejkernel.ops.batch_invariance import is_batch_invariant
from ejkernel.ops.compat import ambient_mesh, settings
from ejkernel.ops.config.cache import ConfigCache, selection_state
from ejkernel.ops.config.choice import Choice, ConfigChooser
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.binding import array_types
from ejkernel.ops.core.flat_tree import FlatTree
from ejkernel.ops.core.invocation import AnyKernel, BoundCall, Invocation, KernelOf
from ejkernel.ops.core.route import EXECUTOR_KEYWORDS, Route, checked_mesh, specs_key
from ejkernel.ops.core.types import Cfg
from ejkernel.ops.errors import KernelNotFound, KernelNotSupported, warn_once
from ejkernel.ops.execution.explanation import Explanation, given_fields
from ejkernel.ops.execution.freeze import Unhashable, freeze, kernel_identity
from ejkernel.ops.execution.program import (
    FlatCall,
    OtherOutputs,
    Program,
    flatten,
    offer_binding,
    resolve,
)
from ejkernel.ops.execution.program_cache import ProgramCache
from ejkernel.ops.implementation import Resolved
from ejkernel.ops.platforms import Platform, parse_platform
from ejkernel.ops.region import take_refusal
from ejkernel.ops.utils.copying import Copyable
from ejkernel.ops.utils.device import ambient_device, device_fingerprint, target_device
from ejkernel.ops.utils.serialization import abstractify

__all__ = ["ConfigChooser", "Executor", "Explanation"]

Options = tuple[Any, ...]
"""``cfg``, ``platform``, ``mesh``, ``in_specs`` and ``out_specs`` of a call."""


@dataclass(frozen=True)
class _Decision:
    """A call with the config it runs with."""

    call: BoundCall
    choice: Choice

    @functools.cached_property
    def resolved(self) -> Resolved:
        """The implementation that runs."""
        return resolve(self.call.kernel, self.call, self.choice.cfg)


class Executor(Copyable, process_local={"_programs": ProgramCache}):
    """Runs kernels: chooses a config, dispatches to an implementation, remembers both.

    ``executor(kernel, *args, **kwargs)`` works eagerly and under every JAX transformation. The
    config is chosen before tracing from shapes, dtypes and static arguments alone, so eager and
    transformed calls choose alike. Eager calls seen before go straight to a compiled function.

    Args:
        selector: gives the config of a call; None = a ConfigSelectorChain in memory only.
    """

    def __init__(self, selector: ConfigChooser | None = None):
        if selector is not None and not hasattr(selector, "choose"):
            raise TypeError(f"selector must have a method choose(inv, kernel), got {selector!r}")
        self.selector: ConfigChooser = ConfigSelectorChain() if selector is None else selector
        self._programs = ProgramCache()

    def __call__(
        self,
        kernel: AnyKernel,
        *args: Any,
        cfg: Any = None,
        platform: str | Platform | None = None,
        mesh: Any = None,
        in_specs: Any = None,
        out_specs: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run ``kernel`` on the arguments.

        Args:
            kernel: what to run.
            *args: its positional arguments.
            cfg: config to run with; used unchanged and never stored.
            platform: "triton", "pallas", "xla", "cuda", or "auto" (default).
            mesh, in_specs, out_specs: run on every shard of a mesh; specs follow the arrays.
            **kwargs: its keyword arguments.

        Raises:
            TypeError: a config of the wrong class, or arguments that do not fit.
            ConfigError: an illegal config.
            ValueError: ``platform`` and ``cfg.platform`` differ.
            KernelNotSupported: no implementation for this platform or call.
            NoConfigError, AutotuneError: as ``ConfigSelectorChain.choose``.
        """
        if isinstance(kernel, type):
            raise TypeError(f"kernel must be an instance: call {kernel.__name__}() first")
        if not isinstance(platform, str | None):  # a name is looked at once, when the call is new
            parse_platform(platform)
        args, kwargs = kernel.prepare(args, kwargs)
        placement = checked_mesh(mesh), specs_key(in_specs), specs_key(out_specs)
        options = (cfg, platform, *placement)
        try:
            flat = flatten(args, kwargs)
            static = _static_key(kernel, flat, options)
            state = self._state(kernel)
        except Unhashable:
            return self._run_unremembered(kernel, args, kwargs, options)
        call = static, flat.signature, state
        function = None if state is None else self._programs.find(call)
        try:
            if function is not None:
                return function(*flat.tree.arrays)
            decision = self._decide(kernel, args, kwargs, options)
            if cfg is not None:
                _warn_unread(decision)
            function = self._jitted(decision, flat, static)
            with offer_binding(inspect.unwrap(function), decision.call.binding):
                return function(*flat.tree.arrays)
        except JaxRuntimeError as error:
            refusal = take_refusal()
            if refusal is None:
                raise
            raise ValueError(str(refusal)) from error
        except OtherOutputs:
            return self._run_unremembered(kernel, args, kwargs, options)

    # ---- asking without running ------------------------------------------------------------

    def choose_config(self, kernel: KernelOf[Cfg], *args: Any, **kwargs: Any) -> Cfg:
        """The config that a call would run with, tuning included; arrays may be abstract."""
        options, kwargs = split_options(kwargs)
        args, kwargs = kernel.prepare(args, kwargs)
        return self._decide(kernel, args, kwargs, options).choice.cfg

    def explain(
        self, kernel: AnyKernel, *args: Any, print: bool = True, **kwargs: Any
    ) -> Explanation:
        """Prints the ``explanation`` of a call, unless ``print`` is False, and returns it."""
        explanation = self.explanation(kernel, *args, **kwargs)
        if print:
            builtins.print(explanation)
        return explanation

    def explanation(self, kernel: AnyKernel, *args: Any, **kwargs: Any) -> Explanation:
        """Explains which implementation and config a call would get; tunes and stores nothing.

        Arrays may be abstract. A call that no implementation can do is explained, not refused.
        """
        options, kwargs = split_options(kwargs)
        args, kwargs = kernel.prepare(args, kwargs)
        cfg, route = route_of(kernel, options)
        call = _invocation(kernel, args, kwargs, route).bound
        error: str | None = None
        try:
            choice = self._choice("preview", call, kernel, cfg)
            error = None if choice.error is None else str(choice.error)
        except (KernelNotSupported, KernelNotFound) as refusal:
            choice, error = Choice(None, "error", call.key), str(refusal)
        resolved = None
        if error is None:
            try:
                resolved = resolve(kernel, call, choice.cfg)
            except (KernelNotSupported, KernelNotFound) as refusal:
                choice, error = Choice(choice.cfg, "error", call.key, choice.answers), str(refusal)
        skipped = kernel.not_chosen(call, resolved, choice.cfg)
        chosen = None
        impl = None if resolved is None else resolved.impl
        if resolved is not None:  # a generic run belongs to the device's native platform
            chosen = (resolved.platform or target_device().native_platform).value
        return Explanation(
            kernel=kernel.name,
            key=call.key,
            tier=choice.tier,
            cfg=choice.cfg,
            platform=chosen,
            implementation=None if resolved is None else resolved.name,
            skipped=skipped,
            tiers=choice.answers,
            device=device_fingerprint(),
            unused=_unused(resolved, choice.cfg) if choice.tier in ("override", "overlay") else (),
            error=error,
            notes=() if impl is None else impl.notes_on(call),
        )

    # ---- steps -----------------------------------------------------------------------------

    def _state(self, kernel: AnyKernel) -> Hashable:
        """Returns the state that the selector's answer depends on; None if it is unknown."""
        state = getattr(self.selector, "state", None)
        return None if state is None else (state, registry.generation(), kernel.state)

    def _decide(
        self, kernel: AnyKernel, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> _Decision:
        """Binds a prepared call and chooses its config."""
        cfg, route = route_of(kernel, options)
        inv = _invocation(kernel, args, kwargs, route)
        if env.ops_record():
            _record(kernel, inv)
        calls = registry.collected()
        if calls is None:
            return _Decision(inv.bound, self._choice("decide", inv.bound, kernel, cfg))
        calls.setdefault(inv.key, inv.abstract())
        choice = self._choice("preview", inv.bound, kernel, cfg)
        if choice.error is not None:
            raise choice.error
        return _Decision(inv.bound, choice)

    def _choice(self, ask: str, call: BoundCall, kernel: AnyKernel, cfg: Any) -> Choice:
        """Returns the selector's answer to ``ask``; a selector may have ``choose`` alone."""
        method = getattr(self.selector, ask, None)
        if method is not None:
            return method(call, kernel, cfg)
        if cfg is not None:
            return Choice(cfg, "override", call.key)
        return Choice(self.selector.choose(call, kernel), "heuristics", call.key)

    def _jitted(self, decision: _Decision, flat: FlatCall, static: Hashable) -> Any:
        """Returns the function of a new call, and remembers it where the config has a key."""
        try:
            config = freeze(decision.choice.cfg)
        except Unhashable:
            return self._program(decision, flat.tree)
        kernel, binding = decision.call.kernel, decision.call.binding
        types = array_types(flat.tree.arrays) if binding is None else binding.types
        # a stamp carries the key, which also holds the shardings
        stamp = decision.choice.key if env.ops_stamp() != "none" else None
        program_key = static, kernel.state, config, decision.resolved.impl, stamp, types
        tree = flat.tree.without_arrays()
        # Not inlined: JAX then keeps its derivative too, traced and compiled once, and a second
        # layer of a model is one equation; XLA inlines calls before it optimises.
        function = self._programs.get(
            program_key, lambda: jax.jit(self._program(decision, tree, True))
        )
        # read again: choosing may have stored a config or loaded a package
        state = self._state(kernel)
        if state is not None:
            self._programs.remember((static, flat.signature, state), program_key)
        return function

    def _program(self, decision: _Decision, tree: FlatTree, compiled: bool = False) -> Program:
        call, choice = decision.call, decision.choice
        return Program(
            call.kernel,
            tree,
            choice.cfg,
            decision.resolved,
            call.route,
            choice.key,
            call if env.ops_stamp() != "none" else None,
            compiled,
            choice.may_be_from_file,
        )

    def _run_unremembered(
        self, kernel: AnyKernel, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> Any:
        """Traces again: a static value may be mutated between calls, or outputs are no arrays."""
        decision = self._decide(kernel, args, kwargs, options)
        if options[0] is not None:
            _warn_unread(decision)
        flat = flatten(args, kwargs, hashable=False)
        program = self._program(decision, flat.tree)
        with offer_binding(program, decision.call.binding):
            return program(*flat.tree.arrays)


def split_options(kwargs: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
    """Splits keywords into the executor's options and the kernel's arguments."""
    cfg, platform, mesh, *specs = (kwargs.pop(name, None) for name in EXECUTOR_KEYWORDS)
    return (cfg, platform, checked_mesh(mesh), *map(specs_key, specs)), kwargs


def _invocation(
    kernel: AnyKernel, args: tuple[Any, ...], kwargs: dict[str, Any], route: Route
) -> Invocation:
    """The invocation of a prepared call, abstract."""
    return Invocation(kernel, abstractify(args), abstractify(kwargs), route=route, prepared=True)


def route_of(kernel: AnyKernel, options: Options) -> tuple[Any, Route]:
    """Returns the config as the kernel's class, and the route of the call."""
    env.check_values()
    cfg, platform, mesh, in_specs, out_specs = options
    requested = parse_platform(platform)
    cfg = kernel.convert_config(cfg)
    named = kernel.config_platform(cfg)
    if requested is not None and named is not None and requested is not named:
        raise ValueError(
            f"{kernel.name}: platform={requested.value!r} and cfg.platform={named.value!r} "
            "contradict each other: give one, or make them equal"
        )
    backend = getattr(cfg, "backend", None)
    backend = backend if isinstance(backend, str) and backend != "any" else None
    invariant = is_batch_invariant()
    where = (requested or named, backend, mesh, in_specs, out_specs)
    return cfg, Route(*where, batch_invariant=invariant)


def _static_key(kernel: AnyKernel, flat: FlatCall, options: Options) -> Hashable:
    """Returns all that a call depends on besides arrays and state; Unhashable if it has no key."""
    cfg, *others = options
    return (
        kernel_identity(kernel),
        flat.tree.treedef,
        flat.tree.positions,
        flat.statics,
        None if cfg is None else freeze(cfg),
        tuple(others),
        selection_state(),
        env.env_state(),
        ambient_device(),
        ambient_mesh(),
        settings.jax_enable_x64,
    )


def _record(kernel: AnyKernel, inv: Invocation) -> None:
    try:
        registry.record_invocation(kernel, inv)
    except Exception as error:
        warn_once(("record", kernel.name), f"calls of {kernel.name} are not recorded: {error}")


def _unused(resolved: Any, cfg: Any) -> tuple[str, ...]:
    """Returns the given fields that the chosen implementation declares it does not read."""
    read = None if resolved is None or resolved.impl is None else resolved.impl.config_fields
    if read is None:
        return ()
    read_fields = {"platform", "backend", *read}
    return tuple(name for name in given_fields(cfg) if name not in read_fields)


def _warn_unread(decision: _Decision) -> None:
    """Warn about fields of the caller's config that have no effect on this call."""
    names = _unused(decision.resolved, decision.choice.cfg)
    if names:
        name = decision.resolved.name
        warn_once(
            ("unread", name, names),
            f"{decision.call.kernel.name}: fields of cfg without effect: {', '.join(names)} "
            f"({name} does not read them)",
            stacklevel=5,
        )


_default: Executor | None = None
_lock = threading.Lock()


def create_default_executor(
    *, persistent_path: str | os.PathLike[str] | None = None, autotune: bool | None = None
) -> Executor:
    """A new executor with a ConfigCache and a PersistentCache of its own.

    Args:
        persistent_path: directory of the persistent cache; None = ``$EJKERNEL_CACHE_DIR/configs``.
        autotune: whether to tune unknown calls; None = ``EJKERNEL_AUTOTUNE_POLICY``.
    """
    return Executor(
        ConfigSelectorChain(
            cache=ConfigCache(), persistent=PersistentCache(persistent_path), autotune=autotune
        )
    )


def get_default_executor() -> Executor:
    """The shared executor, built on first use."""
    global _default
    if _default is None:
        with _lock:
            if _default is None:
                _default = create_default_executor()
    return _default
