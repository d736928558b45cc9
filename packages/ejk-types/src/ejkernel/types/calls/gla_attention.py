"""The call of gla_attention."""

from ejkernel.types.calls.linear import LinearCall
from ejkernel.types.calls.words import Array, F, I


class GLAttention(LinearCall):
    """Gated linear attention."""

    name = "gla_attention"
    algorithm = "gla"

    @staticmethod
    def takes(
        query: F[Array, "batch seq heads key_dim"],
        key: F[Array, "batch seq kv_heads key_dim"],
        value: F[Array, "batch seq kv_heads v_dim"],
        g: F[Array, "batch seq heads key_dim"] | F[Array, "batch seq heads"] | None = None,
        g_gamma: F[Array, " heads"] | None = None,
        initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
        cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
        *,
        softmax_scale: float | None = None,
        reverse: bool = False,
        return_state: bool = False,
    ) -> None: ...
