"""Gated linear attention."""

from ejkernel.kernels.xla._linear.kernel import LinearKernel
from ejkernel.types import calls


class GLAttention(LinearKernel):
    """Gated linear attention, log decays g and g_gamma.

    ``cfg``: ``time_tile``, the chunk length, a power of two. Differentiable as
    ``recurrent_attention``.
    """

    call = calls.GLAttention


gla_attention = GLAttention()
