"""Ragged attention over pages in Triton as one kernel object.

Gradients, which serving rarely needs, are those of the XLA implementation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels.triton.kernel import TritonKernel
from ejkernel.kernels.triton.page_attention.implementation import DTYPES, MAX_DIM, xla_gradients
from ejkernel.kernels.triton.page_attention.problem import BYTES
from ejkernel.kernels.triton.ragged_page_attention import tiles
from ejkernel.kernels.triton.ragged_page_attention.attend import NAMES, attend
from ejkernel.kernels.triton.ragged_page_attention.problem import Ragged, problem_of
from ejkernel.kernels.triton.ragged_page_attention.tiles import Tiles
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.softmax import named_out


class RaggedKernel(TritonKernel):
    """What both ragged operations have in common.

    ``cache``: the name of their cache argument.
    """

    cache: str
    integers: frozenset[str]

    def refuse(self, problem: Ragged, target: Target) -> str | None:
        p = problem.paged
        if p.query not in DTYPES:
            return f"queries: {p.query} is not supported, only {', '.join(DTYPES)}"
        if p.key not in BYTES:
            return f"{self.cache}: {p.key} is not supported, only {', '.join(BYTES)}"
        if p.dim > MAX_DIM or p.dim % 8:
            return f"queries: head dim {p.dim} is not a multiple of 8 up to {MAX_DIM}"
        if p.pages * p.page_size >= 2**31:
            return f"{self.cache}: {p.pages} pages of {p.page_size} are not less than 2^31 tokens"
        return None

    def without_work(self, a: Mapping[str, Any], problem: Ragged) -> tuple[Any, ...] | None:
        queries, cache = a["queries"], a[self.cache]
        shapes = (queries.shape, cache.shape, a["block_tables"].shape)
        return (jnp.zeros(queries.shape, queries.dtype),) if 0 in sum(shapes, ()) else None

    def choose(self, problem: Ragged, target: Target) -> Tiles:
        return tiles.choose(problem, target)

    def near(self, problem: Ragged, target: Target, chosen: Tiles) -> Iterable[Tiles]:
        return tiles.near(problem, target, chosen)

    def honour(self, chosen: Tiles, cfg: Any, problem: Ragged, target: Target) -> Tiles:
        return tiles.honour(chosen, problem, cfg)

    def heuristic(self, inv: Any) -> dict[str, Any]:
        problem = self.facts(inv)[0]
        return self.choose(problem, self.target()).fields(problem)

    def candidates(self, inv: Any) -> list[dict[str, Any]]:
        problem, target = self.facts(inv)[0], self.target()
        chosen = self.choose(problem, target)
        found = [t.fields(problem) for t in (chosen, *self.near(problem, target, chosen))]
        return [x for i, x in enumerate(found) if x not in found[:i]]

    def backward(
        self,
        work: Work,
        arrays: Arrays,
        outputs: tuple[Any, ...],
        saved: Any,
        cotangents: tuple[Any, ...],
    ) -> Mapping[str, Any]:
        fixed = self.integers | {n for n, x in arrays.items() if x.dtype.itemsize == 1}
        return xla_gradients(self.call.name, work.problem.paged, arrays, fixed, cotangents)


def small(arrays: Arrays, *names: str) -> dict[str, Any]:
    """Sinks as ``[1, h, n]``, scales as ``[1, 1 or hk]``: those given."""
    return {
        name: arrays[name].reshape(1, *(arrays[name].shape or (1,)))
        for name in names
        if name in arrays
    }


class RaggedPageAttention(RaggedKernel):
    """Packed rows of any mix of prefill and decoding over pages, on a GPU; see the operation of
    this name.

    Queries are float16, bfloat16 or float32; caches are of those dtypes, int8, float8_e4m3fn or
    float8_e5m2; head dims are multiples of 8 up to 256. Pages of which no row sees anything are not
    read, and what no row sees has no influence. Two runs give the same bits. ``vmap`` is a loop.
    ``cfg``: num_queries_per_block, num_kv_pages_per_block, num_warps and num_stages of prefilled
    sequences, num_splits of decoded ones.

    Where traced starts are out of order a row belongs to the first sequence that reaches it.

    Source: Kwon et al. 2023, "PagedAttention" (arXiv 2309.06180); Ragged Paged Attention
    (arXiv 2604.15464).
    """

    call = calls.RaggedPageAttention
    cache = "kv_pages"
    integers = frozenset({"context_lens", "block_tables", "query_start_loc", "num_seqs"})

    def problem(self, a: Mapping[str, Any]) -> Ragged:
        return problem_of(a, "kv_pages", "context_lens", a["kv_pages"].shape[2] // 2)

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        given = {
            "q": arrays["queries"],
            "k": arrays["kv_pages"],
            "lens": arrays["context_lens"],
            "tables": arrays["block_tables"],
            "starts": arrays["query_start_loc"],
            "valid": arrays["num_seqs"].reshape(1),
            **small(arrays, "k_scale", "v_scale"),
        }
        if "softmax_aux" in arrays:
            given["sink"] = arrays["softmax_aux"][None]
        o = attend(work, NAMES)(*(given.get(name) for name in NAMES))
        return (named_out(o),), ()


ragged_page_attention = RaggedPageAttention()
