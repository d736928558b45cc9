"""Calls of native sparse attention, and how a call is compared with its definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejktest.abstract import F32, AbstractCall, abstract_call
from ejktest.drawn import array
from ejktest.tolerance import check_close


@dataclass(frozen=True)
class Case:
    """One row of ``length`` tokens, lists of ``slots`` blocks of ``size``."""

    length: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    size: int
    slots: int
    dtype: str = "bfloat16"


CASES = {
    "16:1 d128": Case(640, 16, 1, 128, 128, 64, 4),
    "64:1 d192/128": Case(300, 64, 1, 192, 128, 100, 3),
    "odd group d80": Case(401, 6, 2, 80, 64, 50, 5, "float16"),
    "one head d64": Case(377, 3, 3, 64, 64, 16, 12),
    "float32": Case(260, 8, 2, 128, 256, 32, 6, "float32"),
}


def draw(case: Case) -> dict[str, Any]:
    """Draws query, key, value, the output's cotangent, and lists: the row's own block, the first
    block, and others of which some come twice or lie ahead."""
    rng = np.random.default_rng(0)
    s, h, hk = case.length, case.heads, case.kv_heads

    def normal(*shape: int) -> jax.Array:
        return array(rng.standard_normal(shape), case.dtype)

    indices = rng.integers(-1, s // case.size + 1, (1, s, hk, case.slots)).astype(np.int32)
    indices[..., 0] = (np.arange(s) // case.size)[None, :, None]
    indices[..., 1] = 0
    return {
        "query": normal(1, s, h, case.dim),
        "key": normal(1, s, hk, case.dim),
        "value": normal(1, s, hk, case.value_dim),
        "do": normal(1, s, h, case.value_dim),
        "block_indices": jnp.asarray(indices),
    }


def case_of(function: Callable[..., Any], name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns a jitted (o, dq, dk, dv) of a case, and its arrays."""
    case = CASES[name]

    @jax.jit
    def run(query: Any, key: Any, value: Any, do: Any, block_indices: Any) -> Any:
        def call(q: Any, k: Any, v: Any) -> Any:
            return function(q, k, v, block_indices=block_indices, block_size=case.size)

        out, back = jax.vjp(call, query, key, value)
        return out, *back(do)

    return run, draw(case)


def check_chosen(lists, score, rtol, atol=0.0):
    """Asserts that lists ``[s, hk, slots]`` have the blocks of the best scores, each once.

    Place by place a score ``[s, hk, n]`` is close to the one that float64 puts there.
    """
    lists, slots = np.asarray(lists), lists.shape[-1]
    best = -np.sort(-score, axis=-1)[..., :slots]
    got = np.where(lists < 0, -1.0, np.take_along_axis(score, np.maximum(lists, 0), -1))
    np.testing.assert_allclose(got, best, rtol=rtol, atol=atol)
    assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in lists.reshape(-1, slots))


def compare(ours, theirs, args):
    """Compares a call and its gradients with its definition, which computes in float64.

    Returns the jaxpr of both.
    """
    with jax.enable_x64(True):
        reference, pull = jax.vjp(theirs, *(array(a, jnp.float64) for a in args))
        weight = np.random.default_rng(1).standard_normal(reference.shape)
        exact = pull(array(weight))

    @jax.jit
    def with_gradients(args, weight):
        out, pull = jax.vjp(ours, *args)
        return out, pull(weight.astype(out.dtype))

    operands = args, weight.astype(np.float32)
    traced = with_gradients.trace(*operands)
    out, grads = traced.lower().compile()(*operands)
    check_close(out, reference)
    for i, (g, r) in enumerate(zip(grads, exact, strict=True)):
        check_close(g, r, name=f"gradient {i}", rms_limit=4e-5)
    return traced.jaxpr


# ---- ahead of time -------------------------------------------------------------------------------


def _sparse(*optional: str, **options: Any) -> AbstractCall:
    sizes = {"batch": 1, "seq": 32768, "heads": 64, "kv_heads": 4, "head_dim": 128, "selected": 16}
    options = {"block_size": 64, **options}
    return abstract_call("native_sparse_attention", sizes, *optional, trained=True, options=options)


COMPILED = {
    "lists": _sparse("block_indices"),
    "branches": _sparse("g_cmp", "g_slc"),
}

COMPILED_TPU = {
    "sparse lists": COMPILED["lists"],
    "sparse branches": COMPILED["branches"],
    "sparse joined heads": _sparse("g_cmp", "g_slc", cfg={"joins_heads": True}),
    "sparse float32 d256": abstract_call(
        "native_sparse_attention",
        {"batch": 1, "seq": 8192, "heads": 6, "kv_heads": 2, "head_dim": 256, "sequences": 8},
        "cu_seqlens", dtype=F32, trained=True, options={"block_size": 100},
    ),
}  # fmt: skip
