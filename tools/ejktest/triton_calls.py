"""Calls of the Triton kernels, for compiling ahead on any machine.

One at a model's size for every path of each kernel. A call is traced as a user would write it, with
its gradients where it has a kernel for them; what its program launches is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax

from ejkernel.kernels import triton
from ejkernel.kernels.triton.flash_attention.launch import AttentionLaunch
from ejkernel.kernels.triton.flash_attention.tiles import can_use_tensor_maps
from ejkernel.kernels.triton.resources import Resources, launch_source, measure
from ejkernel.kernels.triton.targets import Target, compile_for, cuda_target, rocm_target
from ejktest.abstract import AbstractCall
from ejktest.cases import (
    attention,
    convolution,
    delta,
    grouped,
    latent,
    linear,
    paged,
    pooling,
    ragged,
    sparse,
)

TARGETS = {
    "sm_80": cuda_target(80, 108),
    "sm_89": cuda_target(89, 128),
    "sm_90": cuda_target(90),
    "sm_100": cuda_target(100, 148),
    "sm_120": cuda_target(120, 188),
    "gfx942": rocm_target("gfx942"),
    # the code of sm_80 with 99 KiB of shared memory instead of 163
    "sm_86": cuda_target(86, 84),
    # Hopper under jax-triton 0.3, which has no TMA descriptors
    "sm_90 pointers": replace(cuda_target(90), tensor_maps=False),
}

FLASH = attention.COMPILED
OTHERS = {
    **latent.COMPILED, **paged.PAGED, **ragged.COMPILED, **paged.CONTIGUOUS, **grouped.COMPILED,
    **linear.COMPILED, **delta.COMPILED, **convolution.COMPILED, **pooling.COMPILED,
    **sparse.COMPILED, **attention.EIGHT_BIT,
}  # fmt: skip
CALLS = FLASH | OTHERS
# one of each kind of code path, for every run of the tests
SAMPLE = (("d128", "sm_90"), ("d64", "sm_80"), ("d128", "gfx942"))
FEW = {  # calls of flash attention on chips whose code is mostly that of another
    "sm_86": ("d128", "d256", "dense", "bias", "float32 d128"),
    "sm_89": ("d128", "d256", "dense", "bias", "bias d256"),
    "sm_90 pointers": ("d64", "d96", "d128", "d256", "segments"),
}
FLASH_TARGETS = ("sm_80", "sm_90", "gfx942", *FEW)
OTHER_TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")


def cases() -> list[tuple[str, str]]:
    """(call, target) names of everything that is compiled."""
    return [
        *((call, target) for target in FLASH_TARGETS for call in FEW.get(target, FLASH)),
        *((call, target) for target in OTHER_TARGETS for call in OTHERS),
    ]


def traced_launches(jaxpr: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yields every launch of a program with the types of its operands."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ejkernel_triton":
            yield eqn.params["launch"], [v.aval for v in eqn.invars]
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from traced_launches(inner)


def named_launches(program: Any) -> dict[str, tuple[Any, list[Any]]]:
    """Returns the launches of a program by the names of their classes, numbered if several."""
    launches: dict[str, tuple[Any, list[Any]]] = {}
    for launch, avals in traced_launches(program.jaxpr):
        name = type(launch).__name__.removesuffix("Launch")
        name = re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()
        again = sum(re.sub(r" \d+$", "", earlier) == name for earlier in launches)
        launches[f"{name} {again + 1}" if again else name] = launch, avals
    return launches


def launches(call: str | AbstractCall, target_name: str) -> dict[str, tuple[Any, list[Any]]]:
    """Returns launches and operand types of a call (or its name) with its gradients, by name."""
    c, target = CALLS[call] if isinstance(call, str) else call, TARGETS[target_name]
    run = c.backward(triton) if c.gradients else c.forward(triton)
    with compile_for(target):
        return launches_of(jax.make_jaxpr(run)(*c.shapes()), target)


def launches_of(program: Any, target: Target) -> dict[str, tuple[Any, list[Any]]]:
    """Returns launches and operand types of a traced program on ``target``, by name."""
    # independent of whether this jax-triton supports tensor maps
    return {
        name: (replace(launch, tensor_maps=can_use_tensor_maps(launch.problem, target)), avals)
        if isinstance(launch, AttentionLaunch)
        else (launch, avals)
        for name, (launch, avals) in named_launches(program).items()
    }


def resources(call: str | AbstractCall, target_name: str) -> dict[str, Resources]:
    """Kernel name -> what its binary uses."""
    target = TARGETS[target_name]
    return {
        kernel: measure(launch_source(launch, avals, target), target)
        for kernel, (launch, avals) in launches(call, target_name).items()
    }
