"""Attention over caches in Triton: one kernel object per operation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ejkernel.kernels.triton.bound_launch import MAP_ROWS
from ejkernel.kernels.triton.kernel import TritonKernel, unsupported_operands
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.serving import decode_tiles, mla_decode_tiles, ragged_tiles, stages
from ejkernel.kernels.triton.serving.decode_tiles import DecodeTiles
from ejkernel.kernels.triton.serving.ragged_tiles import RaggedTiles
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.params import config_field
from ejkernel.ops.stages import Stage, StagedKernel
from ejkernel.ops.xla_gradients import XlaGradients
from ejkernel.types import calls
from ejkernel.types.calls import arguments
from ejkernel.types.serving.problem import ITEMSIZE, LatentProblem, PagedProblem, RaggedProblem

MAX_LATENT, MAX_ROPE = 512, 128
INVARIANT_SPLITS = 16  # of a sequence in every batch-invariant call; one with 8 heads fills a GPU


class CacheKernel(XlaGradients, TritonKernel, StagedKernel):
    """A kernel over a cache, differentiated by the XLA kernel of its operation."""

    def variant_reason(self, problem: Any) -> str | None:
        p = getattr(problem, "paged", problem)
        if p.pages * p.page_size >= MAP_ROWS:
            return f"batch_invariant: TMA reads no cache of {MAP_ROWS} tokens or more"
        return None


class DecodeKernel(CacheKernel):
    """A kernel of the newest tokens of each sequence over a cache."""

    stages: ClassVar[Mapping[str, Stage]] = {
        "decode": stages.decode_sequences,
        "merge": stages.merge_sequences,
    }

    def sequence_problem(self, problem: PagedProblem) -> PagedProblem:
        return problem.of_sequence()

    def fix_order(self, tiles: DecodeTiles) -> DecodeTiles:
        # equal work ranges would cut a sequence where others end, and a batch of 1 would be merged
        # in another order than the same sequence among others
        return replace(tiles, splits=tiles.splits or INVARIANT_SPLITS, num_launches=2)


class PageAttention(DecodeKernel):
    """One new token per sequence over its paged cache, on a GPU.

    The query is float16, bfloat16 or float32; caches are of those dtypes, int8, float8_e4m3fn or
    float8_e5m2; head dims are multiples of 8 up to 256. Memory past a context is never read. Two
    runs give the same bits. ``cfg``: pages_per_block, num_splits, num_warps, num_stages,
    num_launches.
    """

    call = calls.PageAttention
    reads = (
        arguments.PAGES
        | arguments.DECODE_OPTIONS
        | arguments.CACHE_SCALES
        | {"query", "key_cache", "value_cache", "num_splits", "return_lse"}
    )
    choose = staticmethod(decode_tiles.choose)
    neighbours = staticmethod(decode_tiles.neighbours)

    def unsupported_reason(self, problem: PagedProblem, target: Target) -> str | None:
        p = problem
        return unsupported_operands({"query": p.query_dtype}, {}) or unsupported_operands(
            {"key_cache": p.key_dtype, "value_cache": p.value_dtype},
            {"key_cache": p.dim, "value_cache": p.value_dim},
            among=ITEMSIZE,
        )


class RaggedDecodeAttention(DecodeKernel):
    """One new token per sequence over a slice of its contiguous cache, on a GPU.

    Paged decoding whose sequences have one page each. float16, bfloat16 and float32; head dims are
    multiples of 8 up to 256. Memory outside a slice is never read. Two runs give the same bits.
    ``cfg.fwd_params``: kv_blocksize, num_warps, num_stages.

    Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
    """

    call = calls.RaggedDecodeAttention
    reads = (
        arguments.QKV | arguments.DECODE_OPTIONS | {"sequence_start", "sequence_end", "return_lse"}
    )
    choose = staticmethod(decode_tiles.choose)

    def unsupported_reason(self, problem: PagedProblem, target: Target) -> str | None:
        p = problem
        dtypes = {"query": p.query_dtype, "key": p.key_dtype, "value": p.value_dtype}
        return unsupported_operands(dtypes, {"key": p.dim, "value": p.value_dim})

    def neighbours(
        self, problem: PagedProblem, target: Target, chosen: DecodeTiles
    ) -> Iterable[DecodeTiles]:
        return (
            replace(chosen, block=block, num_stages=stages)
            for block in (chosen.block, chosen.block // 2, chosen.block * 2)
            for stages in (chosen.num_stages, 2, 3, 4, 5)
            if block >= 16
            and decode_tiles.shared_bytes(problem, block, stages) <= target.shared_limit
        )

    def apply_config(
        self, chosen: DecodeTiles, cfg: Any, problem: PagedProblem, target: Target
    ) -> DecodeTiles:
        return chosen.apply_block_config(config_field(cfg, "fwd_params"))

    def fields(self, chosen: DecodeTiles) -> dict[str, Any]:
        return {"fwd_params": {"kv_blocksize": chosen.block, **chosen.fields}}


class MLADecode(DecodeKernel):
    """Latent attention of the last tokens over a paged cache, on a GPU.

    Math, per query row over the visible rows c_j of the cache, which all heads share::

        o = k_scale * sum_j softmax_j(scale * k_scale * q . c_j) * c_j[:latent]

    Paged decoding whose keys hold their values: a row is read once for both. The heads of all new
    tokens of a sequence are its query rows, 64 to a program.

    The query is float16, bfloat16 or float32; the cache is of those dtypes, int8, float8_e4m3fn or
    float8_e5m2. ``latent_dim`` is a power of two up to 512, the rotary part a multiple of 8 up to
    128. Memory past a context is never read. Two runs give the same bits. ``cfg``: pages_per_block,
    num_splits, num_warps, num_stages, num_launches.

    Bound: one token costs 2 * heads * (dc + latent) operations and dc elements. At B64, context
    8192, dc 576, latent 512 in bfloat16: 604 MB, 0.14 ms at 4.3 TB/s; with 128 heads 146 GFLOP,
    0.21 ms at 690 TFLOP/s, so that matmuls limit at 90 heads or more.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C; Dao et al. 2023,
    "Flash-Decoding for long-context inference".
    """

    call = calls.MLADecode
    reads = (
        arguments.PAGES
        | arguments.DECODE_OPTIONS
        | arguments.TREE
        | {"query", "latent_cache", "latent_dim", "k_scale", "num_splits", "return_lse"}
    )
    choose = staticmethod(mla_decode_tiles.choose)
    neighbours = staticmethod(mla_decode_tiles.neighbours)

    def unsupported_reason(self, problem: LatentProblem, target: Target) -> str | None:
        p = problem
        reason = unsupported_operands({"query": p.query_dtype}, {}) or unsupported_operands(
            {"latent_cache": p.key_dtype}, {}, among=ITEMSIZE
        )
        if reason is not None:
            return reason
        least = 32 if ITEMSIZE[p.key_dtype] == 1 else 16
        if not least <= p.latent_dim <= MAX_LATENT or p.latent_dim != power_of_two(p.latent_dim):
            return f"latent_dim: {p.latent_dim} is not a power of two from {least} to {MAX_LATENT}"
        rope = p.rope_dim
        if rope > MAX_ROPE or rope % 8:
            return f"latent_cache: a rotary part of {rope} is not a multiple of 8 up to {MAX_ROPE}"
        return None

    def apply_config(
        self, chosen: DecodeTiles, cfg: Any, problem: LatentProblem, target: Target
    ) -> DecodeTiles:
        tiles = super().apply_config(chosen, cfg, problem, target)
        return mla_decode_tiles.canonical(tiles, problem, target)


class RaggedKernel(CacheKernel):
    """Common to both ragged operations.

    ``cache``: the name of their cache argument.
    """

    cache: str
    choose = staticmethod(ragged_tiles.choose)
    neighbours = staticmethod(ragged_tiles.neighbours)

    def sequence_problem(self, problem: RaggedProblem) -> RaggedProblem:
        return problem.of_sequence()

    def fix_order(self, tiles: RaggedTiles) -> RaggedTiles:
        # the keys of a tile stay together, as their splits would follow from all sequences
        decode = replace(tiles.decode, splits=tiles.splits or INVARIANT_SPLITS)
        return replace(tiles, splits=None, decode=decode, min_split_keys=2**30)

    def unsupported_reason(self, problem: RaggedProblem, target: Target) -> str | None:
        p = problem.paged
        reason = unsupported_operands({"queries": p.query_dtype}, {"queries": p.dim})
        reason = reason or unsupported_operands({self.cache: p.key_dtype}, {}, among=ITEMSIZE)
        if reason is not None:
            return reason
        if p.pages * p.page_size >= 2**31:
            return f"{self.cache}: {p.pages} pages of {p.page_size} are not less than 2^31 tokens"
        return None


class RaggedPageAttention(RaggedKernel):
    """Packed rows of any mix of prefill and decoding over pages, on a GPU.

    Queries are float16, bfloat16 or float32; caches are of those dtypes, int8, float8_e4m3fn or
    float8_e5m2; head dims are multiples of 8 up to 256. Pages of which no row sees anything are not
    read, and what no row sees has no influence. Two runs give the same bits. ``vmap`` is a loop.
    ``cfg``: num_queries_per_block, num_kv_pages_per_block, num_warps and num_stages of prefilled
    sequences, num_splits of decoded ones.

    Where traced starts are out of order a row belongs to the first sequence that reaches it.
    """

    call = calls.RaggedPageAttention
    reads = (
        arguments.RAGGED
        | arguments.DECODE_OPTIONS
        | arguments.CACHE_SCALES
        | arguments.TREE
        | {"return_lse"}
    )
    cache = "kv_pages"
    stages: ClassVar[Mapping[str, Stage]] = {
        "schedule": stages.build_schedule,
        "decode": stages.decode_rows,
        "long_prefill": stages.skip_long_prefill,
        "prefill": stages.prefill_rows,
        "merge": stages.merge_rows,
    }


class RaggedPageAttentionv3(RaggedKernel):
    """Ragged attention after writing the new keys and values to their pages, on a GPU.

    The cache is written in place: donated under ``jax.jit`` it is not copied, else it is copied
    once. Keys and values are float16, bfloat16, float32, or of an 8-bit cache's dtype. For the rest
    as ragged_page_attention. A row whose table entry names no page is not written.
    """

    call = calls.RaggedPageAttentionv3
    reads = (
        arguments.RAGGED_UPDATE
        | arguments.DECODE_OPTIONS
        | arguments.CACHE_SCALES
        | arguments.TREE
        | {"q_scale", "return_lse"}
    )
    cache = "kv_cache"
    stages: ClassVar[Mapping[str, Stage]] = {
        "schedule": stages.build_schedule,
        "write": stages.write_cache,
        "decode": stages.decode_rows,
        "long_prefill": stages.skip_long_prefill,
        "prefill": stages.prefill_rows,
        "merge": stages.merge_rows_and_cache,
    }

    def unsupported_reason(self, problem: RaggedProblem, target: Target) -> str | None:
        for name, kind in zip(("keys", "values"), problem.written_dtypes, strict=True):
            if kind not in ITEMSIZE:
                return f"{name}: {kind} is not supported, only {', '.join(ITEMSIZE)}"
        if not problem.paged.heads:
            return "queries: without heads"
        return super().unsupported_reason(problem, target)


page_attention = PageAttention()
ragged_decode_attention = RaggedDecodeAttention()
mla_decode = MLADecode()
ragged_page_attention = RaggedPageAttention()
ragged_page_attention_v3 = RaggedPageAttentionv3()
