"""The fields of named cases, one class per family of operations.

Lengths are tokens, ``heads`` are query heads, counts are of multiply-adds as two operations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True)
class Shape:
    """A case. ``source``: origin of its sizes. ``device``: its device, "cpu", "gpu" or "any"."""

    operations: ClassVar[tuple[str, ...]] = ()
    builder: ClassVar[str] = ""  # module and function of this package that make its calls

    name: str
    source: str = field(default="", kw_only=True)
    device: str = field(default="gpu", kw_only=True)

    def serves(self, operation: str) -> bool:
        """Returns whether the case is a call of the operation."""
        return operation in self.operations


# short names of a field: the first of these that the family has
SHORT_NAMES = {
    "b": ("batch",), "h": ("heads",), "hk": ("kv_heads",), "d": ("head_dim", "channels"),
    "dv": ("v_dim",), "q": ("q_len",), "k": ("kv_len",), "s": ("q_len", "length"),
    "t": ("length",), "w": ("window",), "c": ("context", "chunk"), "ps": ("page",),
    "r": ("latent",), "g": ("groups",),
}  # fmt: skip


@dataclass(frozen=True)
class AttentionShape(Shape):
    """One attention call: ``[batch, q_len, heads, head_dim]`` against ``kv_heads``.

    ``v_dim`` None = ``head_dim``; ``kv_len`` None = ``q_len``. ``documents`` of equal length share
    a row. ``density``: the part of the 128 x 128 blocks that a random pattern keeps, which makes
    it a call of blocksparse_attention alone; ``per_head``: a pattern for each head. ``bias_batch``
    and ``bias_heads``: 1 = one bias for all rows or heads, None = each has its own. A ``dtype`` of
    8 bits: quantized operands with a scale a head, forward only.
    """

    operations = (
        "flash_attention",
        "attention",
        "scaled_dot_product_attention",
        "blocksparse_attention",
        "native_sparse_attention",
        "ring_attention",
    )
    builder = "dense.attention"

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
    bias_batch: int | None = None
    bias_heads: int | None = None
    density: float | None = None
    per_head: bool = False

    def serves(self, operation: str) -> bool:
        if self.density is not None:
            return operation == "blocksparse_attention"
        if self.dtype == "float8_e4m3fn":
            return operation == "flash_attention"
        if operation == "native_sparse_attention":  # self-attention only
            return self.causal and self.keys == self.q_len and self.documents == 1
        return super().serves(operation)

    @property
    def keys(self) -> int:
        return self.q_len if self.kv_len is None else self.kv_len

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_dim is None else self.v_dim

    @property
    def bias_shape(self) -> tuple[int, int, int, int]:
        batch = self.batch if self.bias_batch is None else self.bias_batch
        heads = self.heads if self.bias_heads is None else self.bias_heads
        return batch, heads, self.q_len, self.keys

    def visible_pairs(self) -> float:
        """Returns the pairs of query and key that the mask leaves, per batch row and head."""
        rows, keys = self.q_len / self.documents, self.keys / self.documents
        if not self.causal:
            pairs = rows * keys
            if self.window is not None:
                pairs = rows * min(keys, 2 * self.window + 1)
        else:
            pairs = _causal_pairs(rows, keys)
            if self.window is not None:  # without the pairs that are more than a window apart
                pairs -= _causal_pairs(max(rows - self.window - 1, 0), keys)
        return pairs * self.documents

    def flops(self) -> float:
        """Returns the floating-point operations of the forward pass."""
        dims = self.head_dim + self.value_dim
        return 2.0 * self.batch * self.heads * self.visible_pairs() * dims


def _causal_pairs(rows: float, keys: float) -> float:
    """Returns the pairs of a query and a key that is not behind it."""
    return rows * (rows + 1) / 2 if rows <= keys else keys * (rows - (keys - 1) / 2)


@dataclass(frozen=True)
class DecodeShape(Shape):
    """One decoding step over a cache; ``context`` is the mean number of cached tokens."""

    operations = ("page_attention", "ragged_decode_attention")
    builder = "paged.decode"

    batch: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    uneven: bool = False
    window: int | None = None
    soft_cap: float | None = None
    sinks: int = 0

    def serves(self, operation: str) -> bool:
        """A cache of another dtype than the queries' is one in pages."""
        paged = operation == "page_attention" or self.cache_dtype == self.dtype
        return super().serves(operation) and paged


