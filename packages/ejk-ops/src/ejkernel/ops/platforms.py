"""Names of platforms (who wrote the code path) and backends (which hardware runs it)."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar

E = TypeVar("E", bound=StrEnum)


class Platform(StrEnum):
    """A way of writing kernels."""

    TRITON = "triton"
    PALLAS = "pallas"
    XLA = "xla"
    CUDA = "cuda"


class Backend(StrEnum):
    """A kind of hardware."""

    GPU = "gpu"
    TPU = "tpu"
    CPU = "cpu"
    ANY = "any"


# The platform that is at home on a kind of hardware: it wins ties between equal priorities.
NATIVE_PLATFORM = {
    Backend.GPU: Platform.TRITON,
    Backend.TPU: Platform.PALLAS,
    Backend.CPU: Platform.XLA,
}

# Where an implementation of each platform may claim to run.
LEGAL_BACKENDS = {
    Platform.TRITON: (Backend.GPU,),
    Platform.CUDA: (Backend.GPU,),
    Platform.PALLAS: (Backend.GPU, Backend.TPU),
    Platform.XLA: (Backend.ANY, Backend.CPU, Backend.GPU, Backend.TPU),
}

# Platforms whose kernels have an interpreter for machines without the hardware.
INTERPRETABLE = (Platform.PALLAS, Platform.TRITON)


def parse_platform(value: str | Platform | None) -> Platform | None:
    """The Platform that ``value`` names; None for None and "auto". Case-insensitive.

    Raises:
        ValueError: unknown name; the message lists the legal ones.
        TypeError: neither a string nor a Platform nor None.
    """
    auto = isinstance(value, str) and value.strip().lower() == "auto"
    return None if auto else _member(Platform, value, "platform", "auto")


def parse_backend(value: str | Backend | None) -> Backend | None:
    """The Backend that ``value`` names; None for None. Case-insensitive.

    Raises:
        ValueError: unknown name; the message lists the legal ones.
        TypeError: neither a string nor a Backend nor None.
    """
    return _member(Backend, value, "backend")


def _member(kind: type[E], value: Any, name: str, *besides: str) -> E | None:
    if value is None or isinstance(value, kind):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, a {kind.__name__} or None, got {value!r}")
    try:
        return kind(value.strip().lower())
    except ValueError:
        legal = ", ".join([*besides, *(member.value for member in kind)])
        raise ValueError(f"{name}={value!r} is unknown: expected one of {legal}") from None
