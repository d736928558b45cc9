"""The launches that flash attention ships with, for compiling ahead of time on any machine.

``launches`` traces a call as a user would write it and finds the plans in the program, so that
what is compiled is what a GPU would be given.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.blocksparse_attention import blocksparse_attention
from ejkernel.kernels.triton.flash_attention import flash_attention
from ejkernel.kernels.triton.flash_attention.plans import AttentionPlan
from ejkernel.kernels.triton.flash_attention.tiles import can_use_tensor_maps
from ejkernel.kernels.triton.resources import Resources, measure, plan_source
from ejkernel.kernels.triton.targets import Target, compile_for, cuda_target, rocm_target
from ejkernel.types import MaskInfo
from ejktest.triton_calls import plans

TARGETS = {
    "sm_80": cuda_target(80, 108),
    "sm_90": cuda_target(90),
    "gfx942": rocm_target("gfx942"),
    # the code of sm_80 with 99 KiB of shared memory instead of 163
    "sm_86": cuda_target(86, 84),
    "sm_89": cuda_target(89, 128),
    # Hopper under jax-triton 0.3, which has no TMA descriptors
    "sm_90 pointers": dataclasses.replace(cuda_target(90), tensor_maps=False),
}


@dataclass(frozen=True)
class Shipped:
    """A call: sizes, dtype, options of the operation and which optional arrays it has."""

    d: int = 128
    dv: int | None = None
    q: int = 4096
    kv_heads: int = 8
    dtype: str = "bfloat16"
    options: dict[str, Any] = field(default_factory=lambda: {"causal": True})
    arrays: tuple[str, ...] = ()


FULL: dict[str, Any] = {}
CAUSAL: dict[str, Any] = {"causal": True}
CALLS = {
    "d64": Shipped(64),
    "d80": Shipped(80),
    "d96": Shipped(96),
    "d128": Shipped(128),
    "d192/128": Shipped(192, 128),
    "d256": Shipped(256),
    "full": Shipped(options=FULL),
    "short": Shipped(q=64),
    "gqa": Shipped(kv_heads=2),
    "window gqa": Shipped(kv_heads=2, options=CAUSAL | {"sliding_window": 1024}),
    "segments": Shipped(arrays=("ids",)),
    "dense": Shipped(options=FULL, arrays=("mask",)),
    "sparse": Shipped(arrays=("pattern",)),
    "sparse d64": Shipped(64, arrays=("pattern",)),
    "sparse 64": Shipped(
        256, options=CAUSAL | dict(q_block_size=64, kv_block_size=64), arrays=("pattern",)
    ),
    "sparse 32": Shipped(
        options=CAUSAL | dict(q_block_size=32, kv_block_size=32), arrays=("pattern",)
    ),
    "cap sinks": Shipped(options=CAUSAL | {"logits_soft_cap": 30.0}, arrays=("sinks",)),
    "dropout": Shipped(options=CAUSAL | {"dropout_prob": 0.1}),
    "bias": Shipped(arrays=("bias",)),
    "bias d256": Shipped(256, arrays=("bias",)),
    "float32": Shipped(64, dtype="float32"),
    "float32 d128": Shipped(128, dtype="float32"),
    "float32 highest": Shipped(128, dtype="float32", options=CAUSAL | {"precision": "highest"}),
}
# one of each kind of code path, for every run of the tests
SAMPLE = (("d128", "sm_90"), ("d64", "sm_80"), ("d128", "gfx942"), ("d256", "sm_89"))
ONLY = {
    "sm_86": ("d128", "d256", "dense", "bias", "float32 d128"),
    "sm_89": ("d128", "d256", "dense", "bias", "bias d256"),
    "sm_90 pointers": ("d64", "d96", "d128", "d256", "segments"),
}


def cases() -> list[tuple[str, str]]:
    """(call, target) names of everything that is compiled."""
    return [
        (call, target) for target in TARGETS for call in CALLS if call in ONLY.get(target, CALLS)
    ]


def launches(call: str, target_name: str) -> dict[str, tuple[Any, list[Any], Target]]:
    """Kernel name -> (plan, operand types, target) of a call and its gradients."""
    c, target = CALLS[call], TARGETS[target_name]
    b, h, n = 2, 8, c.q
    shape = jax.ShapeDtypeStruct
    given = {
        "q": shape((b, n, h, c.d), c.dtype),
        "k": shape((b, n, c.kv_heads, c.d), c.dtype),
        "v": shape((b, n, c.kv_heads, c.dv or c.d), c.dtype),
    }
    if "bias" in c.arrays:
        given["bias"] = shape((1, h, n, n), c.dtype)
    if "sinks" in c.arrays:
        given["sinks"] = shape((h, 1), jnp.float32)
    fixed = {}
    if "ids" in c.arrays:
        fixed["ids"] = shape((b, n), jnp.int32)
    if "pattern" in c.arrays:
        blocks = (-(-n // c.options.get(name, 128)) for name in ("q_block_size", "kv_block_size"))
        fixed["pattern"] = shape((1, h, *blocks), jnp.bool_)
    if "mask" in c.arrays:
        fixed["mask"] = shape((b, 1, n, n), jnp.bool_)

    def loss(given: Any, fixed: Any) -> Any:
        ids = fixed.get("ids")
        operation, more = flash_attention, {}
        if "pattern" in fixed:
            operation, more = blocksparse_attention, {"block_mask": fixed["pattern"]}
        o: Any = operation(
            given["q"], given["k"], given["v"], bias=given.get("bias"),
            softmax_aux=given.get("sinks"), attention_mask=fixed.get("mask"),
            mask_info=None if ids is None else MaskInfo(q_segment_ids=ids, kv_segment_ids=ids),
            **c.options, **more,
        )  # fmt: skip
        return jnp.sum(o.astype(jnp.float32))

    with compile_for(target):
        program = jax.make_jaxpr(jax.grad(loss))(given, fixed)
    found = {}
    for plan, avals in plans(program.jaxpr):
        if isinstance(plan, AttentionPlan):
            plan = dataclasses.replace(plan, tensor_maps=can_use_tensor_maps(plan.problem, target))
        name = type(plan).__name__.removesuffix("Plan").lower()
        if name in found:
            name = f"{name} {sum(n.startswith(name) for n in found) + 1}"
        found[name] = plan, avals, target
    return found


def resources(call: str, target_name: str) -> dict[str, Resources]:
    """Kernel name -> what its binary uses."""
    return {
        kernel: measure(plan_source(plan, avals, target), target)
        for kernel, (plan, avals, target) in launches(call, target_name).items()
    }
