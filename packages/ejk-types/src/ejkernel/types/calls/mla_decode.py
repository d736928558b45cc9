"""The call of mla_decode."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ejkernel.types.calls import drawn, settle
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.calls.words import Array, Cache, F, I


class MLADecode(Call):
    """Multi-head latent attention for decoding, in latent space."""

    name = "mla_decode"
    asks_for_more = "return_lse"

    @staticmethod
    def takes(
        query: F[Array, "batch heads cache_dim"] | F[Array, "batch q_len heads cache_dim"],
        latent_cache: Cache[Array, "pages page_size cache_dim"],
        context_lens: I[Array, " batch"],
        block_tables: I[Array, "batch max_blocks"],
        *,
        latent_dim: int = 512,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
        sliding_window: int | tuple[int, int] | None = None,
        softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
        k_scale: float | F[Array, ""] | None = None,
        num_splits: int | None = None,
        return_lse: bool = False,
    ) -> None: ...

    @classmethod
    def output_axes(cls, a: Arguments) -> tuple[str, ...]:
        rows = "batch heads" if a["query"].ndim == 3 else "batch q_len heads"
        return cls.asked(a, (rows + " latent_dim", rows))

    @staticmethod
    def check_values(a: Arguments) -> None:
        settle.check_tables(a, "context_lens", "block_tables", "latent_cache")
        settle.scalars_to_arrays(a, "k_scale")

    @staticmethod
    def canonicalise(a: Arguments) -> None:
        settle.latent_dim(a)
        settle.softmax_options(a)
        settle.count(a, "num_splits")
        settle.sinks(a)
        settle.head_scales(a, "k_scale", kv_heads=None)

    @classmethod
    def samples(cls, a: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Full contexts, and tables that visit pages in random order."""
        names = ("query", "latent_cache", "softmax_aux", "k_scale")
        found = drawn.tables(a, rng, "context_lens", "latent_cache")
        return found | drawn.normal(a, rng, *names)
