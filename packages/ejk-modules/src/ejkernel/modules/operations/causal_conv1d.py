"""A short causal convolution over the tokens of each channel."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Never

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import CausalConv1DConfig
from ejkernel.modules._op import Operation, flatten
from ejkernel.ops import Platform
from ejkernel.ops.execution.executor import get_default_executor
from ejkernel.types import calls
from ejkernel.types.calls.words import Array, F, I


def causal_conv1d(
    x: F[Array, "batch seq channels"],
    weight: F[Array, "channels width"],
    bias: F[Array, " channels"] | None = None,
    initial_state: F[Array, "states channels history"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    activation: Literal["silu"] | None = None,
    return_state: bool = False,
    platform: str | Platform | None = None,
    cfg: CausalConv1DConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
    **unknown: Never,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The short depthwise convolution before linear attention: causal, ``width`` taps a channel.

    Of the tokens of one sequence, those before the first being ``initial_state`` or 0::

        y_t[c] = act(bias[c] + sum_i weight[c, i] * x_{t - width + 1 + i}[c])

    Args:
        x: ``[batch, seq, channels]``.
        weight: ``[channels, width]``, width from 2 to 8; the last tap is that of the present token.
        bias: ``[channels]``; None = 0.
        initial_state: the ``width - 1`` tokens before each sequence, the latest one last:
            ``[batch, channels, width - 1]``, or one per sequence with cu_seqlens. None: zeros.
        cu_seqlens: cumulative lengths ``[sequences + 1]``, first entry 0; needs batch 1. No
            sequence sees another; padding rows give 0.
        activation: "silu", or None for none.
        return_state: also return the last ``width - 1`` tokens of each sequence, which continue it
            as ``initial_state``.
        platform, cfg, mesh, in_specs, out_specs: as in :func:`flash_attention`; batch and
            channels may be sharded.

    Returns:
        ``[batch, seq, channels]`` in the dtype of ``x``, summed in float32 or better; with
        ``return_state`` also ``[batch or sequences, channels, width - 1]`` in the dtype of ``x``.

    Raises:
        InvalidArgument: wrong dtype, rank, axis size or activation.
        ValueError: bad ``cu_seqlens`` as a numpy array.
        KernelNotSupported: the forced platform cannot do this call.
        ConfigError: an illegal ``cfg``.

    Differentiable in x, weight, bias and initial_state, also through the state.

    Source: the depthwise convolution of Gu and Dao 2023, "Mamba" (arXiv 2312.00752), section 3.4.
    """
    return get_default_executor()(CausalConv1D.shared(), **flatten(locals()))


class CausalConv1D(Operation[CausalConv1DConfig]):
    spec = calls.CausalConv1D
    function = staticmethod(causal_conv1d)
