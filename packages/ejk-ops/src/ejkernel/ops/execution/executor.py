"""Executor: from a call to the compiled kernel, with a short path for calls seen before."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from ejkernel.ops import env, registry
from ejkernel.ops.compat import ambient_mesh, settings
from ejkernel.ops.config.cache import ConfigCache, selection_state
from ejkernel.ops.config.choice import Choice, ConfigChooser
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.abstract import array_types, bind_abstract
from ejkernel.ops.core.invocation import EXECUTOR_KEYWORDS, Invocation, specs_key
from ejkernel.ops.core.parts import Parts
from ejkernel.ops.errors import KernelNotFound, KernelNotSupported, warn_once
from ejkernel.ops.execution.explanation import Explanation, given_fields
from ejkernel.ops.execution.freeze import Unhashable, freeze, kernel_identity
from ejkernel.ops.execution.program import OtherOutputs, Program, Route, flatten, resolve
from ejkernel.ops.execution.program_cache import ProgramCache
from ejkernel.ops.platforms import Platform, parse_platform
from ejkernel.ops.utils.copying import Copyable
from ejkernel.ops.utils.device import ambient_device, device_fingerprint, target_device

if TYPE_CHECKING:
    from ejkernel.ops.core.kernel import Kernel, Resolved

__all__ = ["ConfigChooser", "Executor", "Explanation"]

How = tuple[Any, ...]
"""``cfg``, ``platform``, ``mesh``, ``in_specs`` and ``out_specs`` of a call."""


@dataclass(frozen=True)
class _Settled:
    """A call with its config chosen."""

    inv: Invocation
    choice: Choice
    route: Route

    @functools.cached_property
    def resolved(self) -> Resolved:
        """What runs."""
        return resolve(self.inv.kernel, self.inv, self.choice.cfg)


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
        kernel: Kernel[Any, Any],
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
            cfg: config to run with; honoured as it is and never stored.
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
        how = (cfg, platform, mesh, specs_key(in_specs), specs_key(out_specs))
        try:
            flat = flatten(args, kwargs)
            call_key = (
                kernel_identity(kernel),
                kernel.state,
                flat.parts.treedef,
                flat.statics,
                None if cfg is None else freeze(cfg),
                how[1:],
                selection_state(),
                env.env_state(),
                ambient_device(),
                ambient_mesh(),
                settings.jax_enable_x64,
            )
            state = self._state()
            call = (call_key, flat.signature, state)
            function = None if state is None else self._programs.find(call)
        except Unhashable:
            return self._run_unremembered(kernel, args, kwargs, how)
        arrays = flat.parts.arrays
        bindings: dict[Hashable, Any] = {}
        binding, types = None, ()
        if function is None:
            settled = self._settle(kernel, args, kwargs, how)
            if cfg is not None:
                _warn_unread(settled)
            binding = settled.inv.info.get("binding")
            types = array_types(arrays) if binding is None else binding.types
            try:
                program_key = _program_key(call_key, settled, flat.parts.positions, types)
            except Unhashable:  # the chosen config
                return self._program(settled, flat.parts)(*arrays)
            parts = flat.parts.without_arrays()
            # Not inlined: JAX then keeps its derivative too, traced and compiled once, and a second
            # layer of a model is one equation; XLA inlines calls before it optimises.
            function = self._programs.get(
                program_key, lambda: jax.jit(self._program(settled, parts, True))
            )
            if state is not None:
                # Choosing may have stored a config or loaded a package: the state is that of now.
                now = (call_key[0], kernel.state, *call_key[2:])
                self._programs.remember((now, flat.signature, self._state()), program_key)
        try:
            if binding is not None and binding.positions == flat.parts.positions:
                program: Any = inspect.unwrap(function)
                bindings = program.bindings
                bindings[types] = binding
            return function(*arrays)
        except OtherOutputs:
            return self._run_unremembered(kernel, args, kwargs, how)
        finally:  # a later trace, of a function compiled already, may be under other settings
            bindings.pop(types, None)

    # ---- asking without running ------------------------------------------------------------

    def choose_config(self, kernel: Kernel[Any, Any], *args: Any, **kwargs: Any) -> Any:
        """The config that a call would run with, tuning included; arrays may be abstract."""
        how, kwargs = _how(kwargs)
        args, kwargs = kernel.prepare(args, kwargs)
        return self._settle(kernel, args, kwargs, how).choice.cfg

    def explain(self, kernel: Kernel[Any, Any], *args: Any, **kwargs: Any) -> Explanation:
        """Print what ``explanation`` finds out about a call, and return it."""
        found = self.explanation(kernel, *args, **kwargs)
        print(found)
        return found

    def explanation(self, kernel: Kernel[Any, Any], *args: Any, **kwargs: Any) -> Explanation:
        """Which implementation and config a call would get and why; tunes and stores nothing.

        Arrays may be abstract. A call that no implementation can do is explained, not refused.
        """
        how, kwargs = _how(kwargs)
        args, kwargs = kernel.prepare(args, kwargs)
        cfg, route = _route(kernel, how)
        inv = bind_abstract(route.invocation(kernel, args, kwargs, cfg))
        error: str | None = None
        try:
            choice = self._choice("preview", inv, kernel, cfg)
            error = None if choice.error is None else str(choice.error)
        except (KernelNotSupported, KernelNotFound) as refusal:
            choice, error = Choice(None, "error", inv.key), str(refusal)
        resolved = None
        if error is None:
            try:
                resolved = resolve(kernel, inv, choice.cfg)
            except (KernelNotSupported, KernelNotFound) as refusal:
                choice, error = Choice(choice.cfg, "error", inv.key, choice.answers), str(refusal)
        skipped = kernel.not_chosen(inv, resolved, choice.cfg)
        chosen = None
        impl = None if resolved is None else resolved.impl
        if resolved is not None:  # a generic run is what the device's own platform runs
            chosen = (resolved.platform or target_device().native_platform).value
        return Explanation(
            kernel=kernel.name,
            key=inv.key,
            tier=choice.tier,
            cfg=choice.cfg,
            platform=chosen,
            implementation=None if resolved is None else resolved.name,
            skipped=skipped,
            tiers=choice.answers,
            device=device_fingerprint(),
            unused=_unused(resolved, choice.cfg) if choice.tier in ("override", "overlay") else (),
            error=error,
            remarks=() if impl is None else impl.said_of(inv),
        )

    # ---- steps -----------------------------------------------------------------------------

    def _state(self) -> Hashable:
        """What the selector's answer depends on besides the call; None when it does not tell."""
        state = getattr(self.selector, "state", None)
        return None if state is None else (state, registry.generation())

    def _settle(
        self, kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], how: How
    ) -> _Settled:
        """Choose the config of a prepared call."""
        cfg, route = _route(kernel, how)
        raw = route.invocation(kernel, args, kwargs, cfg)
        if env.ops_record():
            _record(kernel, raw)
        inv = bind_abstract(raw)
        return _Settled(inv, self._choice("decide", inv, kernel, cfg), route)

    def _choice(self, ask: str, inv: Invocation, kernel: Kernel[Any, Any], cfg: Any) -> Choice:
        """What the selector's method ``ask`` says; a selector may have ``choose`` alone."""
        method = getattr(self.selector, ask, None)
        if method is not None:
            return method(inv, kernel, cfg)
        if cfg is not None:
            return Choice(cfg, "override", inv.key)
        return Choice(self.selector.choose(inv, kernel), "heuristics", inv.key)

    def _program(self, settled: _Settled, parts: Parts, compiled: bool = False) -> Program:
        # the payload differs between buckets, as the key does, which a stamp carries
        dropped = ("binding", "key", *(() if env.ops_stamp() != "none" else ("payload",)))
        info = {k: v for k, v in settled.inv.info.items() if k not in dropped}
        return Program(
            settled.inv.kernel,
            parts,
            settled.choice.cfg,
            settled.resolved,
            settled.route,
            settled.choice.key,
            info,
            compiled,
        )

    def _run_unremembered(
        self, kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], how: How
    ) -> Any:
        """Traced afresh: a static value may change under our hands, or outputs are no arrays."""
        settled = self._settle(kernel, args, kwargs, how)
        if how[0] is not None:
            _warn_unread(settled)
        flat = flatten(args, kwargs, hashable=False)
        return self._program(settled, flat.parts)(*flat.parts.arrays)


