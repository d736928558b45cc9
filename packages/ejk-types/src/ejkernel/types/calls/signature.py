"""The boundary: a public function's signature, checked once with jaxtyping and beartype.

A value that does not fit its annotation, alone or together with the axes of the arguments before
it, is an InvalidArgument that names the argument, what is expected and what was given.
``EJKERNEL_TYPECHECK=0`` switches the check off.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from ejkernel.types.calls.axes import meaning
from ejkernel.types.calls.words import alternatives, describe_value, expected, forms, is_array
from ejkernel.types.errors import InvalidArgument

TAIL = ("platform", "cfg", "mesh", "in_specs", "out_specs")
REQUIRED = inspect.Parameter.empty

NAMES_ELSEWHERE = {
    "is_causal": ("causal",),
    "mask": ("attention_mask", "mask_info=MaskInfo(attention_mask=mask)"),
    "scale": ("softmax_scale",),
    "sm_scale": ("softmax_scale",),
    "segment_ids": ("q_segment_ids", "mask_info=MaskInfo.from_segments(segment_ids)"),
    "local_window_size": ("sliding_window",),
    "window_size": ("sliding_window",),
    "softcap": ("logits_soft_cap",),
    "sinks": ("softmax_aux",),
}
"""Arguments of other attention libraries, and ours that take their place; the first one counts."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of an operation.

    Attributes:
        name: its name.
        annotation: as written.
        default: its default, ``REQUIRED`` without one.
        forms: ``(family, axes)`` of each array form it may take; empty for static parameters.
    """

    name: str
    annotation: Any
    default: Any
    forms: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Boundary:
    """The parameters of an operation, without the common tail of public functions."""

    name: str
    function: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    seeds: tuple[str, ...] = ()

    @classmethod
    def from_function(
        cls, name: str, function: Callable[..., Any], seeds: tuple[str, ...] = ()
    ) -> Boundary:
        """Read the signature of ``function``; annotations must be objects, not strings."""
        signature = inspect.signature(function)
        return cls(
            name,
            function,
            tuple(
                Parameter(p.name, p.annotation, p.default, forms(p.annotation))
                for p in signature.parameters.values()
                if p.name not in TAIL
            ),
            seeds,
        )

    def check_words(self, outputs: Sequence[str] = ()) -> None:
        """Raise TypeError for an axis of an argument or output whose word is not in ``axes``."""
        axes_by_name = [(p.name, axes) for p in self.parameters for _, axes in p.forms]
        for i, axes in enumerate(outputs):
            if not axes.startswith("="):
                axes_by_name.append((f"output {i}", axes))
            elif axes[1:] not in self.names:
                raise TypeError(f"{self.name}, output {i}: there is no argument {axes[1:]!r}")
        for where, axes in axes_by_name:
            for word in axes.split():
                try:
                    meaning(word)
                except ValueError as error:
                    raise TypeError(f"{self.name}, {where}: {error}") from None

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters)

    @cached_property
    def positional(self) -> tuple[str, ...]:
        """The parameters that may be given without their names."""
        parameters = inspect.signature(self.function).parameters.values()
        return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        """Every parameter with its default, ``REQUIRED`` where there is none."""
        return {p.name: p.default for p in self.parameters}

    @cached_property
    def array_parameters(self) -> tuple[Parameter, ...]:
        """The parameters that take arrays, in signature order."""
        return tuple(
            p for p in self.parameters if p.forms or jax.Array in alternatives(p.annotation)
        )

    @cached_property
    def index_names(self) -> tuple[str, ...]:
        """The parameters that take integer arrays only; they are used as int32."""
        integers = (p for p in self.parameters if {family for family, _ in p.forms} == {"int"})
        return tuple(p.name for p in integers if p.name not in self.seeds)

    @cached_property
    def float_names(self) -> tuple[str, ...]:
        """The parameters that take arrays of floats."""
        return tuple(p.name for p in self.parameters if p.forms and "float" in p.forms[0][0])

    @cached_property
    def scale_names(self) -> tuple[str, ...]:
        """The parameters that take a float or an array of floats."""
        floats = (p for p in self.parameters if p.name in self.float_names)
        return tuple(p.name for p in floats if float in alternatives(p.annotation))

    @cached_property
    def required(self) -> frozenset[str]:
        """The parameters without a default."""
        return frozenset(p.name for p in self.parameters if p.default is REQUIRED)

    @cached_property
    def pools(self) -> tuple[str, ...]:
        """The arrays of pages, which many sequences share."""
        return tuple(
            p.name for p in self.parameters if any(axes.startswith("pages ") for _, axes in p.forms)
        )

    @cached_property
    def static_names(self) -> frozenset[str]:
        return frozenset(p.name for p in self.parameters if not is_array(p.annotation))

    def by_name(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments by name, defaults applied.

        Raises:
            TypeError: an argument that is unknown, missing, given twice, or one too many.
        """
        named = dict(self.defaults)
        positional, label = self.positional, self.name
        if len(args) > len(positional):
            raise TypeError(
                f"{label}() takes {len(positional)} positional arguments, given {len(args)}"
            )
        for name, value in zip(positional, args, strict=False):
            if name in kwargs:
                raise TypeError(f"{label}() got multiple values for argument {name!r}")
            named[name] = value
        unknown = [name for name in kwargs if name not in named]
        if unknown:
            text = f"{label}() got an unexpected keyword argument {unknown[0]!r}"
            raise TypeError(text + self._name_here(unknown[0]))
        named.update(kwargs)
        missing = [name for name, value in named.items() if value is REQUIRED]
        if missing:
            raise TypeError(f"{label}() is missing the argument {missing[0]!r}")
        return named

    def _name_here(self, foreign: str) -> str:
        """Returns a hint for an unknown argument, our name for it, or an empty string."""
        for ours in NAMES_ELSEWHERE.get(foreign, ()):
            if ours.partition("=")[0] in self.names:
                return f"; here it is {ours}"
        return ""

    def differing(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments that differ from their defaults, which a call has to carry."""
        defaults = self.defaults
        return {name: v for name, v in arguments.items() if v is not defaults[name]}

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raise InvalidArgument for the first argument that does not fit its annotation."""
        from beartype import BeartypeConf
        from beartype.door import is_bearable
        from jaxtyping import jaxtyped

        conf = BeartypeConf(is_pep484_tower=True)
        # the context makes an axis name mean one size throughout the call
        with jaxtyped("context"):
            for p in self.parameters:
                value = arguments[p.name]
                if value is p.default:
                    continue
                # True is an int to Python, and a width of 1 to nobody who writes it
                switch = isinstance(value, bool) and bool not in alternatives(p.annotation)
                fits = not switch and is_bearable(value, p.annotation, conf=conf)
                if not fits:
                    raise InvalidArgument(self._message(p, arguments))

    def _message(self, p: Parameter, arguments: Mapping[str, Any]) -> str:
        value = arguments[p.name]
        text = f"{p.name}: expected {expected(p.annotation)}, given {describe_value(value)}"
        if not hasattr(value, "shape"):
            return text
        sizes = self.sizes({n: arguments[n] for n in self.names[: self.names.index(p.name)]})
        words = {w.lstrip("#*") for _, axes in p.forms for w in axes.split()}
        bound = [f"{word}={size}" for word, size in sizes.items() if word in words]
        return f"{text} (by the arguments before: {', '.join(bound)})" if bound else text

    def sizes(self, arguments: Mapping[str, Any]) -> dict[str, int]:
        """Size of every named axis, from the first array that has it."""
        sizes: dict[str, int] = {}
        for p in self.parameters:
            value = arguments.get(p.name)
            if not hasattr(value, "shape"):
                continue
            for word, size in zip(axes_of(p, value), value.shape, strict=False):
                if word.isidentifier() and not word.startswith("_"):
                    sizes.setdefault(word, size)
        return sizes


def drop_parameters(function: Callable[..., Any], *names: str) -> Callable[..., None]:
    """Returns a declaration with the parameters of ``function`` except the named ones."""

    def declaration() -> None: ...

    signature = inspect.signature(function)
    remaining = [p for p in signature.parameters.values() if p.name not in names]
    vars(declaration)["__signature__"] = signature.replace(parameters=remaining)
    declaration.__annotations__ = {p.name: p.annotation for p in remaining} | {"return": None}
    return declaration


def axes_of(p: Parameter, value: Any, override: Mapping[str, str] | None = None) -> list[str]:
    """One word per axis of ``value``: the form of its rank, ``*names`` numbered from 0."""
    rank = value if isinstance(value, int) else len(value.shape)
    fallback: list[str] = []
    overriding = [override[p.name]] if override and p.name in override else []
    for axes in (*overriding, *(axes for _, axes in p.forms)):
        words = axes.split()
        star = next((i for i, w in enumerate(words) if w.startswith("*")), None)
        if star is None:
            if len(words) == rank:
                return words
        elif rank >= len(words) - 1:
            extra = rank - (len(words) - 1)
            name = words[star][1:]
            spread = [f"{name}_{i}" for i in range(extra)]
            candidate = words[:star] + spread + words[star + 1 :]
            if extra and not fallback:
                fallback = candidate
    return fallback or ["_"] * rank
