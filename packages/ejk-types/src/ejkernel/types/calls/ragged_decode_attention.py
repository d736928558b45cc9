"""The call of ragged_decode_attention."""

from ejkernel.types.calls import settle
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.calls.words import Array, F, I


class RaggedDecodeAttention(Call):
    """One decode token per sequence over a contiguous cache."""

    name = "ragged_decode_attention"

    @staticmethod
    def takes(
        query: F[Array, "batch 1 heads head_dim"] | F[Array, "batch heads head_dim"],
        key: F[Array, "batch kv_len kv_heads head_dim"],
        value: F[Array, "batch kv_len kv_heads v_dim"],
        sequence_start: I[Array, " batch"],
        sequence_end: I[Array, " batch"],
        softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
        *,
        softmax_scale: float | None = None,
        sliding_window: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
    ) -> None: ...

    @classmethod
    def output_axes(cls, a: Arguments) -> tuple[str, ...]:
        return ("batch heads v_dim" if a["query"].ndim == 3 else "batch 1 heads v_dim",)

    @staticmethod
    def canonicalise(a: Arguments) -> None:
        settle.grouped_heads(a)
        settle.softmax_options(a)
        settle.sinks(a)
