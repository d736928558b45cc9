"""Attention with the sequence axis spread over devices, and the zigzag layout helpers."""

import operator
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, Never

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from ejkernel.modules._configs import RingAttentionConfig
from ejkernel.modules._distribute import LocalCall, distribute
from ejkernel.modules._op import Operation, flatten, own_errors
from ejkernel.modules._specs import explicit_mesh
from ejkernel.modules.compat import (
    ambient_mesh,
    automatic_mesh,
    other_than_automatic,
)
from ejkernel.ops import InvalidArgument, Platform, Support
from ejkernel.ops.compat import explicit_axes
from ejkernel.ops.execution.executor import get_default_executor
from ejkernel.ops.partition import regions_are_partitioned
from ejkernel.types import MaskInfo, calls
from ejkernel.types.calls.ring_attention import axis_is_bound, check_ring_lengths
from ejkernel.types.calls.words import Array, F, I, Key, describe_value

_asking: ContextVar[bool] = ContextVar("ejkernel_ring_asking", default=False)
"""Whether a call is only asked about, so that arrays without a mesh stand for one device's."""


def ring_attention(
    query: F[Array, "batch q_len heads head_dim"],
    key: F[Array, "batch kv_len kv_heads head_dim"],
    value: F[Array, "batch kv_len kv_heads v_dim"],
    bias: F[Array, "#batch #heads #q_len kv_total"] | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    axis_name: str,
    mask_info: MaskInfo | None = None,
    q_segment_ids: I[Array, "#batch q_len"] | None = None,
    kv_segment_ids: I[Array, "#batch kv_len"] | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | I[Array, ""] | Key[Array, ""] | None = None,
    layout: Literal["contiguous", "zigzag"] = "contiguous",
    return_lse: bool = False,
    precision: jax.lax.PrecisionLike = None,
    logits_dtype: DTypeLike = jnp.float32,
    platform: str | Platform | None = None,
    cfg: RingAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
    **unknown: Never,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention over a sequence sharded along a mesh axis.

    Keys and values travel round the ring of devices while each device folds the visiting block
    into its running softmax; the result is :func:`flash_attention`'s on the gathered arrays.

    Called where ``axis_name`` is bound (inside ``shard_map``), arrays are local shards and
    ``mesh``, ``in_specs``, ``out_specs`` must be None. Called on global arrays, the mesh is
    ``mesh``, the ambient one (``with mesh:``, ``jax.set_mesh``) or that of the arrays, and the op
    shards itself.

    Args:
        query: ``[batch, q_len, heads, head_dim]``, sharded along q_len.
        key: ``[batch, kv_len, kv_heads, head_dim]``, sharded along kv_len.
        value: ``[batch, kv_len, kv_heads, v_dim]``, sharded along kv_len.
        bias: ``[1 or batch, 1 or heads, 1 or q_len, all keys]``: the query axis is sharded like the
            query, the key axis is whole and in the order of the key array.
        softmax_aux: attention sinks, ``[heads, sinks]`` or ``[sinks]``; counted once.
        axis_name: the mesh axis the sequence is sharded over. Size 1 is legal.
        mask_info: as in :func:`flash_attention`; a dense mask is laid out like ``bias``.
        q_segment_ids, kv_segment_ids: ids per token, sharded with their sequence; negative =
            padding; kv defaults to q.
        causal, causal_offset, sliding_window: as in :func:`flash_attention`, with positions in the
            full sequence.
        dropout_prob, dropout_seed: as in :func:`flash_attention`, with positions in the full
            sequence.
        logits_soft_cap, softmax_scale, return_lse: as in :func:`flash_attention`.
        precision, logits_dtype: as in :func:`flash_attention`.
        layout: "zigzag": the arrays are already permuted by :func:`zigzag_shard` (device r holds
            chunks r and 2n - 1 - r of 2n), which balances causal work; the output keeps that
            order, masks and dropout follow the original positions.
        platform, cfg: as in :func:`flash_attention`.
        mesh, in_specs, out_specs: for global arrays; default specs are
            ``PartitionSpec(None, axis_name, None, None)``.

    Returns:
        ``[batch, q_len, heads, v_dim]`` in the query's dtype; with ``return_lse`` also
        ``[batch, q_len, heads]`` in float32 (float64 for float64 inputs).

    Raises:
        InvalidArgument: wrong dtype, rank or axis size; a length the ring does not divide.
        ValueError: no axis and no mesh, or a value out of range.
        KernelNotSupported: the forced platform cannot do this call.
        ConfigError: an illegal ``cfg``.

    Differentiable in query, key, value, bias and softmax_aux.

    Source: Liu et al. 2023, "Ring Attention" (arXiv 2310.01889), algorithm 1; zigzag order:
    Brandon et al. 2023, "Striped Attention" (arXiv 2311.09431), and its two-chunk variant.
    """
    return get_default_executor()(RingAttention.shared(), **flatten(locals()))


class RingAttention(Operation[RingAttentionConfig]):
    spec = calls.RingAttention
    function = staticmethod(ring_attention)

    def distributes(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Always: without a mesh of its own it has to find where its axis is bound."""
        return True

    def distribute(
        self, args: tuple, kwargs: dict[str, Any], placement: tuple[Any, Any, Any], call: LocalCall
    ) -> Any:
        """Local arrays go straight to the kernel, global ones through a shard_map over the ring.

        Raises:
            ValueError: neither a bound axis nor a mesh, or both.
        """
        a = self.spec.boundary.by_name(args, kwargs)
        axis, (mesh, in_specs, out_specs) = a["axis_name"], placement
        with own_errors():
            if axis_is_bound(axis):
                named = zip(("mesh", "in_specs", "out_specs"), placement, strict=True)
                extra = [name for name, value in named if value is not None]
                if extra:
                    raise ValueError(
                        f"{extra[0]}: given where axis_name {axis!r} is already bound, "
                        "expected None"
                    )
                return call((), a)
            typed = explicit_mesh(a) if mesh is in_specs is out_specs is None else None
            if typed is not None and axis in explicit_axes(typed):
                check_ring_lengths(a, typed.shape[axis], shards=1)
                return distribute(self, a, placement, call, ring_axis=axis)
            requested = mesh is not None
            mesh = mesh if requested else ambient_mesh() or automatic_mesh(a)
            if mesh is None or axis not in mesh.shape:
                if _asking.get():
                    return call((), a)
                has = (
                    "no mesh is given" if mesh is None else f"the mesh has {', '.join(mesh.shape)}"
                )
                raise ValueError(
                    f"axis_name: {axis!r} is not bound here and {has}; expected one of: "
                    "call it inside shard_map where the axis is bound, pass mesh=, enter a mesh "
                    "(with mesh: or jax.set_mesh), or give arrays that lie on one"
                )
            check_ring_lengths(a, mesh.shape[axis], shards=1)
            alone = not requested and _leaves_other_axes(mesh)
            if in_specs is None:
                in_specs = (PartitionSpec(None, axis, None, None),) * 3
            where = (mesh, in_specs, out_specs)
            return distribute(self, a, where, call, ring_axis=axis, ring_alone=alone)

    def supports(
        self, *args: Any, platform: str | Platform | None = None, **kwargs: Any
    ) -> Support:
        token = _asking.set(True)
        try:
            return super().supports(*args, platform=platform, **kwargs)
        finally:
            _asking.reset(token)


def _leaves_other_axes(mesh: Any) -> bool:
    """Returns whether the compiler can shard kernels over the mesh axes that are not the ring's."""
    several = sum(size > 1 for size in mesh.shape.values()) > 1
    return several and not other_than_automatic(mesh) and regions_are_partitioned()


def _index(name: str, n: Any) -> int:
    """Returns an integer argument as an int.

    Raises:
        InvalidArgument: it is no integer.
    """
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise InvalidArgument(f"{name}: expected an integer, given {describe_value(n)}")
    return operator.index(n)


def _halves(x: Array, axis_size: int, axis: int) -> tuple[jax.Array, int]:
    """``x`` with its sequence axis split into ``2 * axis_size`` chunks."""
    axis_size, axis = _index("axis_size", axis_size), _index("axis", axis)
    if axis_size < 1:
        raise ValueError(f"axis_size: given {axis_size!r}, expected an integer >= 1")
    if not hasattr(x, "ndim"):
        raise InvalidArgument(f"x: expected an array, given {describe_value(x)}")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis: given {axis}, expected within the {x.ndim} axes of x")
    axis %= x.ndim
    length = x.shape[axis]
    if length % (2 * axis_size):
        raise InvalidArgument(
            f"x: expected axis {axis} divisible by 2 * axis_size = {2 * axis_size}, "
            f"given {x.dtype}[{', '.join(map(str, x.shape))}]"
        )
    chunks = (*x.shape[:axis], 2 * axis_size, length // (2 * axis_size), *x.shape[axis + 1 :])
    return jnp.reshape(x, chunks), axis


def zigzag_shard(x: Array, axis_size: int, axis: int = 1) -> jax.Array:
    """Permute a sequence axis so that device r of ``axis_size`` holds chunks r and 2n - 1 - r.

    Args:
        x: any array whose ``axis`` is divisible by ``2 * axis_size``.
        axis_size: number of devices n along the ring.
        axis: the sequence axis.

    Returns:
        An array of the same shape and dtype; :func:`zigzag_unshard` undoes it.

    Raises:
        InvalidArgument: the axis is not divisible.
    """
    chunks, axis = _halves(x, axis_size, axis)
    order = [c for r in range(axis_size) for c in (r, 2 * axis_size - 1 - r)]
    return jnp.reshape(jnp.take(chunks, jnp.asarray(order), axis=axis), x.shape)


def zigzag_unshard(x: Array, axis_size: int, axis: int = 1) -> jax.Array:
    """Undo :func:`zigzag_shard`; same arguments, result and errors."""
    chunks, axis = _halves(x, axis_size, axis)
    order = [c for r in range(axis_size) for c in (r, 2 * axis_size - 1 - r)]
    back = sorted(range(len(order)), key=order.__getitem__)
    return jnp.reshape(jnp.take(chunks, jnp.asarray(back), axis=axis), x.shape)
