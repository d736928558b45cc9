"""The errors of look-ups that found nothing, with everything that helps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ejkernel.ops import discovery
from ejkernel.ops.errors import KernelNotFound, KernelNotSupported, KernelUnavailable
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.lookup import Refusal, Survey, argument_of, misplaced
from ejkernel.ops.platforms import LEGAL_BACKENDS, Backend


def unknown_algorithm(
    algorithm: str, known: Sequence[str], packages: discovery.Packages
) -> KernelNotFound:
    """Nothing is registered under the name."""
    return KernelNotFound(
        f"algorithm {algorithm!r} is unknown: registered are {', '.join(known) or 'none'}; "
        f"installed kernel packages: {packages.describe()}; "
        f"more come with: {discovery.install_line()}"
    )


def nobody_supports(survey: Survey, everything: Survey) -> KernelNotSupported:
    """Automatic choice, implementations exist, none can do the call here."""
    reasons: Sequence[Refusal] = survey.refused or everything.refused
    text = "; ".join(f"{i.platform.value}/{i.backend.value}: {reason}" for i, reason in reasons)
    argument = argument_of(reasons[0]) if len(reasons) == 1 else None
    return KernelNotSupported(
        algorithm=survey.algorithm, platform=None, reason=text, argument=argument
    )


def forced_refuses(survey: Survey, everything: Survey) -> KernelNotSupported:
    """The forced platform has implementations, none can do the call here."""
    reasons = survey.refused
    hardware = all(misplaced(i, survey.target, True) for i, _ in reasons)
    return KernelNotSupported(
        **_named(survey, everything),
        reason="; ".join(dict.fromkeys(reason for _, reason in reasons)),
        argument="platform" if hardware else argument_of(reasons[0]),
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
    known: Sequence[Implementation],
    packages: discovery.Packages,
) -> KernelNotFound:
    """The forced platform has no implementation of the algorithm."""
    forced, target = survey.platform, survey.target
    assert forced is not None
    text = (
        f"{survey.algorithm} has no implementation on platform {forced.value!r}: registered are "
        f"{', '.join(i.name for i in known) or 'none'}; installed kernel packages: "
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
