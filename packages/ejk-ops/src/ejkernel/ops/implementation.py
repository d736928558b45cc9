"""One registered implementation of an algorithm, and the comparison of signatures."""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ejkernel.ops.platforms import LEGAL_BACKENDS, Backend, Platform, parse_backend, parse_platform


class LazyLoadError(ImportError):
    """The module behind a lazily registered function cannot be imported or lacks the function."""


class LazyFunction:
    """The function ``"module:name"``, imported when it is first called or resolved."""

    def __init__(self, target: str):
        module, _, name = target.partition(":")
        if not (re.fullmatch(r"\w+(\.\w+)*", module) and re.fullmatch(r"\w+(\.\w+)*", name)):
            raise ValueError(f"target={target!r}: expected 'package.module:function'")
        self.target = target
        self._resolved: Callable[..., Any] | None = None
        self._lock = threading.Lock()

    def resolve(self) -> Callable[..., Any]:
        """The function itself; LazyLoadError, chained to the cause, when there is none."""
        if self._resolved is not None:
            return self._resolved
        module, _, name = self.target.partition(":")
        try:
            value: Any = importlib.import_module(module)
            for part in name.split("."):
                value = getattr(value, part)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever a module may raise when it is imported
            reason = f"{type(error).__name__}: {error}"
            raise LazyLoadError(f"loading {self.target} failed: {reason}") from error
        with self._lock:
            self._resolved = value
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.resolve()(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyFunction, (self.target,)

    def __repr__(self) -> str:
        return f"<lazy {self.target}>"


def lazily(value: Callable[..., Any] | str | None) -> Callable[..., Any] | None:
    """A function, or the LazyFunction that a "module:name" string stands for."""
    return LazyFunction(value) if isinstance(value, str) else value


@dataclass(frozen=True, eq=False)
class Implementation:
    """One registration; two of them are equal only if they are the same object.

    Attributes:
        algorithm: lower-case name of the algorithm.
        platform, backend: who wrote it, which hardware runs it.
        priority: the highest one that supports a call gets it.
        function: the implementation or a LazyFunction; read ``fn`` for the callable.
        supports: ``(inv) -> None | str``, the reason why a call cannot be done; None = any call.
        heuristic, candidates: ``(inv) ->`` config fields as a dict, a sequence of such dicts.
        sample_inputs: ``(inv, rng) -> (args, kwargs)``, valid concrete inputs.
        config_cls: class of its config, None when the operation's own class serves.
        version: raised when old tuning results no longer hold.
        differentiable: whether reverse mode works through it.
        priority_for: ``(inv) -> int``, its priority for a call that it supports, from static
            properties, where that depends on the shapes; None = ``priority``.
        notes: ``(inv) ->`` sentences about what it does with a call, for ``explain``.
        config_fields: the config fields that it reads, with a dot for fields of nested configs
            (``"fwd_params.num_warps"``); None = unknown.
        order: position among all registrations, breaks ties.
        origin: who registered it: an installed package with its version, or a module.
        replaces: the origin of the implementation that it was registered in place of, else empty.
    """

    algorithm: str
    platform: Platform
    backend: Backend
    priority: int
    function: Callable[..., Any]
    supports: Callable[[Any], str | None] | None = None
    heuristic: Callable[..., Any] | None = None
    candidates: Callable[..., Any] | None = None
    sample_inputs: Callable[..., Any] | None = None
    config_cls: type | None = None
    version: int = 1
    differentiable: bool = True
    priority_for: Callable[[Any], int] | None = None
    notes: Callable[[Any], Sequence[str]] | None = None
    config_fields: Sequence[str] | None = None
    order: int = 0
    on_load: Callable[[Implementation], None] | None = field(default=None, repr=False)
    origin: str = ""
    replaces: str = ""

    @property
    def module(self) -> str:
        """Name of the module that its function is in."""
        if isinstance(self.function, LazyFunction):
            return self.function.target.partition(":")[0]
        return getattr(self.function, "__module__", None) or type(self.function).__module__

    @property
    def loaded(self) -> bool:
        """Returns whether ``fn`` is at hand without an import."""
        return not isinstance(self.function, LazyFunction) or self.function._resolved is not None

    @property
    def fn(self) -> Callable[..., Any]:
        """The implementation. A lazy one is imported, and its signature checked, on first use.

        Raises:
            ImportError: its module cannot be imported.
            ValueError: its signature differs from the other implementations'.
        """
        if not isinstance(self.function, LazyFunction):
            return self.function
        first = self.function._resolved is None
        fn = self.function.resolve()
        if first and self.on_load is not None:
            try:
                self.on_load(self)
            except ValueError:
                self.function._resolved = None
                raise
        return fn

    def load(self) -> Callable[..., Any]:
        """The implementation, imported if need be, its signature unchecked. May LazyLoadError."""
        fn = self.function
        return fn.resolve() if isinstance(fn, LazyFunction) else fn

    def why_not(self, inv: Any) -> str | None:
        """None when it can do the call, else the reason. Static properties only."""
        if self.platform is not Platform.XLA and getattr(inv, "symbolic", False):
            return "an array has a symbolic size, which only platform 'xla' takes"
        reason = None if self.supports is None or inv is None else self.supports(inv)
        if not isinstance(reason, str | None):
            raise TypeError(f"supports gives {reason!r}, expected None or the reason why not")
        route = getattr(inv, "route", None)
        if reason is not None or route is None:
            return reason
        if route.sequence_axes and not hasattr(self.load(), "shares_sequence"):
            return "it does not say whether devices may share a sequence"
        return self._variance_reason(inv) if route.batch_invariant else None

    def _variance_reason(self, inv: Any) -> str | None:
        """Returns why a call is not batch-invariant, where ``supports`` has not said it."""
        kernel: Any = self.load()
        if not hasattr(kernel, "variant_reason"):
            return "batch_invariant: it does not say whether its results depend on the batch"
        return None if self.supports is not None else kernel.supports(inv)

    def priority_of(self, inv: Any) -> int:
        """Its priority for a call that it supports, or for any (None)."""
        if self.priority_for is None or inv is None:
            return self.priority
        return checked_priority(self.priority_for(inv), self.name, "what priority_for gives")

    def notes_on(self, inv: Any) -> tuple[str, ...]:
        """Returns its notes on a call that it supports."""
        replaced = (self.replacement,) if self.replaces else ()
        return replaced if self.notes is None else (*replaced, *self.notes(inv))

    @property
    def replacement(self) -> str:
        """A sentence that says who registered it in whose place."""
        return f"{self.name} of {self.origin} replaces that of {self.replaces}"

    @property
    def name(self) -> str:
        """Algorithm, platform and backend in one word, e.g. "flash_attention/xla/any"."""
        return f"{self.algorithm}/{self.platform.value}/{self.backend.value}"


KernelSpec = Implementation


@dataclass(frozen=True)
class Resolved:
    """The runner of a call: a function of ``(*args, cfg=..., **kwargs)`` and its origin.

    Attributes:
        fn: the function.
        platform: its platform, None for a kernel's generic ``run``.
        impl: the registered Implementation, None for a kernel's own method.
        name: how reports call it.
        differentiable: whether it has gradients worth validating.
        sequence_axes: the mesh axes over which devices share the sequence of the call.
        skipped: ``(name, reason)`` of every other implementation.
    """

    fn: Callable[..., Any]
    platform: Platform | None
    impl: Implementation | None = None
    name: str = "run"
    differentiable: bool = False
    sequence_axes: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()


def identify(algorithm: str, platform: Any, backend: Any) -> tuple[str, Platform, Backend]:
    """Returns the checked identity of a registration; ValueError names what is wrong."""
    if not isinstance(algorithm, str) or not algorithm.strip():
        raise ValueError(f"algorithm={algorithm!r}: expected a name")
    p, b = parse_platform(platform), parse_backend(backend)
    if p is None:
        raise ValueError(
            f"platform={platform!r}: an implementation belongs to one platform, expected one of "
            f"{', '.join(x.value for x in Platform)}"
        )
    if b not in LEGAL_BACKENDS[p]:
        raise ValueError(
            f"backend={backend!r} is not one that platform {p.value!r} runs on: expected one of "
            f"{', '.join(x.value for x in LEGAL_BACKENDS[p])}"
        )
    return normalized(algorithm), p, b


def checked_priority(value: Any, name: str, where: str = "priority") -> int:
    """``value`` if it is a number; ValueError names the implementation otherwise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{name}: {where} is {value!r}, expected a number")
    return cast(int, value)


def normalized(algorithm: str) -> str:
    """The form in which names of algorithms are stored and compared."""
    return algorithm.strip().lower()


def signature_of(fn: Callable[..., Any], name: str) -> inspect.Signature:
    """Signature of an implementation.

    Raises:
        ValueError: no signature, a positional-only parameter, or no keyword ``cfg``.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: its signature cannot be read: {error}") from error
    for p in signature.parameters.values():
        if p.kind is p.POSITIONAL_ONLY:
            raise ValueError(f"{name}: parameter {p.name!r} is positional-only; all need keywords")
    cfg = signature.parameters.get("cfg")
    if cfg is None or cfg.kind in (cfg.VAR_POSITIONAL, cfg.VAR_KEYWORD):
        raise ValueError(f"{name}: needs a keyword parameter 'cfg', has {signature}")
    return signature


def run_signature(fn: Callable[..., Any], name: str) -> inspect.Signature:
    """Signature of the ``run`` method of a kernel that has this implementation; no annotations."""
    kind = inspect.Parameter
    self = kind("self", kind.POSITIONAL_OR_KEYWORD)
    cfg = kind("cfg", kind.KEYWORD_ONLY)
    parameters = [p.replace(annotation=kind.empty) for p in _others(signature_of(fn, name))]
    last = len(parameters) - any(p.kind is kind.VAR_KEYWORD for p in parameters)
    return inspect.Signature([self, *parameters[:last], cfg, *parameters[last:]])


def _others(signature: inspect.Signature) -> list[inspect.Parameter]:
    return [p for p in signature.parameters.values() if p.name != "cfg"]


def hard_differences(reference: inspect.Signature, other: inspect.Signature) -> list[str]:
    """Different names, order or kinds: calls of one would not fit the other."""
    ours, theirs = _others(reference), _others(other)
    a, b = [p.name for p in ours], [p.name for p in theirs]
    if a != b:
        missing = [n for n in a if n not in b]
        extra = [n for n in b if n not in a]
        if not missing and not extra:
            return [f"parameters are in the order {', '.join(b)}, expected {', '.join(a)}"]
        lines = [f"lacks parameter {n!r}" for n in missing]
        return lines + [f"has the unknown parameter {n!r}" for n in extra]
    return [
        f"parameter {p.name!r} is {q.kind.description}, expected {p.kind.description}"
        for p, q in zip(ours, theirs, strict=True)
        if p.kind is not q.kind
    ]


def soft_differences(reference: inspect.Signature, other: inspect.Signature) -> list[str]:
    """Different defaults or annotations of parameters that both have."""
    lines = []
    theirs = other.parameters
    for p in _others(reference):
        q = theirs.get(p.name)
        if q is None:
            continue
        if not _same_default(p.default, q.default):
            lines.append(
                f"parameter {p.name!r} has {_show(q.default)}, expected {_show(p.default)}"
            )
        a, b = _annotation(p), _annotation(q)
        if a and b and a != b:
            lines.append(f"parameter {p.name!r} is annotated {b}, expected {a}")
    return lines


def _show(default: Any) -> str:
    return "no default" if default is inspect.Parameter.empty else f"default {default!r}"


def _same_default(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if a is inspect.Parameter.empty or b is inspect.Parameter.empty:
        return False
    try:
        return bool(a == b)
    except (TypeError, ValueError):
        return repr(a) == repr(b)


def _annotation(p: inspect.Parameter) -> str:
    """Text of an annotation without module prefixes and spaces; empty when there is none."""
    if p.annotation is inspect.Parameter.empty:
        return ""
    text = p.annotation if isinstance(p.annotation, str) else inspect.formatannotation(p.annotation)
    return re.sub(r"\b\w+\.|\s", "", text)


_HEAD = ("algorithm", "platform", "backend", "priority", "gradients", "version")


def table(implementations: Sequence[Implementation]) -> str:
    """One line per implementation under a heading."""
    rows = [_HEAD]
    for i in implementations:
        gradients = "yes" if i.differentiable else "no"
        priority = i.priority if i.priority_for is None else f"{i.priority}, by call"
        cells = (i.platform, i.backend, priority, gradients, i.version)
        rows.append((i.algorithm, *map(str, cells)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def signature_differences(implementations: Sequence[Implementation]) -> list[str]:
    """Returns how the others differ from the first, one line per difference. Loads all of them."""
    lines: list[str] = []
    first: tuple[Implementation, inspect.Signature] | None = None
    for i in implementations:
        try:
            signature = signature_of(i.load(), i.name)
        except (LazyLoadError, ValueError) as error:
            lines.append(f"{i.name}: {error}")
            continue
        if first is None:
            first = i, signature
            continue
        different = hard_differences(first[1], signature) + soft_differences(first[1], signature)
        lines += [f"{i.name} differs from {first[0].name}: {d}" for d in different]
    return lines
