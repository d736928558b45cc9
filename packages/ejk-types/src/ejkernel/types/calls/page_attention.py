"""The call of page_attention."""

from ejkernel.types.calls import settle
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.calls.words import Array, Cache, F, I


class PageAttention(Call):
    """One decode token per sequence over a paged cache."""

    name = "page_attention"

    @staticmethod
    def takes(
        query: F[Array, "batch 1 heads head_dim"] | F[Array, "batch heads head_dim"],
        key_cache: Cache[Array, "pages page_size kv_heads head_dim"],
        value_cache: Cache[Array, "pages page_size kv_heads v_dim"],
        context_lens: I[Array, " batch"],
        block_tables: I[Array, "batch max_blocks"],
        *,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
        sliding_window: int | tuple[int, int] | None = None,
        softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
        k_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
        v_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
        num_splits: int | None = None,
    ) -> None: ...

    @classmethod
    def output_axes(cls, a: Arguments) -> tuple[str, ...]:
        return ("batch heads v_dim" if a["query"].ndim == 3 else "batch 1 heads v_dim",)

    @staticmethod
    def check_values(a: Arguments) -> None:
        settle.check_tables(a, "context_lens", "block_tables", "key_cache")
        settle.scalars_to_arrays(a, "k_scale", "v_scale")

    @staticmethod
    def canonicalise(a: Arguments) -> None:
        settle.grouped_heads(a, key="key_cache")
        settle.softmax_options(a)
        settle.count(a, "num_splits")
        settle.sinks(a)
        settle.head_scales(a, "k_scale", "v_scale")
