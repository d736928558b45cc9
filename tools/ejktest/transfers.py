"""Transfers of a compiled program, and what computes while they are under way."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

COLLECTIVES = "collective-permute|all-gather|all-to-all|reduce-scatter|all-reduce"
KERNELS = ("tpu_custom_call", "mosaic_gpu", "triton_kernel_call")
"""Parts of the names of custom calls that are kernels."""

NAME = re.compile(r"%[\w.-]+")
INSTRUCTION = re.compile(r"^ +(?:ROOT )?(%[\w.-]+) = (.*?) ([\w-]+)\((.*)$")
ARRAY = re.compile(r"\b[a-z]+(\d+)\w*\[([\d,]*)\]")


class Transfer(NamedTuple):
    """One collective of a program.

    Attributes:
        kind, computation: the collective, and where it is.
        kernels: instructions that compute while it is under way.
        size: bytes of the array that arrives.
    """

    kind: str
    computation: str
    kernels: int
    size: int


def transfers(program: str) -> Iterator[Transfer]:
    """Yields the collectives of a compiled program, whose instructions are in order of execution.

    One that the compiler has not split hides nothing.
    """
    under_way: dict[str, list[Any]] = {}
    computation = ""
    for line in program.splitlines():
        instruction = INSTRUCTION.match(line)
        if instruction is None:
            computation = line.split(" ")[1 if line.startswith("ENTRY") else 0]
            continue
        name, types, kind, operands = instruction.groups()
        start = re.fullmatch(f"({COLLECTIVES})-start", kind)
        if start is not None:
            under_way[name] = [start[1], 0]
        elif re.fullmatch(f"({COLLECTIVES})-done", kind):
            begun, kernels = under_way.pop(NAME.findall(operands)[0])
            yield Transfer(begun, computation, kernels, _size(types))
        elif re.fullmatch(COLLECTIVES, kind):
            yield Transfer(kind, computation, 0, _size(types))
        elif kind in ("while", "conditional") or any(kernel in operands for kernel in KERNELS):
            for transfer in under_way.values():
                transfer[1] += 1


def _size(types: str) -> int:
    """Returns the bytes of the arrays that a type of a program names."""
    return sum(
        int(bits) * math.prod(map(int, filter(None, shape.split(",")))) // 8
        for bits, shape in ARRAY.findall(types)
    )
