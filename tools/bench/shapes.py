"""Named shapes of real models, and the small ones a CPU can time.

One file for tests, benchmarks and tuning. Lengths are tokens; ``heads`` are query heads.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionShape:
    """One self-attention call: ``[batch, q_len, heads, head_dim]`` against ``kv_heads``."""

    name: str
    batch: int
    q_len: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    causal: bool = True
    kv_len: int | None = None
    v_dim: int | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: int = 0
    documents: int = 1
    dropout: float = 0.0
    bias: bool = False
    source: str = ""
    device: str = "gpu"

    @property
    def keys(self) -> int:
        return self.q_len if self.kv_len is None else self.kv_len

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_dim is None else self.v_dim

    def visible_pairs(self) -> float:
        """Query-key pairs the mask leaves, per batch row and head (documents of equal length)."""
        rows, keys = self.q_len / self.documents, self.keys / self.documents
        if not self.causal:
            pairs = rows * keys
            if self.window is not None:
                pairs = rows * min(keys, 2 * self.window + 1)
        elif self.window is not None and self.window < keys:
            w = self.window
            pairs = w * (w + 1) / 2 + (rows - w) * (w + 1)
        else:
            pairs = rows * (rows + 1) / 2 if rows <= keys else keys * (rows - (keys - 1) / 2)
        return pairs * self.documents

    def flops(self) -> float:
        """Forward multiply-adds, counted as two operations each."""
        dims = self.head_dim + self.value_dim
        return 2.0 * self.batch * self.heads * self.visible_pairs() * dims


def _grid(name, lengths, *, dims, tokens=16384, width=2048, **options):
    """Equal-work sweep: batch * q_len and heads * head_dim stay fixed."""
    for d in dims:
        for s in lengths:
            for causal in (False, True):
                mask = "causal" if causal else "full"
                yield AttentionShape(
                    f"{name}-d{d}-s{s}-{mask}", max(1, tokens // s), s, width // d, width // d, d,
                    causal=causal, **options,
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

GPU_SWEEP = tuple(_grid("sweep", (1024, 4096, 8192, 16384), dims=(64, 128, 256)))

MODELS = (
    AttentionShape("llama3-8b-4k", 4, 4096, 32, 8, 128, source="Llama 3 8B"),
    AttentionShape("llama3-70b-8k", 2, 8192, 64, 8, 128, source="Llama 3 70B"),
    AttentionShape("qwen3-8b-16k", 1, 16384, 32, 8, 128, source="Qwen3 8B"),
    AttentionShape("mistral-7b-16k-window", 1, 16384, 32, 8, 128, window=4095, source="Mistral 7B"),
    AttentionShape("gemma2-9b-8k-cap", 2, 8192, 16, 8, 256, soft_cap=50.0, source="Gemma 2 9B"),
    AttentionShape(
        "gemma2-9b-8k-window", 2, 8192, 16, 8, 256, soft_cap=50.0, window=4095, source="Gemma 2 9B"
    ),
    AttentionShape("gpt-oss-20b-8k-sinks", 2, 8192, 64, 8, 64, sinks=1, source="gpt-oss 20B"),
    AttentionShape(
        "gpt-oss-20b-8k-window", 2, 8192, 64, 8, 64, sinks=1, window=127, source="gpt-oss 20B"
    ),
    AttentionShape(
        "deepseek-v3-prefill-4k", 1, 4096, 128, 128, 192, v_dim=128, source="DeepSeek V3"
    ),
    AttentionShape(
        "modernbert-packed-8k", 4, 8192, 12, 12, 64, causal=False, documents=8, source="ModernBERT"
    ),
    AttentionShape("vit-l-576", 32, 576, 16, 16, 64, causal=False, source="a ViT-L/14 at 336 px"),
    AttentionShape("long-128k", 1, 131072, 8, 2, 128, source="128k context"),
)

SHORT = tuple(
    AttentionShape(f"short-d{d}-s{s}-b32", 32, s, 2048 // d, 2048 // d, d)
    for d in (64, 128)
    for s in (512, 1024)
)

_BASE = {"batch": 1, "q_len": 16384, "heads": 16, "kv_heads": 16, "head_dim": 128}
OPTIONS = (
    AttentionShape("option-plain", **_BASE),
    AttentionShape("option-soft-cap", **_BASE, soft_cap=50.0),
    AttentionShape("option-sinks", **_BASE, sinks=1),
    AttentionShape("option-dropout", **_BASE, dropout=0.1),
    AttentionShape("option-window1024", **_BASE, window=1023),
    AttentionShape("option-packed8", **_BASE, documents=8),
    AttentionShape("option-gqa4", **{**_BASE, "kv_heads": 4}),
)

ATTENTION = CPU_ATTENTION + GPU_SWEEP + MODELS + SHORT + OPTIONS


@dataclass(frozen=True)
class DecodeShape:
    """One decoding step over a paged cache; ``context`` is the mean number of cached tokens."""

    name: str
    batch: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    uneven: bool = False
    source: str = ""
    device: str = "gpu"


DECODE = (
    DecodeShape("cpu-b4-2k", 4, 2048, 8, 2, 64, 16, "float32", "float32", device="cpu"),
    DecodeShape("cpu-b1-16k", 1, 16384, 8, 2, 64, 16, "float32", "float32", device="cpu"),
    *(
        DecodeShape(f"decode-b64-8k-page{page}", 64, 8192, 32, 8, 128, page, source="Llama 3 8B")
        for page in (16, 64)
    ),
    DecodeShape("decode-b1-128k", 1, 131072, 32, 8, 128, 64, source="Llama 3 8B, long"),
    DecodeShape("decode-b64-4k-even", 64, 4096, 32, 8, 128, 16),
    DecodeShape("decode-b64-4k-uneven", 64, 4096, 32, 8, 128, 16, uneven=True),
    DecodeShape("decode-b64-8k-int8", 64, 8192, 32, 8, 128, 64, cache_dtype="int8"),
    DecodeShape("decode-b64-8k-float8", 64, 8192, 32, 8, 128, 64, cache_dtype="float8_e4m3fn"),
)


@dataclass(frozen=True)
class LinearShape:
    """One linear-attention call with equal key and value head dims."""

    name: str
    batch: int
    length: int
    heads: int
    head_dim: int
    dtype: str = "bfloat16"
    source: str = ""
    device: str = "gpu"


LINEAR = (
    LinearShape("cpu-b1-4k", 1, 4096, 4, 64, "float32", device="cpu"),
    LinearShape("cpu-b1-64k", 1, 65536, 2, 32, "float32", device="cpu"),
    LinearShape("gla-b2-8k", 2, 8192, 16, 128),
    LinearShape("gla-b4-4k", 4, 4096, 64, 128),
)


@dataclass(frozen=True)
class GroupedShape:
    """``m`` rows in ``groups`` runs, each times its own ``[k, n]``."""

    name: str
    m: int
    k: int
    n: int
    groups: int
    dtype: str = "bfloat16"
    even: bool = False
    source: str = ""
    device: str = "gpu"


GROUPED = (
    GroupedShape("cpu-g64", 16384, 512, 512, 64, "float32", device="cpu"),
    GroupedShape("cpu-g64-even", 16384, 512, 512, 64, "float32", even=True, device="cpu"),
    GroupedShape("cpu-g64-small", 4096, 512, 512, 64, "float32", device="cpu"),
    GroupedShape("cpu-g8", 2048, 512, 1024, 8, "float32", device="cpu"),
    GroupedShape("mixtral-8x7b", 8192, 4096, 14336, 8, source="Mixtral 8x7B"),
    GroupedShape("qwen3-moe", 8192, 2048, 1536, 128, source="Qwen3 30B-A3B"),
    GroupedShape("deepseek-v3", 65536, 7168, 2048, 256, source="DeepSeek V3"),
)
