"""Programs whose devices share a sequence: their transfers, and what computes meanwhile."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

COLLECTIVES = "collective-permute|all-gather|all-to-all|reduce-scatter|all-reduce"
KERNELS = ("tpu_custom_call", "mosaic_gpu", "triton_kernel_call")
"""Parts of the names of custom calls that are kernels."""

NAME = re.compile(r"%[\w.-]+")
CALLED = re.compile(r"\bcalls=(%[\w.-]+)")
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
    with_kernels: set[str] = set()  # computations, which stand before those that call them
    for line in program.splitlines():
        instruction = INSTRUCTION.match(line)
        if instruction is None:
            computation = line.split(" ")[1 if line.startswith("ENTRY") else 0]
            continue
        name, types, kind, operands = instruction.groups()
        called = CALLED.search(operands)
        is_kernel = any(kernel in operands for kernel in KERNELS) or (
            called is not None and called[1] in with_kernels
        )
        if is_kernel:
            with_kernels.add(computation)
        start = re.fullmatch(f"({COLLECTIVES})-start", kind)
        if start is not None:
            under_way[name] = [start[1], 0]
        elif re.fullmatch(f"({COLLECTIVES})-done", kind):
            begun, kernels = under_way.pop(NAME.findall(operands)[0])
            yield Transfer(begun, computation, kernels, _size(types))
        elif re.fullmatch(COLLECTIVES, kind):
            yield Transfer(kind, computation, 0, _size(types))
        elif kind in ("while", "conditional") or is_kernel:
            for transfer in under_way.values():
                transfer[1] += 1


def _size(types: str) -> int:
    """Returns the bytes of the arrays that a type of a program names."""
    return sum(
        int(bits) * math.prod(map(int, filter(None, shape.split(",")))) // 8
        for bits, shape in ARRAY.findall(types)
    )


def trace_shared(
    ring_attention: Callable[..., Any],
    devices: Any,
    form: tuple[str, str],
    shape: tuple[int, int, int, int],
    *,
    backward: bool,
) -> Any:
    """Returns a traced causal call over a sequence that devices share, bfloat16, q like k and v.

    ``form``: how devices share it, and the layout of its shards.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    strategy, layout = form
    mesh, spec = Mesh(np.array(devices), ("sp",)), P(None, "sp")

    def attend(q: Any, k: Any, v: Any) -> Any:
        options = {"layout": layout, "cfg": {"context_parallel": strategy}}
        return ring_attention(q, k, v, axis_name="sp", causal=True, **options)

    shared = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)

    def both(*arrays: Any) -> Any:
        out, pull = jax.vjp(shared, *arrays)
        return out, pull(out)

    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    return jax.jit(both if backward else shared).trace(x, x, x)
