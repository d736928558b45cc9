"""The interface of selectors that give configs, and their answer."""

from __future__ import annotations

import contextlib
import numbers
import os
from collections.abc import Generator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ejkernel.ops import env
from ejkernel.ops.config.cache import autotune_override
from ejkernel.ops.core.invocation import AnyKernel, Invocation


@runtime_checkable
class ConfigChooser(Protocol):
    """Anything that can give a config for a call. Ready-made: ConfigSelectorChain."""

    def choose(self, inv: Invocation, kernel: AnyKernel) -> Any:
        """The config for ``inv``."""
        ...


@dataclass(frozen=True)
class AutotunePolicy:
    """The policy of tuning: whether and how.

    Attributes:
        autotune: True or False; None = ``EJKERNEL_AUTOTUNE_POLICY``.
        num_warmup, num_iters: calls before and during the timing of a candidate.
        validate_backward: whether gradients are compared too; None = for kernels that have some.
        budget_s: seconds per key; None = ``EJKERNEL_AUTOTUNE_BUDGET_S``.
        max_candidates: most configs of a kernel's ``config_space`` that are tried.

    Raises:
        ValueError: ``budget_s`` is negative, NaN or of another type.
    """

    autotune: bool | None = None
    num_warmup: int = 3
    num_iters: int = 10
    validate_backward: bool | None = None
    budget_s: float | None = None
    max_candidates: int = 12

    def __post_init__(self) -> None:
        budget = self.budget_s
        if budget is not None and not (isinstance(budget, numbers.Real) and budget >= 0):
            raise ValueError(f"budget_s={budget!r}: expected a number of seconds >= 0, or None")

    def enabled(self) -> bool:
        """The innermost ``policy_override``, else ``autotune``, else the variable."""
        override = autotune_override()
        if override is not None:
            return override
        if self.autotune is not None:
            return self.autotune
        return env.autotune_policy() == "autotune"

    def explicitly_enabled(self) -> bool:
        """Returns whether a caller or the environment switched tuning on; False for the default."""
        explicit = autotune_override() is not None or self.autotune is not None
        variable = os.environ.get(env.AUTOTUNE_POLICY, "").strip()
        return self.enabled() and (explicit or bool(variable))


@dataclass(frozen=True)
class Choice:
    """A config and where it comes from.

    Attributes:
        cfg: the config; None for kernels without tunables, and when ``tier`` is "error".
        tier: "override", "overlay", "memory", "persistent", "autotune", "heuristics" or "error".
        key: cache key of the call.
        answers: the answer of each tier that was asked, in order.
        error: the exception that tier "error" would raise.
    """

    cfg: Any
    tier: str
    key: str
    answers: tuple[tuple[str, str], ...] = ()
    error: Exception | None = None

    @property
    def may_be_from_file(self) -> bool:
        """True unless the program itself gave the config, or a heuristic made it."""
        return self.tier in ("memory", "persistent", "autotune")


_from_file: ContextVar[bool] = ContextVar("ejkernel_config_from_file", default=False)


@contextlib.contextmanager
def config_from_file(yes: bool) -> Generator[None]:
    """Says whether calls that are traced inside may have their config from a file."""
    token = _from_file.set(yes)
    try:
        yield
    finally:
        _from_file.reset(token)


def is_config_from_file() -> bool:
    """Returns whether the call that is being traced may have its config from a file."""
    return _from_file.get()
