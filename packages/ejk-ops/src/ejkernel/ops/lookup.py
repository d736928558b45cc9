"""The rules of a look-up: which implementations hardware and filters admit, and in which order."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ejkernel.ops import discovery
from ejkernel.ops.errors import KernelNotFound, KernelNotSupported, KernelUnavailable
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.interpret import interpreting
from ejkernel.ops.platforms import INTERPRETABLE, LEGAL_BACKENDS, Backend, Platform
from ejkernel.ops.utils.device import TargetDevice

Refusal = tuple[Implementation, str]


@dataclass(frozen=True)
class Survey:
    """The registry's answer to one look-up.

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


def filtered(i: Implementation, backend: Backend | None) -> str | None:
    """Returns why the caller's ``backend`` excludes it, None when it does not."""
    if backend in (None, Backend.ANY, i.backend) or i.backend is Backend.ANY:
        return None
    return f"it is for backend {i.backend.value!r}, {backend.value!r} was requested"


_INTERPRETER = "; EJKERNEL_INTERPRET=1 runs it in an interpreter"


def misplaced(i: Implementation, target: TargetDevice, forced: bool) -> str | None:
    """Returns why the hardware cannot run it, None when it can.

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
        reason += _INTERPRETER
    return reason


def with_reason_of_call(i: Implementation, inv: Any, misplaced: str) -> str:
    """Returns why the hardware cannot run it, after the reason why it cannot do the call, if any.

    A reason that names no argument repeats the hardware's and is left out.
    """
    try:
        reason = i.why_not(inv)
    except Exception:  # it need not work where it cannot run
        return misplaced
    about_call = reason is not None and argument_of((i, reason), inv) is not None
    return f"{reason}; besides, {misplaced}" if about_call else misplaced


def rank(i: Implementation, target: TargetDevice, inv: Any = None) -> tuple[int | bool, ...]:
    """Sort key, best first.

    Native before interpreted ones; then priority, the device's own platform, registration order.
    ``inv`` is a call that ``i`` supports.
    """
    interpreted = i.backend not in (Backend.ANY, target.kind)
    native = i.platform is target.native_platform
    # Off its hardware a kernel is interpreted, and of Pallas only TPU kernels can be.
    other = interpreted and i.backend is not Backend.TPU
    return (interpreted, -i.priority_of(inv), not native, other, i.order)


def argument_of(refusal: Refusal, inv: Any) -> str | None:
    """The parameter a reason is about: the one whose name it mentions first."""
    implementation, reason = refusal
    names: set[str] = set(getattr(inv, "arguments", ()))
    if implementation.loaded:
        names |= set(inspect.signature(implementation.fn).parameters) - {"cfg"}
    return next((word for word in re.findall(r"\w+", reason) if word in names), None)


def unknown_algorithm(
    algorithm: str, registered: Sequence[str], packages: discovery.Packages
) -> KernelNotFound:
    """Nothing is registered under the name."""
    return KernelNotFound(
        f"algorithm {algorithm!r} is unknown: registered are {', '.join(registered) or 'none'}; "
        f"installed kernel packages: {packages.describe()}; "
        f"more come with: {discovery.install_line()}"
    )


def nobody_supports(survey: Survey, everything: Survey, inv: Any) -> KernelNotSupported:
    """Automatic choice, implementations exist, none can do the call here."""
    reasons: Sequence[Refusal] = survey.refused or everything.refused
    text = "; ".join(f"{i.platform.value}/{i.backend.value}: {reason}" for i, reason in reasons)
    argument = argument_of(reasons[0], inv) if len(reasons) == 1 else None
    return KernelNotSupported(
        algorithm=survey.algorithm, platform=None, reason=text, argument=argument
    )


def forced_refuses(survey: Survey, everything: Survey, inv: Any) -> KernelNotSupported:
    """The forced platform has implementations, none can do the call here."""
    reasons = survey.refused
    hardware = all(reason == misplaced(i, survey.target, True) for i, reason in reasons)
    texts = dict.fromkeys(reason.removesuffix(_INTERPRETER) for _, reason in reasons)
    advice = _INTERPRETER if any(r.endswith(_INTERPRETER) for _, r in reasons) else ""
    return KernelNotSupported(
        **_named(survey, everything),
        reason="; ".join(texts) + advice,
        argument="platform" if hardware else argument_of(reasons[0], inv),
    )


def package_failed(survey: Survey, everything: Survey, cause: Exception) -> KernelUnavailable:
    """The forced platform's package is installed but cannot be loaded."""
    return KernelUnavailable(
        **_named(survey, everything),
        reason=f"its package is installed but failed to load: {cause}",
        argument="platform",
    )


def nothing_registered(
    survey: Survey,
    everything: Survey,
    implementations: Sequence[Implementation],
    packages: discovery.Packages,
) -> KernelNotFound:
    """The forced platform has no implementation of the algorithm."""
    forced, target = survey.platform, survey.target
    assert forced is not None
    text = (
        f"{survey.algorithm} has no implementation on platform {forced.value!r}: registered are "
        f"{', '.join(i.name for i in implementations) or 'none'}; installed kernel packages: "
        f"{packages.describe()}; "
        f"more may come with: {discovery.install_line(forced)}"
    )
    needs = LEGAL_BACKENDS[forced]
    if Backend.ANY in needs or target.kind in needs:
        return KernelNotFound(text)
    device = " or ".join(backend.value for backend in needs)
    reason = f"platform {forced.value!r} needs a {device}, the target device is {target.name!r}"
    named = _named(survey, everything)
    return KernelUnavailable(
        f"{text}; besides, {reason}", **named, reason=reason, argument="platform"
    )


def _named(survey: Survey, everything: Survey) -> Mapping[str, str | None]:
    forced = survey.platform
    others = (i.platform.value for i in everything.usable if i.platform is not forced)
    return {
        "algorithm": survey.algorithm,
        "platform": None if forced is None else forced.value,
        "nearest": next(others, None),
    }