def _how(kwargs: dict[str, Any]) -> tuple[How, dict[str, Any]]:
    """The executor's keywords of a call, and those of the kernel."""
    cfg, platform, mesh, *specs = (kwargs.pop(name, None) for name in EXECUTOR_KEYWORDS)
    return (cfg, platform, mesh, *map(specs_key, specs)), kwargs


def _route(kernel: Kernel[Any, Any], how: How) -> tuple[Any, Route]:
    """The config as the kernel's class, and where the call runs."""
    env.check_values()
    cfg, platform, mesh, in_specs, out_specs = how
    wanted = parse_platform(platform)
    cfg = kernel.convert_config(cfg)
    named = kernel.config_platform(cfg)
    if wanted is not None and named is not None and wanted is not named:
        raise ValueError(
            f"{kernel.name}: platform={wanted.value!r} and cfg.platform={named.value!r} "
            "contradict each other: give one, or make them equal"
        )
    return cfg, Route(wanted or named, (mesh, in_specs, out_specs))


def _program_key(
    call_key: Hashable, call: _Settled, positions: tuple[int, ...], types: Hashable
) -> Hashable:
    """Everything that decides a compiled program; Unhashable where the config has no key."""
    # A stamp carries the key, which also holds the shardings.
    stamp = call.choice.key if env.ops_stamp() != "none" else None
    how = freeze(call.choice.cfg), call.resolved.impl, stamp
    return call_key, how, positions, types


def _record(kernel: Kernel[Any, Any], inv: Invocation) -> None:
    try:
        registry.record_invocation(kernel, inv)
    except Exception as error:
        warn_once(("record", kernel.name), f"calls of {kernel.name} are not recorded: {error}")


def _unused(resolved: Any, cfg: Any) -> tuple[str, ...]:
    """Fields that were given and that the chosen implementation says it does not read."""
    read = None if resolved is None or resolved.impl is None else resolved.impl.config_fields
    if read is None:
        return ()
    known = {"platform", "backend", *read}
    return tuple(name for name in given_fields(cfg) if name not in known)


def _warn_unread(call: _Settled) -> None:
    """Warn about fields of the caller's config that have no effect on this call."""
    names = _unused(call.resolved, call.choice.cfg)
    if names:
        name = call.resolved.name
        warn_once(
            ("unread", name, names),
            f"{call.inv.kernel.name}: fields of cfg without effect: {', '.join(names)} ({name} "
            "does not read them)",
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
