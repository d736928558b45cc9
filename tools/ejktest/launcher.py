"""Triton's launcher without a GPU: the arguments of jax-triton's plugin, and the lowered calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels.triton.launch import BATCHED, Launch
from ejkernel.kernels.triton.resources import launch_source
from ejkernel.kernels.triton.targets import Target, compile_for, cuda_target

HOPPER = cuda_target(90)


@dataclass
class Recorder:
    """Stands in for jaxlib's GPU plugin and records launches."""

    launches: list[Any] = field(default_factory=list)
    arity: int = 9  # of TritonKernel; 7 before scratch memory was known

    def TritonKernel(self, *fields):
        assert len(fields) in (7, self.arity)
        names = ("name", "num_warps", "num_ctas", "shared", "text", "ttir", "capability")
        return dict(zip(names, fields, strict=False))

    def TritonKernelCall(self, kernel, x, y, z, parameters):
        launch = SimpleNamespace(kernel=kernel, grid=(x, y, z), parameters=parameters)
        self.launches.append(launch)
        proto = json.dumps([parameters, launch.grid]).encode()
        return SimpleNamespace(to_proto=lambda name, metadata: proto)

    def create_array_parameter(self, bytes_to_zero, divisibility):
        return ("array", divisibility)

    def create_scalar_parameter(self, value, kind):
        assert type(value) is (float if kind == "fp32" else int)
        return ("scalar", value, kind)

    def create_tma_descriptor_parameter(self, **fields):
        return ("map", fields["shape"], fields["block_shape"])


def lowered(f: Callable[..., Any], *arrays: Any, target: Target = HOPPER) -> str:
    """The text of a function lowered for ``target``."""
    with compile_for(target):
        return jax.jit(f).trace(*arrays).lower(lowering_platforms=(target.platform,)).as_text()


CALL = re.compile(r"custom_call @(\w+)\(([^)]*)\).*? : \(([^)]*)\) -> (.*)")


def custom_calls(text: str) -> list[tuple[str, list[str], list[str]]]:
    """(target, operand names, operand types) of every custom call."""
    calls = []
    for name, operands, types, _ in CALL.findall(text):
        calls.append((name, operands.split(", "), types.split(", ")))
    return calls


# ---- the smallest launch -----------------------------------------------------------------------


@triton.jit
def affine(x, y, out, n, a, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seen = i < n
    tl.store(out + i, a * tl.load(x + i, mask=seen) + tl.load(y + i, mask=seen), mask=seen)


@dataclass(frozen=True)
class Affine(Launch):
    """a * x + y over ``[rows, n]``; ``changes``: arguments with another value."""

    kernel = affine
    batching: ClassVar = {"x": BATCHED, "y": BATCHED}

    rows: int
    n: int
    a: float = 2.0
    changes: tuple[tuple[str, Any], ...] = ()

    def outputs(self):
        return {"out": jax.ShapeDtypeStruct((self.rows, self.n), jnp.float32)}

    def grid(self, target):
        return (-(-self.rows * self.n // 512),)

    def options(self, target):
        return {"num_warps": 4, "num_stages": 2}

    def arguments(self, target):
        return {"n": self.rows * self.n, "a": self.a, "BLOCK": 512, **dict(self.changes)}

    def with_batch(self, size):
        return replace(self, rows=size * self.rows)


def source_of(launch):
    """Returns the specialisation of an ``Affine`` launch for Hopper."""
    avals = [jax.ShapeDtypeStruct((launch.rows, launch.n), jnp.float32)] * 2
    launch = launch.with_operands(dict(zip(("x", "y"), avals, strict=True)))
    return launch_source(launch, avals, HOPPER)
