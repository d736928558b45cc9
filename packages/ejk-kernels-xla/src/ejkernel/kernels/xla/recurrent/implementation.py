"""Recurrent linear attention with gates."""

from ejkernel.kernels.xla._linear.kernel import LinearKernel
from ejkernel.types import calls


class RecurrentAttention(LinearKernel):
    """Linear attention with gates, one ``[dk, dv]`` state a head.

    Everything accumulates in float32, in float64 when query, key or value is float64; states are
    returned in that dtype. ``cfg``: ``time_tile``, the chunk length, a power of two.
    Differentiable in reverse mode in query, key, value, every gate and initial_state, through the
    output and the state, in memory ``s + (s / chunk) dk dv`` per head.
    """

    call = calls.RecurrentAttention


recurrent_attention = RecurrentAttention()
