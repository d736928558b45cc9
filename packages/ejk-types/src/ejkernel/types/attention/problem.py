"""Static properties of one attention call: hashable, so that they can key programs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ejkernel.types.masks.structure import Rules
from ejkernel.types.mods import ModForm

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Problem:
    """Sizes and options of one attention call.

    Attributes:
        batch, q_len, kv_len, heads, kv_heads, dim, value_dim: sizes.
        dtype: of q, k and v.
        out_dtype: of o, where that is another.
        scale_blocks: scales of a head of q and of k, where these are of 8 bits.
        scale: factor of q k^T.
        soft_cap: cap of the logits or None.
        dropout: drop probability.
        precision: of matmuls of float32 inputs, as the backend names it.
        biased: whether a bias is added.
        score_mod, mask_mod: functions of a logit's indices.
        mask_mod_blocks: rows and keys of a block of a mask_mod, 0 where no block is known.
        rules: the static part of the mask; no rules where the caller gave none.
        pattern_blocks: rows and keys of a block, where a pattern of blocks is part of the mask.
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
    pattern_blocks: tuple[int, int] | None = None
    seed_batches: int = 1
    score_mod: ModForm | None = None
    mask_mod: ModForm | None = None
    mask_mod_blocks: int = 0
    rules: Rules = field(default_factory=Rules)
    out_dtype: str | None = None
    scale_blocks: tuple[int, int] | None = None

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def in_natural_units(self) -> bool:
        """True if logits are more than scaled dot products before a soft cap."""
        return self.biased or self.score_mod is not None

    @property
    def is_eight_bit(self) -> bool:
        """Returns whether the call has q, k and v of 8 bits, with scales."""
        return self.scale_blocks is not None

    @property
    def itemsize(self) -> int:
        return {"float32": 4, "float8_e4m3fn": 1}.get(self.dtype, 2)

    @property
    def output_dtype(self) -> str:
        return self.out_dtype or self.dtype

    @property
    def keep_threshold(self) -> int:
        return round(self.dropout * 2**24)

    @property
    def keep_scale(self) -> float:
        return 1.0 / (1.0 - self.dropout)

    def folded(self, size: int) -> Problem:
        """Returns this problem ``size`` times along the batch axis."""
        return replace(self, batch=self.batch * size)
