"""A TPU kernel whose cost is counted, and values of the integers of its call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from tools.tpu.copies import Counted

LANES = 128
LISTED = 4  # block-sparse attention visits one of this number of blocks
KERNELS = {"fwd": 2, "bwd": 5, "dq": 3, "dkv": 4}  # matmuls of a tile of flash attention


@dataclass(frozen=True)
class Cost:
    """A kernel whose steady code is counted.

    Attributes:
        who: whose kernel it is.
        row: what it computes; kernels of one row are compared.
        kernel: part of its name.
        tiles: its tiles, for the table.
        work: useful multiply-adds of the steady code; for kernels that are compared with their own
            past alone, one pass.
        depth: contracted length of its matmuls, at most that of a matrix unit.
        function: a call that runs it, for arrays of these ``shapes``.
        call: what ``function`` runs; None for JAX's own. backward: whether with its gradients.
        returns_output: whether that program returns the result of the call too.
        copies: the same call over fewer tokens, where the kernel copies by hand.
        compiled: compiles a program for several devices of a machine, of which one is given.
    """

    who: str
    row: str
    kernel: str
    tiles: str
    work: int
    depth: int
    function: Callable[..., Any]
    shapes: tuple[Any, ...]
    call: Any = None
    backward: bool = False
    returns_output: bool = False
    copies: Callable[[], Counted] | None = None
    compiled: Callable[[Any], Any] | None = None


def integers(shapes: tuple[dict[str, Any], dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Returns integer and boolean arrays of a call, None for others; rows are divided evenly."""
    arrays = {name: x for part in shapes for name, x in part.items()}
    rows = next((arrays[n].shape for n in ("lhs", "query", "x") if n in arrays), (1, 1))
    total = rows[0] if "lhs" in arrays or len(rows) == 2 else rows[0] * rows[1]

    def values(name: str, struct: Any) -> Any:
        count = struct.shape[0] if struct.shape else 0
        if name == "group_sizes":
            return jnp.full(count, total // count, struct.dtype)
        if name == "cu_seqlens":
            return jnp.arange(count, dtype=struct.dtype) * (total // (count - 1))
        if name == "attention_mask":
            return jnp.ones(struct.shape, struct.dtype)
        if name == "block_mask":
            down, across = (jnp.arange(n) for n in struct.shape[-2:])
            return jnp.broadcast_to((down[:, None] - across) % LISTED == 0, struct.shape)
        return None

    first, second = ({n: values(n, x) for n, x in part.items()} for part in shapes)
    return first, second
