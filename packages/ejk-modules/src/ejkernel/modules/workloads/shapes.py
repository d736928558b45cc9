"""The named cases: real models, sweeps, and small ones that a CPU can time.

The one list that benchmarks, tuning, shipped tables and tests share. Sizes of models come from
their published configurations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ejkernel.modules.workloads.families import (
    AttentionShape,
    ConvolutionShape,
    DecodeShape,
    DeltaShape,
    GroupedShape,
    LatentDecodeShape,
    LatentShape,
    LinearShape,
    PoolShape,
    RaggedShape,
    Shape,
)

# ---- attention ------------------------------------------------------------------------------


def _grid(lengths: Iterable[int], dims: Iterable[int]) -> Iterator[AttentionShape]:
    """Equal-work sweep: batch * q_len and heads * head_dim stay fixed."""
    tokens, width = 16384, 2048
    for d in dims:
        for s in lengths:
            for causal in (False, True):
                mask = "causal" if causal else "full"
                yield AttentionShape(
                    f"sweep-d{d}-s{s}-{mask}", max(1, tokens // s), s, width // d, width // d, d,
                    causal=causal,
                )  # fmt: skip


CPU_ATTENTION = (
    *(
        AttentionShape(
            f"cpu-d64-s{s}-{'causal' if causal else 'full'}", 1, s, 8, 8, 64, "float32", causal,
            device="cpu",
        )
        for s in (512, 2048, 4096)
        for causal in (False, True)
    ),
    AttentionShape("cpu-d64-s16384-causal", 1, 16384, 8, 8, 64, "float32", True, device="cpu"),
    AttentionShape("cpu-d64-s16384-full", 1, 16384, 8, 8, 64, "float32", False, device="cpu"),
    AttentionShape(
        "cpu-d64-s16384-window256", 1, 16384, 8, 8, 64, "float32", True, window=256, device="cpu"
    ),
)  # fmt: skip

GPU_SWEEP = (
    *_grid((1024, 4096, 8192, 16384), dims=(64, 128, 256)),
    *_grid((2048,), dims=(64,)),
    *_grid((4096,), dims=(32, 80, 96)),
    *(
        AttentionShape(
            f"float32-d{d}-s4096-{'causal' if causal else 'full'}", 4, 4096, 2048 // d, 2048 // d,
            d, "float32", causal,
        )
        for d in (64, 128)
        for causal in (False, True)
    ),
    *(
        AttentionShape(
            f"eight-bit-d{d}-s16384-{'causal' if causal else 'full'}",
            1,
            16384,
            2048 // d,
            2048 // d,
            d,
            "float8_e4m3fn",
            causal,
        )
        for d in (64, 128, 256)
        for causal in (False, True)
    ),
    AttentionShape("sweep-d192-s8192-full", 2, 8192, 16, 16, 192, v_dim=128, causal=False),
    AttentionShape("sweep-d192-s8192-causal", 2, 8192, 16, 16, 192, v_dim=128),
)  # fmt: skip

_GEMMA2: dict[str, Any] = {"soft_cap": 50.0, "source": "Gemma 2 9B"}
_GPT_OSS: dict[str, Any] = {"sinks": 1, "source": "gpt-oss 20B"}
_MODERNBERT: dict[str, Any] = {"causal": False, "documents": 8, "source": "ModernBERT base, packed"}
_NSA = "heads as of Native Sparse Attention (2502.11089)"

MODELS = (
    AttentionShape("llama3-8b-4k", 4, 4096, 32, 8, 128, source="Llama 3 8B"),
    AttentionShape("llama3-70b-8k", 2, 8192, 64, 8, 128, source="Llama 3 70B"),
    AttentionShape("llama3-70b-tp8-8k", 2, 8192, 8, 1, 128, source="Llama 3 70B, one of 8 shards"),
    AttentionShape("qwen3-8b-16k", 1, 16384, 32, 8, 128, source="Qwen3 8B"),
    AttentionShape("qwen3-30b-a3b-8k", 2, 8192, 32, 4, 128, source="Qwen3 30B-A3B"),
    AttentionShape("mixtral-8x7b-8k", 2, 8192, 32, 8, 128, source="Mixtral 8x7B"),
    AttentionShape("mistral-7b-16k-window", 1, 16384, 32, 8, 128, window=4095, source="Mistral 7B"),
    AttentionShape("gemma2-9b-8k-cap", 2, 8192, 16, 8, 256, **_GEMMA2),
    AttentionShape("gemma2-9b-8k-window", 2, 8192, 16, 8, 256, window=4095, **_GEMMA2),
    AttentionShape("gpt-oss-20b-8k-sinks", 2, 8192, 64, 8, 64, **_GPT_OSS),
    AttentionShape("gpt-oss-20b-8k-window", 2, 8192, 64, 8, 64, window=127, **_GPT_OSS),
    AttentionShape(
        "deepseek-v3-prefill-4k", 1, 4096, 128, 128, 192, v_dim=128, source="DeepSeek V3"
    ),
    AttentionShape("modernbert-packed-8k", 4, 8192, 12, 12, 64, **_MODERNBERT),
    AttentionShape("modernbert-packed-8k-window", 4, 8192, 12, 12, 64, window=64, **_MODERNBERT),
    AttentionShape("vit-l-576", 32, 576, 16, 16, 64, causal=False, source="a ViT-L/14 at 336 px"),
    AttentionShape(
        "siglip-so400m-729", 32, 729, 16, 16, 72, causal=False, source="SigLIP so400m at 384 px"
    ),
    AttentionShape(
        "whisper-large-cross", 16, 448, 20, 20, 64, causal=False, kv_len=1500,
        source="Whisper large, decoder to encoder",
    ),
    AttentionShape("nsa-32k", 1, 32768, 64, 4, 128, source=_NSA),
    AttentionShape("nsa-32k-window", 1, 32768, 64, 4, 128, window=512, source=_NSA),
    AttentionShape("nsa-64k-window", 1, 65536, 64, 4, 128, window=512, source=_NSA),
    AttentionShape("long-128k", 1, 131072, 8, 2, 128, source="128k context"),
    AttentionShape("llama3-8b-128k", 1, 131072, 32, 8, 128, source="Llama 3.1 8B, 128k context"),
)  # fmt: skip

SHORT = tuple(
    AttentionShape(f"short-d{d}-s{s}-b32", 32, s, 2048 // d, 2048 // d, d)
    for d in (64, 128)
    for s in (512, 1024)
)

_BASE: dict[str, Any] = {"batch": 1, "q_len": 16384, "heads": 16, "kv_heads": 16, "head_dim": 128}
_GQA4: dict[str, Any] = {**_BASE, "kv_heads": 4}
# next to sweep-d128-s4096-causal: a bias of 16k tokens takes 8 GB
_AT_4K: dict[str, Any] = {**_BASE, "batch": 4, "q_len": 4096}
OPTIONS = (
    AttentionShape("option-plain", **_BASE),
    AttentionShape("option-soft-cap", **_BASE, soft_cap=50.0),
    AttentionShape("option-sinks", **_BASE, sinks=1),
    AttentionShape("option-dropout", **_BASE, dropout=0.1),
    AttentionShape("option-window1024", **_BASE, window=1023),
    AttentionShape("option-packed8", **_BASE, documents=8),
    AttentionShape("option-gqa4", **_GQA4),
    AttentionShape("option-4k-cap-dropout", **_AT_4K, soft_cap=50.0, dropout=0.1),
    AttentionShape("option-4k-bias", **_AT_4K, bias=True),
    AttentionShape("option-4k-bias-of-heads", **_AT_4K, bias=True, bias_batch=1),
    AttentionShape("option-4k-bias-shared", **_AT_4K, bias=True, bias_batch=1, bias_heads=1),
)

SPARSE = tuple(
    AttentionShape(
        f"{prefix}-{'per-head' if per_head else 'shared'}-0.1", 1, length, heads, heads, dim, dtype,
        False, density=0.1, per_head=per_head, device=device,
    )
    for prefix, length, heads, dim, dtype, device in (
        ("s4096", 4096, 8, 64, "float32", "cpu"),
        ("sparse-s16k", 16384, 16, 128, "bfloat16", "gpu"),
    )
    for per_head in (True, False)
)  # fmt: skip
SPARSE += tuple(
    AttentionShape(
        f"sparse-s16k-causal-{density}", 1, 16384, 16, 16, 128, density=density, per_head=True,
        device="gpu",
    )
    for density in (0.05, 0.1, 0.25, 0.5, 1.0)
)  # fmt: skip

ATTENTION = CPU_ATTENTION + GPU_SWEEP + MODELS + SHORT + OPTIONS + SPARSE

# ---- decoding -------------------------------------------------------------------------------

DECODE = (
    DecodeShape("cpu-b4-2k", 4, 2048, 8, 2, 64, 16, "float32", "float32", device="cpu"),
    DecodeShape("cpu-b1-16k", 1, 16384, 8, 2, 64, 16, "float32", "float32", device="cpu"),
    *(
        DecodeShape(f"decode-b64-8k-page{page}", 64, 8192, 32, 8, 128, page, source="Llama 3 8B")
        for page in (1, 16, 64, 256)
    ),
    *(
        DecodeShape(f"decode-b{b}-8k", b, 8192, 32, 8, 128, 16, source="Llama 3 8B")
        for b in (1, 8, 256)
    ),
    DecodeShape("decode-b256-512", 256, 512, 32, 8, 128, 16, source="Llama 3 8B"),
    DecodeShape("decode-b8-1k", 8, 1024, 32, 8, 128, 16, source="Llama 3 8B"),
    DecodeShape("decode-b1-128k", 1, 131072, 32, 8, 128, 64, source="Llama 3 8B, long"),
    DecodeShape("decode-b1-128k-page16", 1, 131072, 32, 8, 128, 16),
    DecodeShape("decode-b1-128k-int8", 1, 131072, 32, 8, 128, 16, cache_dtype="int8"),
    DecodeShape("decode-b64-4k-even", 64, 4096, 32, 8, 128, 16),
    DecodeShape("decode-b64-4k-uneven", 64, 4096, 32, 8, 128, 16, uneven=True),
    DecodeShape(
        "decode-b64-4k-uneven-int8", 64, 4096, 32, 8, 128, 16, cache_dtype="int8", uneven=True
    ),
    DecodeShape("decode-b64-8k-int8", 64, 8192, 32, 8, 128, 64, cache_dtype="int8"),
    DecodeShape("decode-b64-8k-float8", 64, 8192, 32, 8, 128, 64, cache_dtype="float8_e4m3fn"),
    *(
        DecodeShape(
            f"decode-b64-8k-{name}-page16", 64, 8192, 32, 8, 128, 16, cache_dtype=cache_dtype
        )
        for name, cache_dtype in (
            ("int8", "int8"), ("e4m3", "float8_e4m3fn"), ("e5m2", "float8_e5m2")
        )
    ),
    DecodeShape("decode-b64-8k-d64", 64, 8192, 32, 8, 64, 16),
    DecodeShape("decode-b16-8k-d256", 16, 8192, 32, 8, 256, 16),
    DecodeShape("decode-b64-8k-mqa64", 64, 8192, 64, 1, 128, 16),
    DecodeShape("llama3-70b-decode-b32-8k", 32, 8192, 64, 8, 128, 16, source="Llama 3 70B"),
    DecodeShape(
        "gemma2-9b-decode-b32-8k", 32, 8192, 16, 8, 256, 16, window=4095, soft_cap=50.0,
        source="Gemma 2 9B",
    ),
    DecodeShape(
        "gpt-oss-20b-decode-b64-8k", 64, 8192, 64, 8, 64, 16, sinks=1, source="gpt-oss 20B"
    ),
)  # fmt: skip

RAGGED = (
    RaggedShape("cpu-mixed", 4, 1, 64, 512, 8, 2, 64, 16, "float32", device="cpu"),
    RaggedShape("llama3-8b-decode-b64", 64, 0, 1, 4096, 32, 8, 128, 16, source="Llama 3 8B"),
    RaggedShape("llama3-8b-prefill-2k", 0, 4, 2048, 2048, 32, 8, 128, 16, source="Llama 3 8B"),
    *(
        RaggedShape(f"{name}-page{page}", *sizes, 32, 8, 128, page)
        for name, sizes in (
            ("decode-b64-8k", (64, 0, 1, 8192)),
            ("prefill-8x2k-decode-b56-8k", (56, 8, 2048, 8192)),
            ("prefill-16x1k", (0, 16, 1024, 1024)),
        )
        for page in (16, 64)
    ),
    *(
        RaggedShape(
            f"ramp-8x2k-decode-b56-8k-page{page}", 56, 8, 2048, 8192, 32, 8, 128, page, ramp=True
        )
        for page in (16, 64)
    ),
    RaggedShape("decode-b64-8k-uneven", 64, 0, 1, 8192, 32, 8, 128, 16, uneven=True),
    RaggedShape("decode-b64-8k-int8", 64, 0, 1, 8192, 32, 8, 128, 16, cache_dtype="int8"),
    RaggedShape("decode-b64-8k-e4m3", 64, 0, 1, 8192, 32, 8, 128, 16, cache_dtype="float8_e4m3fn"),
    *(
        RaggedShape(f"{name}-e4m3-page16", *sizes, 32, 8, 128, 16, cache_dtype="float8_e4m3fn")
        for name, sizes in (
            ("prefill-8x2k-decode-b56-8k", (56, 8, 2048, 8192)),
            ("prefill-16x1k", (0, 16, 1024, 1024)),
        )
    ),
    *(
        RaggedShape(
            f"prefill-4x8k-{label}page64", 0, 4, 8192, 8192, 32, 8, 128, 64, cache_dtype=cache_dtype
        )
        for label, cache_dtype in (("", None), ("e4m3-", "float8_e4m3fn"), ("int8-", "int8"))
    ),
    RaggedShape("prefill-64-at-100k", 0, 1, 64, 102400, 32, 8, 128, 16),
    RaggedShape("llama3-8b-mixed", 48, 2, 1024, 4096, 32, 8, 128, 16, source="Llama 3 8B"),
    RaggedShape(
        "gpt-oss-20b-mixed", 48, 2, 1024, 4096, 64, 8, 64, 16, sinks=1, source="gpt-oss 20B"
    ),
)

# ---- latent attention -----------------------------------------------------------------------

LATENT = (
    LatentShape("cpu-latent-512", 1, 512, 4, 64, 16, 32, 32, "float32", device="cpu"),
    LatentShape("deepseek-v3-latent-4k", 1, 4096, 128, source="DeepSeek V3"),
    LatentShape("deepseek-v2-lite-latent-8k", 2, 8192, 16, source="DeepSeek V2 Lite"),
)

LATENT_DECODE = (
    LatentDecodeShape("cpu-latent-b4-1k", 4, 1024, 4, 16, 64, 16, "float32", "float32",
                      device="cpu"),
    LatentDecodeShape("deepseek-v3-decode-b64-8k", 64, 8192, 128, 64, source="DeepSeek V3"),
    LatentDecodeShape("deepseek-v3-decode-b128-4k", 128, 4096, 128, 64, source="DeepSeek V3"),
    LatentDecodeShape("deepseek-v3-decode-tp8-b64-8k", 64, 8192, 16, 64,
                      source="DeepSeek V3, one of 8 shards"),
    LatentDecodeShape("deepseek-v3-decode-b1-128k", 1, 131072, 128, 64, source="DeepSeek V3"),
    LatentDecodeShape("deepseek-v3-decode-b64-8k-uneven", 64, 8192, 128, 64, uneven=True),
    *(
        LatentDecodeShape(f"deepseek-v3-decode-{name}-{kind}", *sizes, 64, cache_dtype=cache_dtype)
        for name, sizes in (
            ("b64-8k", (64, 8192, 128)), ("tp8-b64-8k", (64, 8192, 16)),
            ("b1-128k", (1, 131072, 128)),
        )
        for kind, cache_dtype in (("int8", "int8"), ("e4m3", "float8_e4m3fn"))
    ),
)  # fmt: skip

# ---- linear attention, grouped matmul, pooling ----------------------------------------------

LINEAR = (
    LinearShape("cpu-b1-4k", 1, 4096, 4, 64, "float32", device="cpu"),
    LinearShape("cpu-b1-64k", 1, 65536, 2, 32, "float32", device="cpu"),
    LinearShape("gla-b2-8k", 2, 8192, 16, 128),
    LinearShape("gla-b1-64k", 1, 65536, 16, 128),
    LinearShape("gla-b4-4k", 4, 4096, 64, 128),
    LinearShape("gla-1.3b-b8-2k", 8, 2048, 4, 256, v_dim=512, source="GLA 1.3B"),
    LinearShape("gated-heads-b2-8k", 2, 8192, 16, 128, per_head=True),
    LinearShape("gated-heads-b1-64k", 1, 65536, 16, 128, per_head=True),
    LinearShape("gla-b2-8k-float32", 2, 8192, 16, 128, "float32"),
    LinearShape("gated-heads-b2-8k-float32", 2, 8192, 16, 128, "float32", per_head=True),
    LinearShape("linear-decode-b64", 64, 1, 16, 128, per_head=True, state=True),
    LinearShape("linear-verify-b64", 64, 8, 16, 128, per_head=True, state=True),
    LinearShape("minimax-01-b1-32k", 1, 32768, 64, 128, source="MiniMax-01"),
)

DELTA = (
    DeltaShape("cpu-delta-2k", 1, 2048, 8, 64, "float32", device="cpu"),
    DeltaShape("qwen3-next-b1-8k", 1, 8192, 32, 128, kv_heads=16, source="Qwen3-Next"),
    DeltaShape("qwen3-next-b1-32k", 1, 32768, 32, 128, kv_heads=16, source="Qwen3-Next"),
    DeltaShape("delta-b2-8k", 2, 8192, 16, 128),
    DeltaShape("kimi-linear-b1-8k", 1, 8192, 32, 128, per_channel=True, source="Kimi Linear"),
    DeltaShape("delta-channels-b2-8k", 2, 8192, 16, 128, per_channel=True),
    DeltaShape("delta-packed-64k", 1, 65536, 32, 128, kv_heads=16, sequences=32),
    DeltaShape("delta-decode-b64", 64, 1, 32, 128, kv_heads=16, state=True, source="Qwen3-Next"),
)

CONVOLUTION = (
    ConvolutionShape("cpu-conv-2k", 1, 2048, 512, dtype="float32", device="cpu"),
    ConvolutionShape("conv-b2-8k", 2, 8192, 8192, source="Qwen3-Next"),
    ConvolutionShape("conv-decode-b64", 64, 1, 8192, state=True, source="Qwen3-Next"),
)

GROUPED = (
    GroupedShape("cpu-g64", 16384, 512, 512, 64, "float32", device="cpu"),
    GroupedShape("cpu-g64-even", 16384, 512, 512, 64, "float32", even=True, device="cpu"),
    GroupedShape("cpu-g64-small", 4096, 512, 512, 64, "float32", device="cpu"),
    GroupedShape("cpu-g8", 2048, 512, 1024, 8, "float32", device="cpu"),
    GroupedShape("mixtral-8x7b", 8192, 4096, 14336, 8, source="Mixtral 8x7B"),
    GroupedShape("mixtral-8x7b-down", 8192, 14336, 4096, 8, source="Mixtral 8x7B"),
    GroupedShape("qwen3-moe", 8192, 2048, 1536, 128, source="Qwen3 30B-A3B"),
    GroupedShape("qwen3-moe-decode", 512, 2048, 1536, 128, source="Qwen3 30B-A3B, 64 tokens"),
    *(
        GroupedShape(f"{shape}-{name}", *sizes, stored=dtype)
        for shape, sizes in (
            ("qwen3-moe-decode", (512, 2048, 1536, 128)),
            ("mixtral-16k", (16384, 4096, 14336, 8)),
        )
        for name, dtype in (("int8", "int8"), ("e4m3", "float8_e4m3fn"))
    ),
    GroupedShape("gpt-oss-20b-moe", 16384, 2880, 5760, 32, source="gpt-oss 20B"),
    GroupedShape("deepseek-v3", 65536, 7168, 2048, 256, source="DeepSeek V3"),
    *(
        GroupedShape(f"{name}-{kind}", *sizes, even=kind == "even", zipf=kind == "zipf")
        for name, sizes in (
            ("mixtral-16k", (16384, 4096, 14336, 8)),
            ("deepseek-v3", (65536, 7168, 2048, 256)),
            ("qwen3-moe-down", (8192, 2048, 768, 128)),
        )
        for kind in ("even", "zipf")
    ),
    GroupedShape("deepseek-v3-ep8", 65536, 7168, 4096, 32, source="DeepSeek V3, one of 8 shards"),
)

POOL = (
    PoolShape("cpu-pool-4k", 16, 4096, 512, dtype="float32", device="cpu"),
    PoolShape("modernbert-pool-8k", 32, 8192, 768, source="ModernBERT base"),
    PoolShape("pool-b8-8k", 8, 8192, 2048, 64, source="keys of 16 heads of 128"),
    PoolShape("nsa-pool-64k", 1, 65536, 1024, 64, source="keys of 8 heads of 128, blocks of 64"),
)

SHAPES: tuple[Shape, ...] = (
    *ATTENTION,
    *DECODE,
    *RAGGED,
    *LATENT,
    *LATENT_DECODE,
    *LINEAR,
    *DELTA,
    *CONVOLUTION,
    *GROUPED,
    *POOL,
)
