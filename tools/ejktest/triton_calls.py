"""Calls of the Triton kernels besides flash attention's, for compiling ahead on any machine.

One at a model's size for every path of each kernel. A call is traced as a user would write it, with
its gradients where it has a kernel for them; what its program launches is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import triton
from ejkernel.kernels.triton.resources import Resources, measure, plan_source
from ejkernel.kernels.triton.targets import compile_for, cuda_target, rocm_target

BF, F32, I32 = "bfloat16", "float32", "int32"
Arrays = dict[str, tuple[tuple[int, ...], str]]
TARGETS = {
    "sm_80": cuda_target(80, 108),
    "sm_89": cuda_target(89, 128),
    "sm_90": cuda_target(90),
    "sm_100": cuda_target(100, 148),
    "sm_120": cuda_target(120, 188),
    "gfx942": rocm_target("gfx942"),
}


@dataclass(frozen=True)
class Called:
    """An operation's arrays by name as (shape, dtype), its options, what is differentiated."""

    operation: str
    arrays: Arrays
    options: dict[str, Any] = field(default_factory=dict)
    gradients: tuple[str, ...] = ()


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


def _linear(operation: str, *gates: str, dtype: str = BF, s: int = 8192, **options: Any) -> Called:
    b, h, d = (2, 16, 128) if s > 1 else (64, 16, 128)
    shapes = {"g": (b, s, h), "gk": (b, s, h, d), "gv": (b, s, h, d), "g of channels": (b, s, h, d)}
    arrays: Arrays = {name: ((b, s, h, d), dtype) for name in ("query", "key", "value")}
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


CALLS = {
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


def cases() -> list[tuple[str, str]]:
    """(call, target) names of everything that is compiled."""
    return [(call, target) for target in TARGETS for call in CALLS]


def plans(jaxpr: Any) -> Iterator[tuple[Any, list[Any]]]:
    """(plan, operand types) of every launch of a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ejkernel_triton":
            yield eqn.params["plan"], [v.aval for v in eqn.invars]
        for value in eqn.params.values():
            for one in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    yield from plans(inner)


def named(program: Any) -> dict[str, tuple[Any, list[Any]]]:
    """The launches of a program by the names of their plans, numbered where there are several."""
    found: dict[str, tuple[Any, list[Any]]] = {}
    for plan, avals in plans(program.jaxpr):
        name = type(plan).__name__.removesuffix("Plan").lower()
        again = sum(known.split()[0] == name for known in found)
        found[f"{name} {again + 1}" if again else name] = plan, avals
    return found


def launches(call: str, target_name: str) -> dict[str, tuple[Any, list[Any]]]:
    """Kernel name -> (plan, operand types) of a call and its gradients."""
    c = CALLS[call]
    arrays = {
        n: jax.ShapeDtypeStruct(shape, jnp.dtype(kind)) for n, (shape, kind) in c.arrays.items()
    }
    smooth = {n: arrays[n] for n in c.gradients}
    fixed = {n: x for n, x in arrays.items() if n not in smooth}

    def run(smooth: Any, fixed: Any) -> Any:
        return getattr(triton, c.operation)(**smooth, **fixed, **c.options)

    def loss(smooth: Any, fixed: Any) -> Any:
        return jnp.sum(run(smooth, fixed).astype(jnp.float32))

    with compile_for(TARGETS[target_name]):
        return named(jax.make_jaxpr(jax.grad(loss) if smooth else run)(smooth, fixed))


def resources(call: str, target_name: str) -> dict[str, Resources]:
    """Kernel name -> what its binary uses."""
    target = TARGETS[target_name]
    return {
        kernel: measure(plan_source(plan, avals, target), target)
        for kernel, (plan, avals) in launches(call, target_name).items()
    }
