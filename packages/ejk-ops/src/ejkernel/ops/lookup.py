"""The rules of a look-up: which implementations hardware and filters admit, and in which order."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

from ejkernel.ops.implementation import Implementation
from ejkernel.ops.interpret import interpreting
from ejkernel.ops.platforms import INTERPRETABLE, LEGAL_BACKENDS, Backend, Platform
from ejkernel.ops.utils.device import TargetDevice

Refusal = tuple[Implementation, str]


@dataclass(frozen=True)
class Survey:
    """What the registry knows about one look-up.

    Attributes:
        algorithm: lower-case name.
        platform: the forced platform, None for automatic choice.
        target: the device looked up for.
        usable: implementations that can do it, best first.
        refused: the others that were considered, each with the reason why not.
    """

    algorithm: str
    platform: Platform | None
    target: TargetDevice
    usable: tuple[Implementation, ...]
    refused: tuple[Refusal, ...]


def platforms_for(kind: Backend) -> tuple[Platform, ...]:
    """Platforms that may have an implementation for this hardware."""
    return tuple(p for p, b in LEGAL_BACKENDS.items() if kind in b or Backend.ANY in b)


def filtered(i: Implementation, wanted: Backend | None) -> str | None:
    """Why the caller's ``backend`` excludes it, None when it does not."""
    if wanted in (None, Backend.ANY, i.backend) or i.backend is Backend.ANY:
        return None
    return f"it is for backend {i.backend.value!r}, {wanted.value!r} was asked for"


def misplaced(i: Implementation, target: TargetDevice, forced: bool) -> str | None:
    """Why the hardware cannot run it, None when it can.

    Interpretation counts for forced platforms only: automatic choice never interprets.
    """
    device = repr(target.name)
    if target.name != target.kind.value:
        device += f" ({target.kind.value})"
    if i.platform is Platform.CUDA and not target.is_nvidia:
        return f"it needs an NVIDIA gpu, the target device is {device}"
    if i.backend in (Backend.ANY, target.kind):
        return None
    if forced and i.platform in INTERPRETABLE and interpreting():
        return None
    reason = f"it needs a {i.backend.value}, the target device is {device}"
    if forced and i.platform in INTERPRETABLE:
        reason += "; EJKERNEL_INTERPRET=1 runs it in an interpreter"
    return reason


def rank(i: Implementation, target: TargetDevice, inv: Any = None) -> tuple[int | bool, ...]:
    """Sort key, best first.

    What runs here before what would be interpreted; then priority, the device's own platform,
    hardware, registration order. ``inv`` is a call that ``i`` supports.
    """
    interpreted = i.backend not in (Backend.ANY, target.kind)
    native = i.platform is target.native_platform
    # Off its hardware a kernel is interpreted, and of Pallas only TPU kernels can be.
    other = i.backend not in (target.kind, Backend.TPU)
    return (interpreted, -i.priority_of(inv), not native, other, i.order)


def argument_of(refusal: Refusal) -> str | None:
    """The parameter a reason is about: the one whose name it mentions first."""
    implementation, reason = refusal
    if not implementation.loaded:
        return None
    names = set(inspect.signature(implementation.fn).parameters) - {"cfg"}
    return next((word for word in re.findall(r"\w+", reason) if word in names), None)
