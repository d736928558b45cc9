"""Differentiable functions whose derivative is traced and compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def compiled(function: Callable[..., Any], static: int = 0) -> Callable[..., Any]:
    """``function``, whose first ``static`` arguments are hashable, behind ``jax.jit``.

    JAX runs the rules of a ``custom_vjp`` anew for every gradient: outside ``jit`` each of their
    loops is then a new program every time, and in a model every layer is traced anew. Of a jitted
    function it keeps the derivative, by static arguments and shapes.
    """
    return jax.jit(function, static_argnums=tuple(range(static)))
