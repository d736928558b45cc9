"""Instructions of a compiled program that write memory outside its kernels."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax

from ejkernel.kernels import pallas

SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
FREE = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "custom-call")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?\S+ = (.*?) ([a-z][a-z0-9-]*)\(")
ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,]*)\]")
ROWS = ("query", "key", "value", "g", "do")  # a projection leaves heads of a row next to each other


def with_rows_as_projected(
    call: Any, backward: bool, returns_output: bool = False
) -> tuple[Any, tuple[Any, ...]]:
    """Returns a call of rows ``[b, s, h * d]`` instead of ``[b, s, h, d]``, and its shapes.

    Splitting the last axis changes the layout of an array in memory, which a program whose
    parameters are split would do by copies that no model has. With ``backward`` the gradient of
    the result is an argument too, and gradients are returned, after the result if
    ``returns_output``.
    """
    smooth, fixed = call.shapes()
    rows = call.structs()["query"].shape[:2] if "query" in call.structs() else None
    forward = call.forward(pallas)
    parts: list[Any] = [smooth, fixed]
    if backward:
        parts.append({"do": jax.eval_shape(forward, smooth, fixed)})

    def is_split(name: str, x: Any) -> bool:
        return name in ROWS and len(x.shape) == 4 and x.shape[:2] == rows

    def merged(name: str, x: Any) -> Any:
        if not is_split(name, x):
            return x
        return jax.ShapeDtypeStruct((*x.shape[:2], x.shape[2] * x.shape[3]), x.dtype)

    def merge(x: Any) -> Any:
        return x.reshape(*x.shape[:2], -1) if x.ndim == 4 and x.shape[:2] == rows else x

    def run(*arrays: Any) -> Any:
        split = [
            {n: x.reshape(part[n].shape) for n, x in operands.items()}
            for part, operands in zip(parts, arrays, strict=True)
        ]
        if not backward:
            return jax.tree.map(merge, forward(*split))
        out, back = jax.vjp(lambda smooth: forward(smooth, split[1]), split[0])
        gradients = back(split[2]["do"])
        return jax.tree.map(merge, (out, *gradients) if returns_output else gradients)

    return run, tuple({n: merged(n, x) for n, x in part.items()} for part in parts)


class Written(NamedTuple):
    """An instruction of a program outside its kernels, and the bytes that it writes."""

    kind: str
    shape: str
    bytes: int


def written_outside(program: str) -> list[Written]:
    """Returns the instructions of the entry computation that write memory, kernels left out.

    A loop or branch counts as what it returns. Transfers that XLA starts ahead of a kernel, to
    vector memory, are the reads of the kernel.
    """
    entry = program[program.index("ENTRY ") :]
    instructions = []
    for line in entry.splitlines():
        match = INSTRUCTION.match(line)
        if match and not match[2].startswith(FREE) and not match[2].endswith(("-start", "-done")):
            arrays = ARRAY.findall(match[1])
            size = sum(SIZES.get(dtype, 4) * _elements(sizes) for dtype, sizes in arrays)
            shapes = ", ".join(f"{dtype}[{sizes}]" for dtype, sizes in arrays)
            instructions.append(Written(match[2], shapes, size))
    return instructions


def _elements(sizes: str) -> int:
    count = 1
    for size in sizes.split(","):
        count *= int(size) if size else 1
    return count
