"""Calls of the Triton kernels, for compiling ahead on any machine.

One at a model's size for every path of each kernel. A call is traced as a user would write it, with
its gradients where it has a kernel for them; what its program launches is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from ejkernel.kernels import triton
from ejkernel.kernels.triton.flash_attention.launch import AttentionLaunch
from ejkernel.kernels.triton.flash_attention.tiles import can_use_tensor_maps
from ejkernel.kernels.triton.resources import Resources, launch_source, measure
from ejkernel.kernels.triton.targets import Target, compile_for, cuda_target, rocm_target
from ejktest.called import BF, F32, I32, Arrays, Called, flash

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


_flash = partial(flash, causal=True)


def _latent(heads: int, cache: str = BF, page: int = 64, **options: Any) -> Called:
    arrays: Arrays = {
        "query": ((64, heads, 576), BF),
        "latent_cache": ((8192, page, 576), cache),
        "context_lens": ((64,), I32),
        "block_tables": ((64, 8192 // page), I32),
    }
    return Called("mla_decode", arrays, options)


def _paged(cache: str = BF) -> Called:
    arrays: Arrays = {
        "query": ((64, 32, 128), BF),
        "key_cache": ((4096, 16, 8, 128), cache),
        "value_cache": ((4096, 16, 8, 128), cache),
        "context_lens": ((64,), I32),
        "block_tables": ((64, 512), I32),
    }
    return Called("page_attention", arrays)


def _ragged(cache: str = BF, page: int = 16) -> Called:
    tokens = 16440
    arrays: Arrays = {
        "queries": ((tokens, 32, 128), BF),
        "keys": ((tokens, 8, 128), BF),
        "values": ((tokens, 8, 128), BF),
        "kv_cache": ((4096, page, 16, 128), cache),
        "kv_lens": ((64,), I32),
        "block_tables": ((64, 8192 // page), I32),
        "query_start_loc": ((65,), I32),
        "distribution": ((3,), I32),
    }
    options: dict[str, Any] = {} if cache == BF else {"k_scale": 0.05, "v_scale": 0.05}
    return Called("ragged_page_attention_v3", arrays, options)


def _contiguous() -> Called:
    arrays: Arrays = {
        "query": ((64, 32, 128), BF),
        "key": ((64, 8192, 8, 128), BF),
        "value": ((64, 8192, 8, 128), BF),
        "sequence_start": ((64,), I32),
        "sequence_end": ((64,), I32),
    }
    return Called("ragged_decode_attention", arrays)


def _grouped(rows: int, inner: int, columns: int, groups: int, dtype: str = BF) -> Called:
    arrays: Arrays = {
        "lhs": ((rows, inner), dtype),
        "rhs": ((groups, inner, columns), dtype),
        "group_sizes": ((groups,), I32),
    }
    return Called("grouped_matmul", arrays, {}, ("lhs", "rhs"))


def _linear(operation: str, *gates: str, s: int = 8192, **options: Any) -> Called:
    b, h, d = (2, 16, 128) if s > 1 else (64, 16, 128)
    shapes = {"g": (b, s, h), "gk": (b, s, h, d), "gv": (b, s, h, d), "g of channels": (b, s, h, d)}
    arrays: Arrays = {name: ((b, s, h, d), BF) for name in ("query", "key", "value")}
    arrays |= {name.split()[0]: (shapes[name], F32) for name in gates}
    if s == 1:
        arrays["initial_state"] = ((b, h, d, d), F32)
        return Called(operation, arrays, options | {"return_state": True})
    return Called(operation, arrays, options, tuple(arrays))


def _sparse(*gates: str) -> Called:
    row = (1, 32768)
    arrays: Arrays = {"query": ((*row, 64, 128), BF)}
    arrays |= {name: ((*row, 4, 128), BF) for name in ("key", "value")}
    smooth = (*arrays, *gates)
    arrays |= {name: ((*row, 64), BF) for name in gates}
    if "g_cmp" not in gates:
        arrays["block_indices"] = ((*row, 4, 16), I32)
    return Called("native_sparse_attention", arrays, {"block_size": 64}, smooth)


FLASH = {
    "d64": _flash(64),
    "d80": _flash(80),
    "d96": _flash(96),
    "d128": _flash(),
    "d192/128": _flash(192, 128),
    "d256": _flash(256),
    "full": _flash(causal=False),
    "short": _flash(q=64),
    "gqa": _flash(kv_heads=2),
    "window gqa": _flash(kv_heads=2, sliding_window=1024),
    "segments": _flash(128, None, "segments"),
    "dense": _flash(128, None, "attention_mask", causal=False),
    "sparse": _flash(128, None, "block_mask"),
    "sparse d64": _flash(64, None, "block_mask"),
    "sparse 64": _flash(256, None, "block_mask", q_block_size=64, kv_block_size=64),
    "sparse 32": _flash(128, None, "block_mask", q_block_size=32, kv_block_size=32),
    "cap sinks": _flash(128, None, "softmax_aux", logits_soft_cap=30.0),
    "dropout": _flash(dropout_prob=0.1),
    "bias": _flash(128, None, "bias"),
    "bias d256": _flash(256, None, "bias"),
    "float32": _flash(64, dtype=F32),
    "float32 d128": _flash(dtype=F32),
    "float32 highest": _flash(dtype=F32, precision="highest"),
}
OTHERS = {
    "latent 128 heads": _latent(128),
    "latent 16 heads": _latent(16),
    "latent page 16": _latent(128, page=16, sliding_window=1000, logits_soft_cap=30.0),
    "latent int8": _latent(128, "int8", k_scale=0.05),
    "latent int8 16 heads": _latent(16, "int8", k_scale=0.05),
    "latent e4m3": _latent(128, "float8_e4m3fn", k_scale=0.05),
    "latent e4m3 page 16": _latent(16, "float8_e4m3fn", 16, k_scale=0.05),
    "paged": _paged(),
    "paged int8": _paged("int8"),
    "paged e4m3": _paged("float8_e4m3fn"),
    "ragged": _ragged(),
    "ragged page 64": _ragged(page=64),
    "ragged int8": _ragged("int8"),
    "contiguous": _contiguous(),
    "grouped": _grouped(16384, 4096, 14336, 8),
    "grouped many": _grouped(65536, 7168, 2048, 256),
    "grouped float32": _grouped(8192, 1024, 1024, 8, F32),
    "linear channels": _linear("gla_attention", "g of channels"),
    "linear heads": _linear("recurrent_attention", "g"),
    "linear constant": _linear("lightning_attention", layer_idx=3, num_layers=24),
    "linear values": _linear("recurrent_attention", "g", "gv"),
    "linear step": _linear("recurrent_attention", "g", s=1),
    "pooling": Called("mean_pooling", {"x": ((8, 8192, 16, 128), BF)}, {"chunk_size": 64}, ("x",)),
    "lists": _sparse(),
    "branches": _sparse("g_cmp", "g_slc"),
}


CALLS = FLASH | OTHERS
# one of each kind of code path, for every run of the tests
SAMPLE = (("d128", "sm_90"), ("d64", "sm_80"), ("d128", "gfx942"), ("d256", "sm_89"))
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


def plans(jaxpr: Any) -> Iterator[tuple[Any, list[Any]]]:
    """(plan, operand types) of every launch of a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ejkernel_triton":
            yield eqn.params["launch"], [v.aval for v in eqn.invars]
        for value in eqn.params.values():
            for one in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    yield from plans(inner)


