"""Gated linear attention."""

from ejkernel.kernels.xla._linear.kernel import LinearKernel
from ejkernel.types import calls


class GLAttention(LinearKernel):
    """Gated linear attention, log decays g and g_gamma; see the operation ``gla_attention``.

    ``cfg``: ``time_tile``, the chunk length, a power of two. Differentiable as
    ``recurrent_attention``.

    Source: Yang et al. 2023, Gated linear attention transformers (arXiv 2312.06635), sections 4.2
    and 4.3.
    """

    call = calls.GLAttention


gla_attention = GLAttention()
