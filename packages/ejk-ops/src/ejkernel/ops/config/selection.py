"""The seven tiers by which a call gets its config."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ejkernel.ops.config.cache import ConfigCache, find_overlay
from ejkernel.ops.config.choice import AutotunePolicy, Choice
from ejkernel.ops.config.failures import FailureCache
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.tables import covers, nearest_configs
from ejkernel.ops.core.invocation import AnyKernel, BoundCall, Invocation
from ejkernel.ops.errors import (
    ConfigError,
    KernelNotFound,
    KernelNotSupported,
    NoConfigError,
    warn_once,
)
from ejkernel.ops.execution import multihost
from ejkernel.ops.execution.autotuner import Autotuner, shortlist
from ejkernel.ops.execution.lowering import config_error
from ejkernel.ops.execution.progress import first_line
from ejkernel.ops.execution.search import is_transient
from ejkernel.ops.execution.trials import AutotuneResult
from ejkernel.ops.utils.device import target_device

Event = Callable[[str, dict[str, Any]], None]


@dataclass
class _Lookup:
    """One pass through the tiers."""

    call: BoundCall
    kernel: AnyKernel
    dry: bool
    answers: list[tuple[str, str]] = field(default_factory=list)

    def miss(self, tier: str, answer: str) -> None:
        self.answers.append((tier, answer))

    def hit(self, tier: str, cfg: Any, answer: str) -> Choice:
        return Choice(cfg, tier, self.call.key, (*self.answers, (tier, answer)))


class ConfigSelectorChain:
    """Asks seven tiers in order; the first that knows a config wins.

    override (explicit ``cfg=``, never stored), overlay (``overlay_cache``), memory (``cache``),
    persistent (``persistent``, then tables shipped with kernel packages; copied to memory; a
    config that cannot be lowered here is passed over with a warning),
    autotune (times ``config_space``; stored in memory and persistent), heuristics
    (``heuristic_cfg``; never stored), error.

    On a device that shipped tables know for the kernel, tuning happens only when asked for: by
    ``autotune=True``, ``policy_override(autotune=True)`` or the environment variable.

    Args:
        cache: configs in memory; None = a new one.
        persistent: configs on disk; None = no such tier of the user's.
        autotune: whether to tune when nothing is stored; None = ``EJKERNEL_AUTOTUNE_POLICY``.
            An AutotunePolicy says also how.
        on_event: called with an event name and its details: one of "override", "overlay",
            "memory", "persistent", "autotune_start", "autotune_candidate", "autotune_finish",
            "heuristics", "error". Tiers that miss emit nothing.
    """

    def __init__(
        self,
        cache: ConfigCache | None = None,
        persistent: PersistentCache | None = None,
        autotune: bool | AutotunePolicy | None = None,
        on_event: Event | None = None,
    ):
        if autotune is not None and not isinstance(autotune, (bool, AutotunePolicy)):
            raise TypeError(f"autotune must be a bool or None, got {autotune!r}")
        self.cache = ConfigCache() if cache is None else cache
        self.persistent = persistent
        self.policy = autotune if isinstance(autotune, AutotunePolicy) else AutotunePolicy(autotune)
        self.on_event = on_event
        disk = persistent if isinstance(persistent, PersistentCache) else None
        self.failures = FailureCache(disk)
        """Candidates that failed, which are not tried again with the same versions."""

    @property
    def state(self) -> Hashable:
        """Equal states (and equal surroundings) give equal choices; None = ask every time.

        A listener hears of every call, so nothing is remembered while there is one.
        """
        if self.on_event is not None:
            return None
        memory = getattr(self.cache, "state", None)
        disk = 0 if self.persistent is None else getattr(self.persistent, "version", None)
        return None if memory is None or disk is None else (memory, disk, self.policy)

    # ---- choosing ------------------------------------------------------------------------

    def choose(self, inv: Invocation, kernel: AnyKernel) -> Any:
        """The config for ``inv``.

        Raises:
            NoConfigError: the kernel declares tunables and no tier has a config.
            AutotuneError: every candidate failed, or processes could not agree.
        """
        return self.decide(inv, kernel).cfg

    def decide(self, inv: Invocation, kernel: AnyKernel, cfg: Any = None) -> Choice:
        """Returns the choice with its tier; an explicit ``cfg`` wins and is never stored."""
        lookup = _Lookup(inv.bound, kernel, dry=False)
        choice = self._fast_tiers(lookup, cfg)
        if choice is None and _heuristics_alone(lookup.call):
            choice = self._heuristics(lookup)
        if choice is None:
            group = multihost.peers() if kernel.has_tunables else None
            if group is None:
                choice = self._slow_tiers(lookup)
            else:
                choice = group.agree(
                    lookup.call, self.policy.enabled(), lambda: self._slow_tiers(lookup)
                )
                stored = choice.tier in ("persistent", "autotune")
                if stored and choice.key not in self.cache:
                    self.cache.put(choice.key, choice.cfg)
        if choice.error is not None:
            self._emit("error", lookup, error=choice.error)
            raise choice.error
        if choice.tier != "autotune":
            self._emit(choice.tier, lookup, cfg=choice.cfg)
        return choice

    def preview(self, inv: Invocation, kernel: AnyKernel, cfg: Any = None) -> Choice:
        """Returns the choice of ``decide``, without tuning, storing or events."""
        lookup = _Lookup(inv.bound, kernel, dry=True)
        slow = self._heuristics if _heuristics_alone(lookup.call) else self._slow_tiers
        return self._fast_tiers(lookup, cfg) or slow(lookup)

    def store(self, key: str, cfg: Any, metadata: Any = None, measured: Any = None) -> None:
        """Put a tuned config into the memory and persistent tiers.

        Args:
            key, cfg: what to store.
            metadata: payload of the key, so that the entry can serve a shipped table.
            measured: what was measured, JSON values.
        """
        self.cache.put(key, cfg)
        if self.persistent is None:
            return
        if isinstance(self.persistent, PersistentCache):
            self.persistent.put(key, cfg, metadata=metadata, measured=measured)
        else:
            self.persistent.put(key, cfg)

    def store_result(self, result: AutotuneResult, metadata: Any = None) -> None:
        """Keep the winner of tuning: for this process, and on disk if it was compared."""
        if result.compared:
            measured = result.measured() if result.trials else None
            self.store(result.key, result.best, metadata, measured)
        else:
            self.cache.put(result.key, result.best)

    # ---- tiers ---------------------------------------------------------------------------

    def _fast_tiers(self, lookup: _Lookup, cfg: Any) -> Choice | None:
        """Override, overlay, memory: what each process has by itself."""
        kernel, call = lookup.kernel, lookup.call
        if cfg is not None:
            return lookup.hit("override", kernel.convert_config(cfg, call), "explicit cfg")
        lookup.miss("override", "no cfg was given")
        if call.route.batch_invariant:
            return None
        cfg = find_overlay(call.key, kernel.name)
        if cfg is not None:
            return lookup.hit("overlay", kernel.convert_config(cfg, call), "hit")
        lookup.miss("overlay", "no overlay has the key or the kernel's name")
        return self._memory(lookup)

    def _memory(self, lookup: _Lookup, answer: str = "hit") -> Choice | None:
        cfg = self.cache.get(lookup.call.key)
        if cfg is None:
            lookup.miss("memory", f"key not among the {len(self.cache)} stored")
            return None
        cfg = lookup.kernel.convert_config(cfg, lookup.call)
        # calls of one key may differ in the values of floats: not all platforms do dropout
        refusal = _unusable_reason(lookup.kernel, cfg, lookup.call)
        if refusal is not None:
            lookup.miss("memory", f"not used: {refusal}")
            return None
        return lookup.hit("memory", cfg, answer)

    def _slow_tiers(self, lookup: _Lookup) -> Choice:
        """Persistent, autotune, heuristics, error."""
        if lookup.dry or not hasattr(self.cache, "tuning"):
            return self._persistent(lookup) or self._tune(lookup) or self._heuristics(lookup)
        with self.cache.tuning(lookup.call.key):
            # another thread may have found one while this one waited
            if self.cache.get(lookup.call.key) is not None:
                lookup.answers.pop()
                choice = self._memory(lookup, "hit, found by another thread")
                if choice is not None:
                    return choice
            choice = self._persistent(lookup) or self._tune(lookup)
        return choice or self._heuristics(lookup)

    def _persistent(self, lookup: _Lookup) -> Choice | None:
        kernel, call = lookup.kernel, lookup.call
        miss = "no persistent cache" if self.persistent is None else "key not on disk"
        refusals: list[str] = []
        for cfg, answer in self._iterate_stored(lookup):
            reason = _unusable_reason(kernel, cfg, call) or self._lowering_failure(lookup, cfg)
            if reason is None:
                cfg = kernel.convert_config(cfg, call)
                if not lookup.dry:
                    self.cache.put(call.key, cfg)
                return lookup.hit("persistent", cfg, answer)
            refusals.append(f"not used: {reason}")
        lookup.miss("persistent", refusals[0] if refusals else miss)
        return None

    def _iterate_stored(self, lookup: _Lookup) -> Iterator[tuple[Any, str]]:
        """Yields configs of files with where they are from: the user's, then the nearest ones."""
        call = lookup.call
        if isinstance(self.persistent, PersistentCache):
            cfg = self.persistent.get(call.key, cls=lookup.kernel.config_cls)
        else:
            cfg = None if self.persistent is None else self.persistent.get(call.key)
        if cfg is not None:
            yield cfg, "hit"
        for shipped, distance in self._iterate_shipped(lookup):
            yield shipped, f"shipped table, {_describe_distance(distance)}"

    def _lowering_failure(self, lookup: _Lookup, cfg: Any) -> str | None:
        """Returns why a config of a file cannot be lowered here, None when it can.

        The reason is remembered next to the files. A dry lookup compiles nothing and knows only
        what is remembered. Where the heuristic config fails too, the fault is not the config's.
        """
        kernel, call = lookup.kernel, lookup.call
        cfg = kernel.convert_config(cfg, call)
        reason = self.failures.reason(call.key, cfg)
        if lookup.dry:
            return reason
        if reason is None:
            error = config_error(call, cfg)
            if error is None or not self._heuristic_lowers(lookup):
                return None
            reason = first_line(f"{type(error).__name__}: {error}")
            if not is_transient(error):
                self.failures.remember(call.key, cfg, reason)
        warn_once(
            ("stored config", call.key, repr(cfg)),
            f"a stored config of kernel {kernel.name!r} is not used: {reason}; key {call.key!r}, "
            f"config {cfg!r}",
        )
        return reason

    def _heuristic_lowers(self, lookup: _Lookup) -> bool:
        try:
            cfg = lookup.kernel.heuristic_cfg(lookup.call)
        except NotImplementedError:  # nothing to compare with
            return True
        cfg = lookup.kernel.convert_config(cfg, lookup.call)
        return config_error(lookup.call, cfg) is None

    def _iterate_shipped(self, lookup: _Lookup) -> Any:
        tables = lookup.kernel.config_tables(lookup.call)
        payload = lookup.call.payload
        if not tables or not payload:
            return ()
        kernel = lookup.kernel
        return nearest_configs(tables, payload, kernel.config_cls, kernel.similarity)

    def _has_shipped_table(self, lookup: _Lookup) -> bool:
        """Returns whether a shipped table covers the kernel on this device."""
        payload = lookup.call.payload
        return bool(payload) and covers(lookup.kernel.config_tables(lookup.call), payload)

    def _tune(self, lookup: _Lookup) -> Choice | None:
        kernel, call = lookup.kernel, lookup.call
        if not self.policy.enabled():
            lookup.miss("autotune", "switched off")
            return None
        if not kernel.has_tunables:
            lookup.miss("autotune", "the kernel has no tunables")
            return None
        if not self.policy.explicitly_enabled() and self._has_shipped_table(lookup):
            lookup.miss("autotune", "shipped tables know this device: tuned only when asked for")
            return None
        configs = list(kernel.config_space(call))
        configs = [cfg for cfg in configs if _unusable_reason(kernel, cfg, call) is None]
        if len(configs) < 2:
            lookup.miss("autotune", f"{len(configs)} candidates, nothing to compare")
            return None
        target = target_device()
        if not target.present:
            lookup.miss("autotune", f"target device {target.name!r} is not present")
            return None
        configs = shortlist(kernel, configs, self.policy.max_candidates)
        if lookup.dry:
            return lookup.hit("autotune", None, f"would time {len(configs)} candidates")
        self._emit("autotune_start", lookup, candidates=len(configs))
        tuner = Autotuner(
            self.policy,
            on_trial=lambda trial, index, total: self._emit(
                "autotune_candidate",
                lookup,
                cfg=trial.cfg,
                ms=trial.ms,
                error=trial.error,
                index=index,
                total=total,
            ),
            failures=self.failures,
            implicit=True,
        )
        result = tuner.tune(call, configs)
        self.store_result(result, call.payload)
        self._emit("autotune_finish", lookup, cfg=result.best, ms=result.best_ms, result=result)
        count = len(result.trials)
        answer = f"best of {count} candidates"
        if not result.compared:
            answer = f"{result.timed} of {count} candidates timed: not enough compared, not stored"
        return lookup.hit("autotune", result.best, answer)

    def _heuristics(self, lookup: _Lookup) -> Choice:
        kernel, call = lookup.kernel, lookup.call
        if not kernel.has_tunables:
            return lookup.hit("heuristics", None, "the kernel has no tunables")
        try:
            cfg = kernel.heuristic_cfg(call.with_numbers() if call.symbolic else call)
        except KernelNotSupported:
            raise
        except NotImplementedError as error:
            lookup.miss("heuristics", str(error) or "heuristic_cfg is not implemented")
        else:
            if cfg is not None:
                return lookup.hit("heuristics", kernel.convert_config(cfg, call), "hit")
            lookup.miss("heuristics", "heuristic_cfg returned None")
        told = "".join(f"\n  {tier}: {answer}" for tier, answer in lookup.answers)
        error = NoConfigError(f"no config for kernel {kernel.name!r}, key {call.key!r}:{told}")
        return Choice(None, "error", call.key, tuple(lookup.answers), error)

    def _emit(self, event: str, lookup: _Lookup, **details: Any) -> None:
        if self.on_event is not None:
            self.on_event(event, {"kernel": lookup.kernel.name, "key": lookup.call.key, **details})


def _heuristics_alone(call: BoundCall) -> bool:
    """Returns whether nothing stored or timed serves a call.

    No size is known of a symbolic one, and what is timed for one batch differs from another's.
    """
    return call.symbolic or call.route.batch_invariant


def _describe_distance(distance: float) -> str:
    return "same bucket" if distance == 0 else f"nearest entry, {distance:.2g} octaves away"


def _unusable_reason(kernel: AnyKernel, cfg: Any, call: BoundCall) -> str | None:
    """Returns why a stored or proposed config cannot serve this call, None when it can."""
    try:
        cfg = kernel.convert_config(cfg, call)
        requested = call.route.platform
        named = kernel.config_platform(cfg)
        if requested is not None and named is not None and named is not requested:
            return f"it is for platform {named.value!r}, {requested.value!r} was requested"
        kernel.implementation(call, requested or named)
    except (ConfigError, TypeError, ValueError, KernelNotSupported, KernelNotFound) as error:
        return str(error)
    return None