def named(program: Any) -> dict[str, tuple[Any, list[Any]]]:
    """The launches of a program by the names of their plans, numbered where there are several."""
    found: dict[str, tuple[Any, list[Any]]] = {}
    for plan, avals in plans(program.jaxpr):
        name = type(plan).__name__.removesuffix("Plan").removesuffix("Launch")
        name = re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()
        again = sum(re.sub(r" \d+$", "", known) == name for known in found)
        found[f"{name} {again + 1}" if again else name] = plan, avals
    return found


def launches(call: str | Called, target_name: str) -> dict[str, tuple[Any, list[Any]]]:
    """Kernel name -> (plan, operand types) of a call, or one of the list, and its gradients."""
    c, target = CALLS[call] if isinstance(call, str) else call, TARGETS[target_name]
    run = c.backward(triton) if c.gradients else c.forward(triton)
    with compile_for(target):
        return launches_of(jax.make_jaxpr(run)(*c.shapes()), target)


def launches_of(program: Any, target: Target) -> dict[str, tuple[Any, list[Any]]]:
    """Kernel name -> (plan, operand types) of a traced program, as a user's ``target`` runs it."""
    # whether this machine's jax-triton knows tensor maps is no matter here
    return {
        name: (replace(plan, tensor_maps=can_use_tensor_maps(plan.problem, target)), avals)
        if isinstance(plan, AttentionLaunch)
        else (plan, avals)
        for name, (plan, avals) in named(program).items()
    }


def resources(call: str | Called, target_name: str) -> dict[str, Resources]:
    """Kernel name -> what its binary uses."""
    target = TARGETS[target_name]
    return {
        kernel: measure(launch_source(plan, avals, target), target)
        for kernel, (plan, avals) in launches(call, target_name).items()
    }
