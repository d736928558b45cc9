"""What one call computes, as static facts: hashable, so that it can key compiled programs."""

from __future__ import annotations

from dataclasses import dataclass, replace

LOG2E = 1.4426950408889634


def split_dim(dim: int) -> tuple[int, int]:
    """(main, rest): powers of two that hold ``dim`` columns; rest 0 when one is enough.

    80 -> (64, 16), 96 -> (64, 32), 112 -> (64, 64), 192 -> (128, 64). Products need 16 columns.
    """
    main = max(16, 1 << (dim.bit_length() - 1))
    if dim <= main:
        return main, 0
    return main, max(16, 1 << (dim - main - 1).bit_length())


def exact_dim(dim: int) -> bool:
    """Whether ``split_dim`` needs no padding."""
    return sum(split_dim(dim)) == dim


@dataclass(frozen=True)
class Band:
    """lo <= key - query <= hi; None is no bound."""

    lo: int | None = None
    hi: int | None = None

    @property
    def empty(self) -> bool:
        return self.lo is None and self.hi is None

    def narrowed(self, lo: int | None, hi: int | None) -> Band:
        """The intersection with another band."""
        los = [x for x in (self.lo, lo) if x is not None]
        his = [x for x in (self.hi, hi) if x is not None]
        return Band(max(los) if los else None, min(his) if his else None)


@dataclass(frozen=True)
class Problem:
    """Sizes and options of one attention call.

    Attributes:
        batch, q_len, kv_len, heads, kv_heads, dim, value_dim: sizes.
        dtype: of q, k, v and o.
        scale: factor of the products.
        soft_cap: cap of the logits or None.
        dropout: drop probability.
        precision: of products of float32 inputs: "tf32", "tf32x3" or "ieee".
        biased: whether a bias is added.
        seed_batches: batch rows that share one seed and count from its first index; a vmap axis
            multiplies ``batch`` but not this.
    """

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    dtype: str
    scale: float
    soft_cap: float | None = None
    dropout: float = 0.0
    precision: str = "tf32"
    biased: bool = False
    seed_batches: int = 1

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def keep_threshold(self) -> int:
        return round(self.dropout * 2**24)

    @property
    def keep_scale(self) -> float:
        return 1.0 / (1.0 - self.dropout)

    def folded(self, size: int) -> Problem:
        """The same problem ``size`` times along the batch axis."""
        return replace(self, batch=self.batch * size)
