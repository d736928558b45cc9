"""A kernel of flash attention run over a sequence that is sharded along a mesh axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ejkernel.types.attention.context import masks, passes
from ejkernel.types.attention.context.pieces import Chunks, Piece
from ejkernel.types.attention.context.ring import Plan, Ring
from ejkernel.types.attention.context.transport import RingTransport
from ejkernel.types.masks.mask_info import MaskInfo

OPTIONS = ("softmax_scale", "logits_soft_cap", "dropout_prob", "precision", "logits_dtype")


@dataclass(frozen=True)
class ContextProblem:
    """Static properties of one device's part of a call.

    Attributes:
        ring: the mesh axis and how the sequence lies on it.
        plan: the steps and what each device computes in them.
        static_options: arguments that every piece gets, by name.
        calls: the distinct pieces with the problems of their kernel calls.
    """

    ring: Ring
    plan: Plan
    static_options: tuple[tuple[str, Any], ...]
    calls: tuple[tuple[Piece, Any], ...]

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.static_options)


@dataclass(frozen=True)
class ContextTiles:
    """Tiles of the kernel call of each piece, in the order of ``ContextProblem.calls``."""

    calls: tuple[Any, ...]


class ContextParallel:
    """Ring attention by ``flash``, a kernel of flash attention that computes parts of rows.

    Every piece is a call of that kernel with its own tiles. Its gradients come from the kernel's
    backward pass at the normaliser of the full row.
    """

    call: ClassVar[Any]
    flash: ClassVar[Any]
    """The kernel that computes the pieces."""
    vary_over: ClassVar[Any]
    has_backward: ClassVar[bool] = True
    partitioned: ClassVar[bool] = False
    saved_axes: ClassVar[str] = "batch q_len heads"

    def problem(self, a: Mapping[str, Any]) -> ContextProblem:
        ring = ring_of(a, strict=False)
        options = {name: a[name] for name in OPTIONS if name in self.flash.call.boundary.defaults}
        parts = _parts(a)
        lengths = (a["query"].shape[1], a["key"].shape[1])
        rules = masks.index_rules(parts)
        plan = make_plan(ring, rules, *lengths, joined=not a["dropout_prob"])
        static = ContextProblem(ring, plan, tuple(options.items()), ())
        return replace(static, calls=tuple(self._calls(static, a)))

    def _calls(self, static: ContextProblem, a: Mapping[str, Any]) -> Iterator[tuple[Piece, Any]]:
        """Yields the distinct pieces and their problems, from shapes alone."""
        everything = Chunks(0, static.ring.chunks)
        # a call that sees nothing has the dtypes and units of one that does
        pieces = static.plan.distinct or (Piece(everything, everything, None),)
        problems: list[Any] = []

        def probe(arrays: Mapping[str, Any]) -> None:
            p = passes.Pass(self, static, {**arrays, "parts": _parts({**a, **arrays})})
            for piece in pieces:
                arguments = passes.piece_arguments(p, piece, *p.own_keys, 0)
                problems.append(self.flash.problem(arguments))

        jax.eval_shape(probe, self.call.array_arguments(a))
        yield from zip(pieces, problems, strict=True)

    def unsupported_reason(self, problem: ContextProblem, target: Any) -> str | None:
        reasons = (self.flash.unsupported_reason(p, target) for _, p in problem.calls)
        return next((reason for reason in reasons if reason is not None), None)

    def choose(self, problem: ContextProblem, target: Any) -> ContextTiles:
        return ContextTiles(tuple(self.flash.choose(p, target) for _, p in problem.calls))

    def apply_config(
        self, chosen: ContextTiles, cfg: Any, problem: ContextProblem, target: Any
    ) -> ContextTiles:
        pairs = zip(chosen.calls, problem.calls, strict=True)
        return ContextTiles(
            tuple(self.flash.apply_config(tiles, cfg, p, target) for tiles, (_, p) in pairs)
        )

    def fields(self, chosen: ContextTiles) -> dict[str, Any]:
        """Returns no tiles: full and causal pieces have different ones."""
        return {}

    def notes_on(self, problem: ContextProblem, target: Any) -> tuple[str, ...]:
        steps, n = problem.plan.schedule.count, problem.ring.size
        if n == 1:
            return ()
        return (f"ring over {n} devices: {steps} of {n} shards of keys visit a device",)

    def call_of(self, work: Any, piece: Piece) -> tuple[Any, Any]:
        """Returns the problem and the tiles of the kernel call of a piece."""
        for (form, problem), tiles in zip(work.problem.calls, work.tiles.calls, strict=True):
            if form == piece:
                return problem, tiles
        raise KeyError(piece)

    def transport(self, work: Any, p: passes.Pass) -> Any:
        return RingTransport(p.ring, p.plan.schedule, p.own_keys)

    def operands(self, a: Mapping[str, Any], problem: ContextProblem) -> dict[str, Any]:
        """Returns the arrays of the call, all constraints as ``parts``."""
        ring = ring_of(a, strict=True)
        arrays = self.call.array_arguments(a)
        for name in ("mask_info", "q_segment_ids", "kv_segment_ids"):
            arrays.pop(name, None)
        parts = _parts(a)
        masks.check_keys(parts, ring.size * a["key"].shape[1])
        return self.vary_over({**arrays, "parts": parts}, ring.axis_name)

    def empty_outputs(self, a: Mapping[str, Any], problem: Any) -> tuple[Any, ...] | None:
        b, q_len, h, _ = a["query"].shape
        if 0 not in (b, q_len, a["key"].shape[1], h):
            return None
        dtype = jnp.promote_types(jnp.float32, a["logits_dtype"])
        o = jnp.zeros((b, q_len, h, a["value"].shape[3]), a["query"].dtype)
        return o, jnp.full((b, q_len, h), -jnp.inf, dtype)

    def forward(self, work: Any, arrays: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        return passes.forward(work, arrays)

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        return passes.backward(work, arrays, outputs, saved, cotangents)


@lru_cache(maxsize=512)
def _cached_plan(ring: Ring, rules: tuple, q_len: int, kv_len: int, joined: bool) -> Plan:
    return Plan.make(ring, rules, q_len, kv_len, joined=joined)


def make_plan(ring: Ring, rules: tuple, q_len: int, kv_len: int, *, joined: bool) -> Plan:
    """Returns ``Plan.make``, which calls of one form share."""
    return _cached_plan(ring, rules, q_len, kv_len, joined)


def ring_of(a: Mapping[str, Any], *, strict: bool) -> Ring:
    """Returns the mesh axis of a call; a ring of one device where it is not bound.

    Raises:
        ValueError: it is not bound and ``strict``.
    """
    name = a["axis_name"]
    try:
        size = jax.lax.axis_size(name)
    except NameError:
        if strict:
            raise ValueError(
                f"axis_name: {name!r} is not bound here; call inside shard_map over that axis"
            ) from None
        size = 1
    return Ring(name, size, a["layout"] == "zigzag" and size > 1)


def _parts(a: Mapping[str, Any]) -> masks.Parts:
    # a MaskInfo without arrays checks the rule's values
    rule = MaskInfo(
        causal=a["causal"], causal_offset=a["causal_offset"], sliding_window=a["sliding_window"]
    ).rule
    return masks.parts_of(a["mask_info"], rule, a["q_segment_ids"], a["kv_segment_ids"])
