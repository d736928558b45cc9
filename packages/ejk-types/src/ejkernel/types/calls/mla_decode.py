"""The call of mla_decode."""

from ejkernel.types.calls.paged import PagedCall
from ejkernel.types.calls.spec import Arguments
from ejkernel.types.calls.words import Array, Cache, F, I, out_of_range


class MLADecode(PagedCall):
    """Multi-head latent attention for decoding, in latent space."""

    name = "mla_decode"
    normal_samples = True

    @staticmethod
    def signature(
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
        return cls.select_outputs(a, (rows + " latent_dim", rows))

    @classmethod
    def check_values(cls, a: Arguments) -> None:
        super().check_values(a)
        cls.check_tables(a)

    @classmethod
    def canonicalize(cls, a: Arguments) -> None:
        """The value part lies inside a cache row."""
        super().canonicalize(a)
        dim, limit = a["latent_dim"], a["latent_cache"].shape[-1]
        if not 1 <= dim <= limit:
            raise out_of_range("latent_dim", f"1 to {limit}, the last axis of latent_cache", dim)
