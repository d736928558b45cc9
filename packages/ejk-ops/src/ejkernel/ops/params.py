"""Configs: frozen dataclasses whose fields declare what they may hold.

A config names how a kernel is cut into tiles, never what it computes. ``None`` in a tile field
leaves the choice to the implementation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ejkernel.ops.errors import ConfigError
from ejkernel.ops.platforms import parse_backend, parse_platform
from ejkernel.ops.utils.allowed import allow_in_files
from ejkernel.ops.utils.serialization import to_plain

ParamsT = TypeVar("ParamsT", bound="Params")

_CHECK = "ejkernel_check"
TILE_RANGE = (16, 1024)
WARPS = (1, 2, 4, 8, 16)
STAGES = (1, 8)


def _checked(
    legal: str, accept: Callable[[int], bool], *, optional: bool = True
) -> Callable[[Any], int | None]:
    legal = f"{legal} or None" if optional else legal

    def check(value: Any) -> int | None:
        if value is None and optional:
            return None
        if not isinstance(value, bool):  # which is no size
            with contextlib.suppress(TypeError):
                number = operator.index(value)
                if accept(number):
                    return number
        raise ConfigError(f"expected {legal}")

    return check


def checked_field(check: Callable[[Any], Any], default: Any = None) -> Any:
    """A dataclass field whose value is ``check(value)``; ``check`` raises ConfigError(reason)."""
    return field(default=default, metadata={_CHECK: check})


def _field_of(legal: str, accept: Callable[[int], bool]) -> Callable[..., Any]:
    """A function ``(default=None)`` that declares such a field."""
    return functools.partial(checked_field, _checked(legal, accept))


tile_field = _field_of(
    "a power of two from {} to {}".format(*TILE_RANGE),
    lambda n: TILE_RANGE[0] <= n <= TILE_RANGE[1] and n & (n - 1) == 0,
)
rows_field = _field_of(
    f"a multiple of 16 up to {TILE_RANGE[1]}", lambda n: 0 < n <= TILE_RANGE[1] and n % 16 == 0
)
warps_field = _field_of("one of " + ", ".join(map(str, WARPS)), lambda n: n in WARPS)
stages_field = _field_of(
    "an integer from {} to {}".format(*STAGES), lambda n: STAGES[0] <= n <= STAGES[1]
)
count_field = _field_of("an integer >= 1", lambda n: n >= 1)  # of heads, splits, pages
_GIVEN = _checked("an integer >= 1", lambda n: n >= 1, optional=False)
bytes_field = _field_of("a positive number of bytes", lambda n: n > 0)


CONTEXT_PARALLEL = ("auto", "all_gather", "ring", "ring_packed", "ring_remote_copy", "ulysses")


def strategy_field() -> Any:
    """A field that names how devices share a sequence; "auto" leaves it to the kernel."""

    def check(value: Any) -> str:
        if value not in CONTEXT_PARALLEL:
            raise ConfigError(f"expected one of {', '.join(CONTEXT_PARALLEL)}")
        return value

    return checked_field(check, CONTEXT_PARALLEL[0])


def flag_field() -> Any:
    """A field that is True, False, or None where the implementation decides."""

    def check(value: Any) -> bool | None:
        if value is not None and not isinstance(value, bool):
            raise ConfigError("expected True, False or None")
        return value

    return checked_field(check)


class Nested(Generic[ParamsT]):
    """The type of a field of nested parameters: read as ``ParamsT`` or None, set as a mapping too.

    Type checkers take the types of a constructor's arguments from ``__set__``; nothing is stored
    in an instance of this class.
    """

    def __get__(self, instance: object, owner: Any) -> ParamsT | None: ...

    def __set__(self, instance: object, value: ParamsT | Mapping[str, Any] | None) -> None: ...


def params_field(cls: type[Params]) -> Any:
    """Nested parameters: an instance of ``cls``, a mapping of its fields, or None."""

    def check(value: Any) -> Params | None:
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        raise ConfigError(f"expected {cls.__name__}, a mapping of its fields, or None")

    return checked_field(check, None)


def _name_field(parse: Callable[[Any], Any], default: str) -> Any:
    """Returns a field for the name of a platform or backend, in lower case."""

    def check(value: Any) -> str:
        try:
            member = parse(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from None
        return default if member is None else member.value

    return checked_field(check, default)


@dataclass(frozen=True)
class Params:
    """Base of frozen parameter records: validated fields, dict and JSON forms.

    Raises ConfigError, naming the field, the value and what is allowed, when a field declared
    with ``tile_field`` and its relatives is given an illegal value. Subclasses are written with
    ``@dataclass(frozen=True)``; numpy integers become Python ints.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        allow_in_files(cls)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            check = f.metadata.get(_CHECK)
            if check is None:
                continue
            value = getattr(self, f.name)
            try:
                object.__setattr__(self, f.name, check(value))
            except ConfigError as error:
                name = f"{type(self).__name__}.{f.name}"
                raise ConfigError(f"{name}={value!r}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """All fields, nested parameters as dicts."""
        return to_plain(self)

    def to_json(self) -> str:
        """JSON text of ``to_dict``."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls: type[ParamsT], d: Mapping[str, Any]) -> ParamsT:
        """The record with the fields of ``d``, defaults elsewhere.

        Raises:
            ConfigError: unknown field or illegal value.
            TypeError: ``d`` is not a mapping.
        """
        if not isinstance(d, Mapping):
            raise TypeError(f"{cls.__name__}.from_dict expects a mapping, got {d!r}")
        names = [f.name for f in dataclasses.fields(cls) if f.init]
        unknown = sorted(str(name) for name in set(d) - set(names))
        if unknown:
            raise ConfigError(
                f"{cls.__name__} has no field {', '.join(unknown)}: expected {', '.join(names)}"
            )
        return cls(**d)

    @classmethod
    def from_json(cls: type[ParamsT], s: str) -> ParamsT:
        """Inverse of ``to_json``; ConfigError when ``s`` is not such text."""
        try:
            d = json.loads(s)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{cls.__name__}: not JSON: {error}") from error
        if not isinstance(d, dict):
            raise ConfigError(f"{cls.__name__}: expected a JSON object, got {s!r}")
        return cls.from_dict(d)

    def replace(self: ParamsT, **fields: Any) -> ParamsT:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **fields)


