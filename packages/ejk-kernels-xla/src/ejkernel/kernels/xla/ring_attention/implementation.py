"""Ring attention in XLA as one kernel object: the blockwise passes on every visiting shard."""

from __future__ import annotations

from ejkernel.kernels.xla.flash_attention.implementation import flash_attention
from ejkernel.kernels.xla.kernel import XlaKernel
from ejkernel.types import calls
from ejkernel.types.attention.context.kernel import ContextParallel
from ejkernel.types.calls import arguments


class RingAttention(ContextParallel, XlaKernel):
    """flash_attention over a sequence spread along a mesh axis.

    Call it inside ``shard_map``. Every array is this device's shard, ``bias`` and a dense mask
    with the keys of all devices; the result is its rows of flash_attention on the whole arrays.
    ``cfg``: ``q_blocksize`` and ``kv_blocksize`` of ``fwd_params`` and of ``bwd_params``.
    Differentiable in reverse mode in query, key, value, bias and softmax_aux, through o and lse.
    """

    call = calls.RingAttention
    reads = arguments.RING | arguments.DROPOUT | {"bias", "precision", "logits_dtype"}
    flash = flash_attention


ring_attention = RingAttention()
