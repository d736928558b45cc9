"""The call of mean_pooling."""

from ejkernel.types.calls import settle
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.calls.words import Array, F, Flags, I


class MeanPooling(Call):
    """Means over sequences, packed sequences or chunks of them."""

    name = "mean_pooling"

    @staticmethod
    def takes(
        x: F[Array, "batch seq *channels"] | F[Array, " tokens *channels"],
        cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
        *,
        chunk_size: int | None = None,
        attention_mask: Flags[Array, "batch seq"] | Flags[Array, " tokens"] | None = None,
    ) -> None: ...

    @classmethod
    def argument_axes(cls, a: Arguments) -> dict[str, str]:
        if not hasattr(a["x"], "shape"):
            return {}
        first = 2 if a["cu_seqlens"] is None else 1
        channels = "".join(f" channels_{i}" for i in range(len(a["x"].shape) - first))
        return {"x": ("batch seq" if first == 2 else "tokens") + channels}

    @classmethod
    def output_axes(cls, a: Arguments) -> tuple[str, ...]:
        packed = a["cu_seqlens"] is not None
        group = "sequences" if packed else "batch"
        chunks = "" if a["chunk_size"] is None else " chunks"
        channels = a["x"].ndim - (1 if packed else 2)
        return (group + chunks + "".join(f" channels_{i}" for i in range(channels)),)

    @staticmethod
    def check_values(a: Arguments) -> None:
        settle.check_packed(a, "cu_seqlens", "x", axis=0)

    @staticmethod
    def canonicalise(a: Arguments) -> None:
        settle.pooling(a)