@dataclass(frozen=True)
class BwdParams(Params):
    """Tiles of a backward kernel; None = the implementation decides.

    Block sizes are powers of two in [16, 1024], ``num_warps`` is 1, 2, 4, 8 or 16, ``num_stages``
    lies in [1, 8]; else ConfigError.
    """

    q_blocksize: int | None = tile_field()
    kv_blocksize: int | None = tile_field()
    blocksize_m: int | None = tile_field()
    blocksize_n: int | None = tile_field()
    blocksize_k: int | None = tile_field()
    num_warps: int | None = warps_field()
    num_stages: int | None = stages_field()


@dataclass(frozen=True)
class FwdParams(Params):
    """Tiles of a forward kernel; None = the implementation decides.

    As BwdParams; ``blocksize_heads`` and ``num_key_splits`` are integers >= 1. A mapping that
    gives ``warpgroups`` is one of WarpgroupParams.
    """

    q_blocksize: int | None = tile_field()
    kv_blocksize: int | None = tile_field()
    blocksize_m: int | None = tile_field()
    blocksize_n: int | None = tile_field()
    blocksize_k: int | None = tile_field()
    blocksize_heads: int | None = count_field()
    blocksize_keys: int | None = tile_field()
    num_key_splits: int | None = count_field()
    num_warps: int | None = warps_field()
    num_stages: int | None = stages_field()

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> FwdParams:
        """Returns the record with the fields of ``d``; WarpgroupParams if it has ``warpgroups``."""
        if cls is FwdParams and isinstance(d, Mapping) and "warpgroups" in d:
            return WarpgroupParams.from_dict(d)
        return super().from_dict(d)


@dataclass(frozen=True)
class WarpgroupParams(FwdParams):
    """The tiles of a forward kernel whose warpgroups share the rows of a tile, as they run.

    Three warpgroups of 64 rows are no power of two, nor need the keys of a step be one: block
    sizes are multiples of 16 up to 1024. ``warpgroups``, those that compute, must be given. A
    kernel runs exactly these tiles or raises ConfigError.
    """

    q_blocksize: int | None = rows_field()
    kv_blocksize: int | None = rows_field()
    warpgroups: int = field(kw_only=True, metadata={_CHECK: _GIVEN})


def warpgroups_of(cfg: Any) -> int | None:
    """``warpgroups`` of a config's ``fwd_params``, or None."""
    return config_field(config_field(cfg, "fwd_params"), "warpgroups")


def config_field(cfg: Any, name: str, default: Any = None) -> Any:
    """A field of a config or of a mapping of its fields; ``default`` where absent or None."""
    value = cfg.get(name) if isinstance(cfg, Mapping) else getattr(cfg, name, None)
    return default if value is None else value


@dataclass(frozen=True)
class OpConfig(Params):
    """Base of the configs of operations.

    ``platform`` ("auto", "triton", "pallas", "xla", "cuda") forces a platform, ``backend``
    ("any", "gpu", "tpu", "cpu") filters implementations by hardware. Both come first and are
    stored as lower-case strings.
    """

    platform: str = _name_field(parse_platform, "auto")
    backend: str = _name_field(parse_backend, "any")