@dataclass(frozen=True)
class RaggedShape(Shape):
    """A server's step: rows that decode one token and rows that read ``chunk`` tokens of a prompt.

    Every row has ``context`` tokens in the cache once the step's own are written; ``uneven``: as
    many in all, spread like a DecodeShape's; ``ramp``: rows that read a prompt have 1, 2, ...
    times their chunk, being at its first, second, ... one. ``cache_dtype`` None = ``dtype``.
    """

    operations = ("ragged_page_attention", "ragged_page_attention_v3")
    builder = "paged.ragged"

    decodes: int
    prefills: int
    chunk: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    dtype: str = "bfloat16"
    window: int | None = None
    soft_cap: float | None = None
    sinks: int = 0
    cache_dtype: str | None = None
    uneven: bool = False
    ramp: bool = False

    @property
    def tokens(self) -> int:
        return self.decodes + self.prefills * self.chunk

    @property
    def sequences(self) -> int:
        return self.decodes + self.prefills


@dataclass(frozen=True)
class LatentShape(Shape):
    """Latent attention: ``latent`` elements per token expand to keys of ``nope`` and values.

    ``rope`` key dims are shared by all heads.
    """

    operations = ("mla_attention",)
    builder = "latent.prefill"

    batch: int
    length: int
    heads: int
    latent: int = 512
    rope: int = 64
    nope: int = 128
    v_dim: int = 128
    dtype: str = "bfloat16"
    causal: bool = True


@dataclass(frozen=True)
class LatentDecodeShape(Shape):
    """One decoding step in latent space over a paged cache of ``latent + rope`` per token."""

    operations = ("mla_decode",)
    builder = "latent.decode"

    batch: int
    context: int
    heads: int
    page: int
    latent: int = 512
    rope: int = 64
    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    uneven: bool = False


@dataclass(frozen=True)
class LinearShape(Shape):
    """One linear-attention call; ``v_dim`` None = ``head_dim``, ``kv_heads`` None = ``heads``.

    ``per_head``: one gate a head and token, where the operation takes gates. ``state``: from a
    float32 state and back to one, as decoding does; nothing is differentiated.
    """

    operations = ("gla_attention", "recurrent_attention", "lightning_attention")
    builder = "linear.linear"

    batch: int
    length: int
    heads: int
    head_dim: int
    dtype: str = "bfloat16"
    v_dim: int | None = None
    kv_heads: int | None = None
    per_head: bool = False
    state: bool = False

    def serves(self, operation: str) -> bool:
        """Returns whether the operation takes the case's gates: lightning attention takes none."""
        gateless = operation == "lightning_attention"
        return super().serves(operation) and not (self.per_head and gateless and not self.state)

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_dim is None else self.v_dim


@dataclass(frozen=True)
class DeltaShape(Shape):
    """One call of the gated delta rule; ``heads`` are value heads.

    ``kv_heads`` (of queries and keys) None = ``heads``, ``v_dim`` None = ``head_dim``.
    ``per_channel``: one gate per key channel. ``sequences``: packed into one row, their lengths
    log-normal. ``state``: from a float32 state and back to one, as decoding does; nothing is
    differentiated.
    """

    operations = ("gated_delta_rule",)
    builder = "delta.delta_rule"

    batch: int
    length: int
    heads: int
    head_dim: int
    dtype: str = "bfloat16"
    kv_heads: int | None = None
    v_dim: int | None = None
    per_channel: bool = False
    sequences: int | None = None
    state: bool = False

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_dim is None else self.v_dim


@dataclass(frozen=True)
class ConvolutionShape(Shape):
    """A causal convolution with silu; ``state``: from a state and back to one, as in decoding."""

    operations = ("causal_conv1d",)
    builder = "delta.convolution"

    batch: int
    length: int
    channels: int
    width: int = 4
    dtype: str = "bfloat16"
    state: bool = False


@dataclass(frozen=True)
class GroupedShape(Shape):
    """``m`` rows in ``groups`` runs, each times its own ``[k, n]``.

    Runs are as long as a router makes them; ``even``: all alike; ``zipf``: the i-th longest has
    1 / i of the rows of the longest. ``stored``: 8-bit dtype of the matrices, which then have a
    scale a column and no gradient.
    """

    operations = ("grouped_matmul",)
    builder = "grouped.product"

    m: int
    k: int
    n: int
    groups: int
    dtype: str = "bfloat16"
    even: bool = False
    zipf: bool = False
    stored: str | None = None


@dataclass(frozen=True)
class PoolShape(Shape):
    """Means over chunks of ``chunk`` tokens; None = over the whole length."""

    operations = ("mean_pooling",)
    builder = "grouped.means"

    batch: int
    length: int
    channels: int
    chunk: int | None = None
    dtype: str = "bfloat16"


FAMILIES: tuple[type[Shape], ...] = tuple(Shape.__subclasses__())
