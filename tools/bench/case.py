"""A benchmark case: inputs, contenders, and the work that cannot be avoided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax


@dataclass(frozen=True)
class Case:
    """One row group of a table.

    ``contenders`` maps a name to a function of ``inputs()``; the first is ours. A value that is a
    string is the reason why that peer cannot take part. ``flops`` and ``moved`` are the forward's
    least operations and bytes. ``grad_argnums``: the inputs to differentiate; empty = forward only.
    """

    name: str
    inputs: Callable[[], tuple]
    contenders: dict[str, Callable[..., Any] | str]
    flops: float
    moved: float
    dtype: str
    grad_argnums: tuple[int, ...] = ()
    backward_factor: float = 2.5
    notes: str = ""
    tags: frozenset[str] = field(default_factory=frozenset)


def forward_and_backward(fn: Callable, argnums: tuple[int, ...]) -> Callable:
    """``fn`` and its vector-Jacobian product for a cotangent equal to the output."""

    def run(*args):
        def of(*diff):
            full = list(args)
            for i, value in zip(argnums, diff, strict=True):
                full[i] = value
            return fn(*full)

        out, pull = jax.vjp(of, *(args[i] for i in argnums))
        return out, pull(out)

    return run
