"""Names of platforms (who wrote the code path) and backends (which hardware runs it)."""

from __future__ import annotations

from enum import StrEnum


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


def parse_platform(value: str | Platform | None, name: str = "platform") -> Platform | None:
    """The Platform that ``value`` names; None for None and "auto". Case-insensitive.

    Raises:
        ValueError: unknown name; the message lists the legal ones.
        TypeError: neither a string nor a Platform nor None.
    """
    if value is None or isinstance(value, Platform):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, a Platform or None, got {value!r}")
    word = value.strip().lower()
    if word == "auto":
        return None
    try:
        return Platform(word)
    except ValueError:
        legal = ", ".join(["auto", *(p.value for p in Platform)])
        raise ValueError(f"{name}={value!r} is unknown: expected one of {legal}") from None


def parse_backend(value: str | Backend | None, name: str = "backend") -> Backend | None:
    """The Backend that ``value`` names; None for None. Case-insensitive.

    Raises:
        ValueError: unknown name; the message lists the legal ones.
        TypeError: neither a string nor a Backend nor None.
    """
    if value is None or isinstance(value, Backend):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, a Backend or None, got {value!r}")
    try:
        return Backend(value.strip().lower())
    except ValueError:
        legal = ", ".join(b.value for b in Backend)
        raise ValueError(f"{name}={value!r} is unknown: expected one of {legal}") from None
