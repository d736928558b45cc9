"""Every argument of every operation, alone, where JAX promotes neither ranks nor dtypes by itself.

Operands and their forms come from the signatures, so that an argument added later is tried, or
fails here until it has a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel.modules as modules
from ejkernel.ops import KernelNotSupported, interpret_mode
from ejkernel.types import MaskInfo, calls
from ejktest import operand_dtypes
from ejktest.abstract import FLOATS, call_class
from ejktest.grids import without
from ejktest.operand_dtypes import UNIFORM, dtype_cases
from ejktest.variants import options as calls_with_options

OPERATIONS = sorted(
    call.name
    for call in (getattr(calls, name) for name in vars(calls)["MODULES"])
    if call.name != "ring_attention"
)
# dims that kernels for TPUs take
WIDE = {"head_dim": 128, "v_dim": 128, "key_dim": 128, "q_dim": 128, "nope_dim": 112}


def plan(structs: dict[str, Any]) -> Any:
    lens = structs.get("context_lens", structs.get("kv_lens"))
    starts, rows = structs["query_start_loc"].shape[0], structs["queries"].shape[0]
    return modules.plan_ragged_attention(
        np.zeros(lens.shape, np.int32), np.zeros(starts, np.int32), 0, tokens=rows
    )


def block_mask(structs: dict[str, Any]) -> Any:
    blocks = -(-structs["query"].shape[1] // 128), -(-structs["key"].shape[1] // 128)
    return lambda *sizes: jnp.ones((1, 1, *blocks), bool)


def bias(structs: dict[str, Any]) -> Any:
    (_, q_len, heads, _), kv_len = structs["query"].shape, structs["key"].shape[1]
    return lambda: jnp.zeros((1, heads, q_len, kv_len), jnp.bfloat16)


# values of arguments that are no arrays, or functions of the operands that make them
STATIC: dict[str, Any] = {
    "activation": "silu",
    "block_size": 16,
    "causal": True,
    "causal_offset": 1,
    "chunk_size": 16,
    "context_parallel": "all_gather",
    "deterministic": False,
    "dropout_prob": 0.25,
    "dtype": jnp.float32,
    "init_bias": bias,
    "kv_block_size": 16,
    "layer_idx": 2,
    "logits_dtype": jnp.float32,
    "logits_soft_cap": 20.0,
    "mask_builder": block_mask,
    "mask_info": lambda _: MaskInfo(causal=True, sliding_window=(5, 5)),
    "mask_mod": lambda _: lambda b, h, q, k: q >= k,
    "max_block_count": 2,
    "normalize_qk": True,
    "num_layers": 5,
    "num_splits": 2,
    "out_dtype": jnp.float32,
    "plan": plan,
    "precision": "highest",
    "preferred_element_type": jnp.float32,
    "q_block_size": 16,
    "return_lse": True,
    "return_state": True,
    "reverse": True,
    "score_mod": lambda _: lambda score, b, h, q, k: score * 0.5,
    "sliding_window": (5, 5),
    "softmax_dtype": jnp.float32,
    "softmax_scale": 0.3,
    "transpose_rhs": True,
}
WITH = {  # what else a call has to have
    "deterministic": {"dropout_prob": 0.25, "dropout_rng": jax.random.key(0)},
    "dropout_prob": {"dropout_seed": 1},
    "dropout_rng": {"dropout_prob": 0.25, "deterministic": False},
    "max_block_count": {"block_counts": 2},
}


# their kernels make the passes of flash attention, which is traced with every argument it takes
ON_FLASH_ATTENTION = ("blocksparse_attention", "mla_attention", "scaled_dot_product_attention")


def calls_of(operation: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Returns what is given, the operands, and the other arguments."""
    call, traced = call_class(operation), set()
    if operation in ON_FLASH_ATTENTION:
        traced = set(call_class("flash_attention").boundary.names) - set(call.boundary.required)
    cases: dict[Any, Any] = {}
    for case in dtype_cases(call):
        # of the dtypes of an operand one that differs from the others'
        if "64" in case.dtype or (case.operand == UNIFORM and case.dtype != "bfloat16"):
            continue
        if (case.operand, case.dtype) not in (("keys", "int8"), ("values", "int8")):
            cases.setdefault((case.operand, case.axes), case)
    base = next(c for c in cases.values() if c.operand == UNIFORM).called
    for (operand, axes), case in cases.items():
        if operand in traced:
            continue
        yield f"{operand}[{axes}]", case.called.structs(), case.called.options
    names = {p.name for p in call.boundary.array_parameters}
    for name in call.boundary.defaults:
        if name in (*names, *call.boundary.required, *base.options, *traced):
            continue
        structs, options = base.structs(), dict(base.options)
        value = STATIC[name]
        if callable(value) and not isinstance(value, type(jnp.float32)):
            value = value(structs)
        extra = {n: x for n, x in WITH.get(name, {}).items() if n in call.boundary.defaults}
        yield name, structs, {**options, **extra, name: value}


def trace(operation: str, structs: dict[str, Any], options: dict[str, Any], platform: str) -> None:
    """Traces values and gradients, values alone where there are none."""
    smooth = {name: x for name, x in structs.items() if x.dtype.name in FLOATS}
    rest = {name: x for name, x in structs.items() if name not in smooth}

    def loss(smooth: Any, rest: Any) -> Any:
        out = getattr(modules, operation)(**smooth, **rest, **options, platform=platform)
        return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(out))

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        try:
            jax.eval_shape(jax.value_and_grad(loss), smooth, rest)
        except KernelNotSupported:
            jax.eval_shape(loss, smooth, rest)


# the kernel of ragged_page_attention_v3 is that of ragged_page_attention, and writes besides
@pytest.mark.parametrize("operation", without(OPERATIONS, "ragged_page_attention"))
def test_no_argument_promotes_ranks_or_dtypes(operation):
    for given, structs, options in calls_of(operation):
        try:
            trace(operation, structs, options, "xla")
        except (TypeError, ValueError) as error:
            raise AssertionError(f"{operation}, {given}: {error}") from error


@pytest.mark.parametrize("operation", [x for x in OPERATIONS if x != "ragged_page_attention"])
def test_no_tpu_kernel_promotes_ranks_or_dtypes(operation, monkeypatch):
    for name, size in WIDE.items():
        monkeypatch.setitem(operand_dtypes.SIZES, name, size)
    operands = set()
    with interpret_mode():
        for given, structs, options in calls_of(operation):
            operand = given.partition("[")[0]
            if operand == given or operand in operands:
                continue
            if not modules.supports(operation, **structs, **options, platform="pallas"):
                continue
            operands.add(operand)
            try:
                trace(operation, structs, options, "pallas")
            except (TypeError, ValueError) as error:
                raise AssertionError(f"{operation}, {given}: {error}") from error


@pytest.mark.parametrize("operation", ["flash_attention", "mla_attention", "ragged_page_attention"])
def test_rows_that_see_nothing_make_no_nan(operation):
    with jax.debug_nans(True):
        for label, c in calls_with_options()[operation]:
            if label not in ("as_is", "segments", "cap_and_sinks"):
                continue
            wanted = {name: c.arrays[name] for name in c.gradients}
            rest = {name: x for name, x in c.arrays.items() if name not in wanted}

            def loss(wanted, c=c, rest=rest):
                out = getattr(modules, operation)(**wanted, **rest, **c.static)
                # lse of rows that see nothing is -inf
                out = jax.tree.leaves(out)[0]
                return (out.astype(jnp.float32) ** 2).sum()

            jax.jit(jax.value_and_grad(loss))(wanted)
