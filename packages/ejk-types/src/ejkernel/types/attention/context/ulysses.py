"""Heads for sequence: every device attends with some of the heads over the full sequence.

All-to-alls exchange the sharded axis of queries, keys and values before a kernel call, and that of
its output after it. Long sequences go in groups of heads, each with a kernel call of its own, which
depend on nothing of each other: one group travels while another is computed. A key head that
several devices need is sent to each of them. The gradient of an exchange is JAX's: the reverse
exchange, summed over the copies of a key head.

Source: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.attention.context import masks
from ejkernel.types.attention.context.piece_calls import captured_floats
from ejkernel.types.attention.context.ring import Ring
from ejkernel.types.attention.rows import RowScales, finalize_rows, sink_gradient
from ejkernel.types.masks.fields import with_private
from ejkernel.types.masks.hidden import clear_unless
from ejkernel.types.masks.mask_info import MaskInfo

Arrays = dict[str, Any]
FLOATS = ("query", "key", "value", "bias", "softmax_aux")


@dataclass(frozen=True)
class Exchange:
    """The exchange of one group of heads between the devices of a ring.

    Attributes:
        ring: the devices.
        heads: query heads of the call.
        groups, group: number of groups, and the index of this one. Each device's heads
            are spread evenly over the groups.
        gathered: values per token of all devices, which groups share, by the ids of the local ones.
    """

    ring: Ring
    heads: int
    groups: int = 1
    group: int = 0
    gathered: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)

    def split_groups(self) -> list[Exchange]:
        """Returns the exchange of every group."""
        return [replace(self, group=group) for group in range(self.groups)]

    @property
    def local_heads(self) -> int:
        return self.heads // (self.ring.size * self.groups)

    @property
    def first_head(self) -> Any:
        heads_of_device = self.local_heads * self.groups
        return self.ring.device_index() * heads_of_device + self.group * self.local_heads

    def select_group(self, x: jax.Array) -> jax.Array:
        """Returns the heads of the group, of ``[b, tokens, heads, ...]``."""
        if self.groups == 1:
            return x
        (b, t, _, *tail), n = x.shape, self.ring.size
        return x.reshape(b, t, n, self.groups, -1, *tail)[:, :, :, self.group].reshape(
            b, t, -1, *tail
        )

    def join_groups(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Returns ``[b, tokens, heads, ...]`` of the parts of all groups."""
        if self.groups == 1:
            return parts[0]
        (b, t, _, *tail), n = parts[0].shape, self.ring.size
        by_device = [x.reshape(b, t, n, 1, -1, *tail) for x in parts]
        return jnp.concatenate(by_device, 3).reshape(b, t, -1, *tail)

    def _chunk_order(self) -> np.ndarray:
        """Returns the indices of the chunks in the order in which devices have them."""
        n = self.ring.size
        return np.array([c for r in range(n) for c in (r, 2 * n - 1 - r)])

    def permute_chunks(self, x: jax.Array, axis: int, *, back: bool = False) -> jax.Array:
        """Permutes a gathered axis to the order of the sequence, or ``back``."""
        if not self.ring.zigzag:
            return x
        order = self._chunk_order()
        shape = (*x.shape[:axis], len(order), x.shape[axis] // len(order), *x.shape[axis + 1 :])
        order = order if back else np.argsort(order)
        return jnp.take(x.reshape(shape), order, axis=axis).reshape(x.shape)

    def to_heads(self, x: jax.Array) -> jax.Array:
        """Returns ``[b, all tokens, local heads, ...]`` of ``[b, local tokens, heads, ...]``."""
        x = self.select_group(x)
        x = jax.lax.all_to_all(x, self.ring.axis_name, 2, 1, tiled=True)
        return self.permute_chunks(x, 1)

    def to_tokens(self, x: jax.Array) -> jax.Array:
        """Reverses ``to_heads``; returns ``[b, local tokens, group's heads, ...]``."""
        x = self.permute_chunks(x, 1, back=True)
        return jax.lax.all_to_all(x, self.ring.axis_name, 1, 2, tiled=True)

    def keys_to_heads(self, x: jax.Array) -> jax.Array:
        """Returns keys or values of the local query heads, of all tokens."""
        n, kv_heads = self.ring.size, x.shape[2]
        if kv_heads % n:
            # one head a device where its query heads share it, else one for every query head
            shared = n if n % kv_heads == 0 else self.heads
            x = jnp.repeat(x, shared // kv_heads, axis=2)
        return self.to_heads(x)

    def gather_tokens(self, ids: jax.Array) -> jax.Array:
        """Returns values per token ``[..., all tokens]`` of the local query heads."""
        if id(ids) not in self.gathered:
            everywhere = jax.lax.all_gather(ids, self.ring.axis_name, axis=ids.ndim - 1, tiled=True)
            self.gathered[id(ids)] = ids, everywhere
        ids = self.gathered[id(ids)][1]
        if ids.ndim == 3 and ids.shape[1] == self.heads:
            ids = jax.lax.dynamic_slice_in_dim(ids, self.first_head, self.local_heads, 1)
        return self.permute_chunks(ids, ids.ndim - 1)

    def bias_to_heads(self, x: jax.Array, *, rows: bool, columns: bool) -> jax.Array:
        """Returns a bias or mask ``[#b, #h, q, k]`` for all queries and the local heads.

        ``rows``, ``columns``: whether it has a row for each query, a column for each key.
        """
        axis = self.ring.axis_name
        if rows and x.shape[1] == self.heads:
            x = jax.lax.all_to_all(x, axis, 1, 2, tiled=True)
        else:
            if rows:
                x = jax.lax.all_gather(x, axis, axis=2, tiled=True)
            if x.shape[1] == self.heads:
                x = jax.lax.dynamic_slice_in_dim(x, self.first_head, self.local_heads, 1)
        x = self.permute_chunks(x, 2) if rows else x
        return self.permute_chunks(x, 3) if columns else x

    def gather_mask(self, terms: masks.Terms) -> MaskInfo:
        """Returns the mask between all queries and keys, for the local heads."""
        full = MaskInfo()
        for term in terms:
            fields = {name: getattr(term, name) for name in masks.TOKEN_FIELDS}
            fields = {n: self.gather_tokens(x) for n, x in fields.items() if x is not None}
            dense = term.attention_mask
            if dense is not None:
                rows, columns = (not masks.is_stretched(term, axis) for axis in (2, 3))
                fields["attention_mask"] = self.bias_to_heads(dense, rows=rows, columns=columns)
            full = full & with_private(term, _and=(), **fields)
        return full

    def exchange_floats(self, floats: Mapping[str, Any]) -> Arrays:
        """Returns the arrays of floats of the local heads."""
        exchanged = {"query": self.to_heads(floats["query"])}
        exchanged |= {name: self.keys_to_heads(floats[name]) for name in ("key", "value")}
        bias = floats.get("bias")
        if bias is not None:
            local = floats["query"].shape[1]
            rows = bias.shape[2] == local and local * self.ring.size > 1
            exchanged["bias"] = self.bias_to_heads(bias, rows=rows, columns=True)
        sinks = floats.get("softmax_aux")
        if sinks is not None:
            count = self.local_heads
            exchanged["softmax_aux"] = jax.lax.dynamic_slice_in_dim(sinks, self.first_head, count)
        return exchanged

    def flash_arguments(
        self,
        defaults: Mapping[str, Any],
        problem: Any,
        floats: Arrays,
        arrays: Arrays,
    ) -> Arrays:
        """Returns the canonical arguments of flash attention; ``floats`` are exchanged."""
        seed, options = None, problem.options
        if options["dropout_prob"]:
            words = jnp.asarray(arrays["dropout_seed"]).reshape(-1)
            words = jnp.concatenate([words, *[words[:1] * 0] * (3 - words.shape[0])])
            first = jnp.asarray(self.first_head, words.dtype)
            seed = words + jnp.stack([first * 0, first * 0, first])
        others = {"softmax_aux": None, "return_lse": True, "dropout_seed": seed}
        for name, form in problem.mods:
            others[name] = form.mod(arrays).on_shard(0, self.first_head)
        mask = self.gather_mask(arrays["mask_terms"])
        return {**defaults, **options, **floats, **others, "mask_info": mask}


def select_floats(arrays: Arrays) -> Arrays:
    """Returns the arrays that are exchanged and have gradients."""
    return {name: arrays[name] for name in FLOATS if arrays.get(name) is not None}


def _make_call(work: Any, exchange: Exchange, floats: Arrays, arrays: Arrays) -> tuple[Any, Arrays]:
    """Returns the work and the operands of the kernel call."""
    flash, problem = work.kernel.flash, work.problem.exchanged
    defaults = flash.call.boundary.defaults
    arguments = exchange.flash_arguments(defaults, work.problem, floats, arrays)
    tiles = work.tiles.exchanged
    call = replace(work, kernel=flash, problem=problem, tiles=tiles, fallback=None)
    operands = flash.operands(arguments, problem)
    return call, {name: x for name, x in operands.items() if x is not None}


def forward(work: Any, arrays: Arrays) -> tuple[tuple[jax.Array, jax.Array], RowScales]:
    """Returns o ``[b, q, h, dv]``, lse ``[b, q, h]`` and the row values that gradients need."""
    exchange = _make_exchange(work, arrays)
    parts = [_forward_of_group(work, arrays, group) for group in exchange.split_groups()]
    return jax.tree.map(lambda *x: exchange.join_groups(x), *parts)


def _make_exchange(work: Any, arrays: Arrays) -> Exchange:
    return Exchange(work.problem.ring, arrays["query"].shape[2], work.problem.head_groups)


def _forward_of_group(work: Any, arrays: Arrays, exchange: Exchange) -> Any:
    flash, query = work.kernel.flash, arrays["query"]
    floats = exchange.exchange_floats(select_floats(arrays))
    call, operands = _make_call(work, exchange, floats, arrays)
    o, rows = flash.partial_result(call, operands)
    o, lse, scales = finalize_rows(o, rows, floats.get("softmax_aux"), flash.row_unit(call.problem))
    o = exchange.to_tokens(o.astype(query.dtype))
    lse, scales = jax.tree.map(exchange.to_tokens, (lse, scales))
    return (o, lse), scales


def backward(
    work: Any, arrays: Arrays, outputs: tuple[Any, ...], scales: RowScales, cotangents: Any
) -> Mapping[str, Any]:
    """Returns gradients by the names of the arrays."""
    acc, (o, _), (do, dlse) = scales.m.dtype, outputs, cotangents
    delta = (do.astype(acc) * o.astype(acc)).sum(-1) - dlse.astype(acc)
    groups = _make_exchange(work, arrays).split_groups()
    parts = [_backward_of_group(work, arrays, group, scales, delta, do) for group in groups]
    # each is zero in the heads of the other groups
    return jax.tree.map(lambda *x: reduce(jnp.add, x), *parts)


def _backward_of_group(
    work: Any, arrays: Arrays, exchange: Exchange, scales: RowScales, delta: Any, do: Any
) -> Arrays:
    flash = work.kernel.flash
    scales, delta, do = jax.tree.map(exchange.to_heads, (scales, delta, do))
    floats, pull_back = jax.vjp(exchange.exchange_floats, select_floats(arrays))
    gradients: Arrays = {}
    if "softmax_aux" in floats:
        gradients["softmax_aux"] = sink_gradient(floats["softmax_aux"], scales, delta)
    alive = masks.alive_rows(work.problem.mods, arrays["mask_terms"], scales)
    query, do, delta = clear_unless(alive, floats["query"], do, delta)
    call, operands = _make_call(work, exchange, {**floats, "query": query}, arrays)
    rows = {"scales": scales._replace(sinks=None), "delta": delta, "do": do}
    gradients |= flash.partial_gradients(call, operands, o=None, dlse=None, **rows)
    if "bias" in floats and floats["bias"].shape[2] == 1:
        gradients["bias"] = gradients["bias"].sum(2, keepdims=True)
    captured = {name: gradients[name] for name in captured_floats(work.problem.mods, arrays)}
    local = {name: gradients[name].astype(x.dtype) for name, x in floats.items()}
    return captured | pull_back(local)[0]
