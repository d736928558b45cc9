"""Calls by shapes alone, as they are compiled ahead on machines that have neither device nor room
for the arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types import MaskInfo

BF, F32, I32 = "bfloat16", "float32", "int32"
Arrays = dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class Called:
    """An operation's arrays by name as (shape, dtype), its options, what is differentiated."""

    operation: str
    arrays: Arrays
    options: dict[str, Any] = field(default_factory=dict)
    gradients: tuple[str, ...] = ()

    def shapes(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arrays that are differentiated, and the others."""
        others = {n: jax.ShapeDtypeStruct(*form) for n, form in self.arrays.items()}
        return {n: others.pop(n) for n in self.gradients}, others

    def forward(self, package: Any) -> Callable[[Any, Any], Any]:
        """A function of ``shapes`` that runs the call by the kernels of a package."""

        def run(smooth: Any, fixed: Any) -> Any:
            given = {**smooth, **fixed}
            if "segments" in given:
                given["mask_info"] = MaskInfo.from_segments(given.pop("segments"))
            return getattr(package, self.operation)(**given, **self.options)

        return run

    def backward(self, package: Any) -> Callable[[Any, Any], Any]:
        """The same for the gradients of the sum, which runs the kernels of both passes."""
        run = self.forward(package)
        return jax.grad(lambda smooth, fixed: jnp.sum(run(smooth, fixed).astype(jnp.float32)))


def flash(
    d: int = 128,
    dv: int | None = None,
    *optional: str,
    b: int = 2,
    q: int = 4096,
    h: int = 8,
    kv_heads: int = 8,
    dtype: str = BF,
    **options: Any,
) -> Called:
    """A call of flash attention with these ``optional`` arrays, or over a pattern."""
    arrays: Arrays = {
        "query": ((b, q, h, d), dtype),
        "key": ((b, q, kv_heads, d), dtype),
        "value": ((b, q, kv_heads, dv or d), dtype),
    }
    pattern = (-(-q // options.get(side, 128)) for side in ("q_block_size", "kv_block_size"))
    known: Arrays = {
        "bias": ((1, h, q, q), dtype),
        "softmax_aux": ((h, 1), F32),
        "segments": ((b, q), I32),
        "block_mask": ((1, h, *pattern), "bool"),
        "attention_mask": ((b, 1, q, q), "bool"),
    }
    arrays |= {name: known[name] for name in optional}
    smooth = tuple(name for name in arrays if arrays[name][1] not in (I32, "bool"))
    operation = "blocksparse_attention" if "block_mask" in arrays else "flash_attention"
    return Called(operation, arrays, options, smooth)
