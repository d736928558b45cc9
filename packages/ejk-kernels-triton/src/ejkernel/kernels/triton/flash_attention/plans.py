"""The launches of flash attention: which operand goes to which kernel parameter, and the grid.

Every operand and result has a leading batch axis of the full size or of 1 (shared by all rows),
which is how a ``vmap`` axis is folded in: it multiplies the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.common.dims import split_dim
from ejkernel.kernels.triton.flash_attention import groups
from ejkernel.kernels.triton.flash_attention.terms import gradient_factor, logit_shift, logit_unit
from ejkernel.kernels.triton.flash_attention.tiles import Tiles, can_use_tensor_maps, partial_stages
from ejkernel.kernels.triton.launch import (
    Launch,
    Named,
    Out,
    Shapes,
    TensorMap,
    merge_leading,
    shapes_of,
    struct,
)
from ejkernel.kernels.triton.targets import Target
from ejkernel.types.attention.problem import LOG2E, Problem
from ejkernel.types.masks.structure import Band, Rules

Block = tuple[int, int, int]
FLOAT = jnp.float32
MAX = float(jnp.finfo(FLOAT).max)
TINY = 2.0**-120


@dataclass(frozen=True)
class AttentionPlan(Named):
    """Common to the kernels here.

    Attributes:
        problem, rules, tiles: what is computed and how.
        shapes: name and shape of every operand, in order.
        tensor_maps: whether TMA may be used (None = where it can).
        mask_block: rows and keys that an element of the mask speaks for; keys of a word, if they
            are bits of words.
    """

    problem: Problem
    rules: Rules
    tiles: Tiles
    shapes: Shapes
    tensor_maps: bool | None = None
    mask_block: Block = (1, 1, 0)

    def uses_tensor_maps(self, target: Target) -> bool:
        if self.tensor_maps is not None:
            return self.tensor_maps
        from ejkernel.kernels.triton import compat

        return compat.has_tensor_maps() and can_use_tensor_maps(self.problem, target)

    def heads(self, name: str, block: int, maps: bool = False) -> groups.Heads:
        """An operand read by tiles of ``block`` rows; ``maps``: by TMA."""
        operand, shape = self.operand(name), self.shape(name)
        assert operand is not None and shape is not None
        batch, length, heads, dim = shape
        parts, view = groups.parts_of(dim), (batch * length, heads * dim)
        arrays = tuple(
            TensorMap(operand.index, view, (block, part.WIDTH)) if maps else operand
            for part in parts
        )
        return groups.Heads(arrays, dim, parts, block, maps)

    def bias(self, maps: bool) -> groups.Bias | None:
        """The bias, by TMA where its rows are whole 16 bytes."""
        p, t, shape, values = self.problem, self.tiles, self.shape("bias"), self.operand("bias")
        if values is None or shape is None:
            return None
        batch, head = strides(shape, p.q_len)
        if not maps or p.kv_len % 8:
            return groups.Bias(batch, values, head, TMA=False)
        view, tile = (math.prod(shape[:3]), p.kv_len), (t.block_q, t.block_kv)
        return groups.Bias(batch, TensorMap(values.index, view, tile), head, TMA=True)

    @property
    def slope(self) -> float:
        """Of what the kernels hold, in base 2; keys hidden at -inf stay so at a scale of 0."""
        return max(float(logit_unit(self.problem) * LOG2E), TINY)

    def partial(self, even: bool) -> bool:
        """Whether any block needs an element mask; ``even``: tiles end with the walked axis."""
        rules = self.rules
        free = rules.band == Band() and rules.position_band == Band() and rules.chunk is None
        return rules.arrays or "mask" in self.names or not free or not even

    @property
    def longest_first(self) -> bool:
        """Returns whether the last blocks come first; where an order is given it says so itself."""
        return "order" not in self.names and last_first(self.rules, type(self) is DkvPlan)

    def neighbours(self) -> int:
        """Which programs are neighbours (see ``program_of``): those that share a bias.

        Or those of a block, where rows are walked for far fewer keys, by ranges: programs are few,
        and the first block's walks are the longest. Those of all heads come first.
        """
        p, bias = self.problem, self.shape("bias")
        few_keys = type(self) is DkvPlan and 8 * p.kv_len <= p.q_len
        if bias is None and "ranges" in self.names and few_keys:
            return 2
        if bias is None or "order" in self.names:
            return 0
        return 1 if bias[0] < self.problem.batch else 2 if bias[1] < self.problem.heads else 0

    def walk(self, target: Target, blocks: int, even: bool) -> groups.Walk:
        """Of programs with ``blocks`` a head; ``even``: tiles end with the walked axis."""
        lists = self.shape("listed") or self.shape("ranges") or (1, 1, 1, 4)
        operands = (self.operand(name) for name in ("order", "listed", "ranges"))
        # two loops beside the pointers of a mask spill where products take registers
        full = "mask" not in self.names or target.hopper
        return groups.Walk(
            blocks, self.problem.batch, *operands, *strides(lists, lists[2]), full,
            self.partial(even), self.longest_first, self.neighbours(),
        )  # fmt: skip

    def pairs(self, name: str) -> groups.Pairs | None:
        q, shape = self.operand(f"q_{name}"), self.shape(f"q_{name}")
        if shape is None:
            return None
        return groups.Pairs(q, self.operand(f"kv_{name}"), 0 if shape[0] == 1 else 1)

    def seen(self) -> groups.Rules:
        """What a row sees."""
        rules, mask = self.rules, self.shape("mask")
        ids, positions = self.pairs("ids"), self.pairs("positions")
        band, chunk = rules.band, rules.chunk or (None, None)
        placed = Band() if positions is None else rules.position_band
        elements = None
        if mask is not None:
            steps = strides(mask, math.prod(mask[2:]))
            elements = groups.Elements(self.operand("mask"), *steps, *self.mask_block)
        return groups.Rules(
            band.lo, band.hi, placed.lo, placed.hi, *chunk, ids, positions, elements
        )

    @property
    def gradient(self) -> float | None:
        """What a backward kernel's sums are multiplied by."""
        return self.problem.scale * gradient_factor(self.problem)

    def logits(self) -> groups.Logits:
        """Logits in base 2 are slope * s + shift, s being the products.

        That takes a positive slope: a scale that is not becomes a sign of the products.
        """
        p, cap, scale = self.problem, self.problem.soft_cap, None
        if p.biased:
            scale = float(p.scale)
        elif p.scale <= 0.0 and cap is None:
            scale = -1.0 if p.scale < 0.0 else 0.0
        inside = float(2 / cap * LOG2E * (1.0 if p.biased else p.scale)) if cap else None
        return groups.Logits(
            scale, self.slope, self.gradient, inside, FUSED=cap is not None and cap < 2.0**16
        )

    def common(self, maps: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments and constants every kernel here takes; ``maps``: TMA is used."""
        p, words = self.problem, self.operand("words")
        arguments = {
            "sizes": groups.Sizes(p.q_len, p.kv_len, p.heads, p.kv_heads),
            "rules": self.seen(),
            "bias": self.bias(maps),
            "dropout": None
            if words is None
            else groups.Dropout(words, p.keep_threshold, p.keep_scale),
            "logits": self.logits(),
        }
        return arguments, {"PRECISION": p.precision}

    def over_queries(self, kernel: Any, target: Target, arguments: dict[str, Any]) -> Launch:
        """A launch of one program per query block, which walks over keys."""
        p, t = self.problem, self.tiles
        maps = self.uses_tensor_maps(target)
        blocks = -(-p.q_len // t.block_q)
        even = p.kv_len % t.block_kv == 0
        shared, same = self.common(maps)
        shared |= {
            "q": self.heads("q", t.block_q),
            "k": self.heads("k", t.block_kv, maps),
            "v": self.heads("v", t.block_kv, maps),
            "walk": self.walk(target, blocks, even),
        }
        same["EVEN_KV"] = even
        return Launch(
            kernel, shared | arguments, same, (blocks * p.batch * p.heads,),
            t.num_warps, t.num_stages, t.options,
        )  # fmt: skip

    def fold(
        self, size: int, arrays: Sequence[jax.Array], batched: Sequence[bool]
    ) -> tuple[AttentionPlan, list[jax.Array]]:
        batch = self.problem.batch
        pairs = {"kv_ids": "q_ids", "kv_positions": "q_positions"}
        flags = dict(zip(self.names, batched, strict=True))
        rows = {name: shape[0] for name, shape in self.shapes}
        new = []
        for name, array, mapped in zip(self.names, arrays, batched, strict=True):
            mate = pairs.get(name) or {v: k for k, v in pairs.items()}.get(name)
            shared = not mapped and not (flags.get(mate))
            # never shared by batch rows
            whole = name in ("q", "k", "v", "do", "base", "delta", "words")
            if whole:
                inner = batch
            else:
                inner = batch if rows[name] == 1 and not shared else max(rows[name], 1)
            keep = shared and rows[name] == 1 and not whole
            new.append(merge_leading(size, array, mapped, inner, keep_one=keep))
        shapes = shapes_of(dict(zip(self.names, new, strict=True)))
        return replace(self, problem=self.problem.folded(size), shapes=shapes), new


def last_first(rules: Rules, by_key: bool) -> bool:
    """Returns whether the last blocks have the most work, by the band alone.

    Under a causal mask the first keys are seen by the most rows: they are first anyway.
    """
    band = rules.band
    return band.hi is None and band.lo is not None if by_key else band.hi is not None


def strides(shape: tuple[int, ...], rows: int) -> tuple[int, int]:
    """From one batch row and from one head to the next, of ``[#b, #h, rows]``; 0 where shared."""
    return 0 if shape[0] == 1 else shape[1] * rows, 0 if shape[1] == 1 else rows


@dataclass(frozen=True)
class ForwardPlan(AttentionPlan):
    """q, k, v -> o ``[b, q, h, dv]``, lse float32 ``[b, h, q]`` and lse for the backward kernels.

    That is base ``[b, h, q]``, lse in the units of s (in base 2 with a soft cap), +inf for rows
    that see nothing, and with a bias the rest, in base 2, of what base does not hold.
    """

    gradient = None

    def outputs(self):
        p = self.problem
        return (
            struct(p.dtype, p.batch, p.q_len, p.heads, p.value_dim),
            *(struct(FLOAT, p.batch, p.heads, p.q_len),) * (3 if p.biased else 2),
        )

    def launch(self, target):
        from ejkernel.kernels.triton.flash_attention.forward_kernel import flash_fwd

        p, sink = self.problem, self.shape("sink")
        span = 2 * logit_shift(p)  # of the logits in base 2
        peak = min(0.0, 104.0 - span)
        # a soft cap bounds the logits, so that one number can take the place of running maxima
        # where exp2 of any logit less it lies between 2^-104 and 2^44: not in float16, whose
        # numbers are fewer; 2^17 keys then still sum values up to 2^66
        fixed = p.soft_cap is not None and p.dtype != "float16" and span <= 148
        softmax = groups.Softmax(
            power=None if fixed else 2.0 ** math.floor(math.log2(max(logit_unit(p), TINY))),
            large=None if fixed else min(2.0**30 / self.slope, MAX),
            unit=logit_unit(p),
            shift=(logit_shift(p) + (peak if fixed else 0.0)) / LOG2E,
            peak=peak if fixed else None,
            FIXED=fixed,
            # see ``fused_softmax``; elsewhere masked forms would spill
            MULTIPLY_ADD=target.hopper and p.dtype != "float16",
        )
        arguments = {
            "softmax": softmax,
            "sinks": sink and groups.Sinks(self.operand("sink"), 0 if sink[0] == 1 else p.heads),
            "o": Out(0),
            "lse": Out(1),
            "base": Out(2),
            "rest": Out(3) if p.biased else None,
        }
        launch = self.over_queries(flash_fwd, target, arguments)
        paired = any(f"kv_{name}" in self.names for name in ("ids", "positions"))
        stages = partial_stages(p, self.tiles, target) if paired else None
        return replace(launch, constants={**launch.constants, "PARTIAL_STAGES": stages})


@dataclass(frozen=True)
class DqPlan(AttentionPlan):
    """q, k, v, do, base, delta -> dq."""

    def outputs(self):
        p = self.problem
        return (struct(p.dtype, p.batch, p.q_len, p.heads, p.dim),)

    def launch(self, target):
        from ejkernel.kernels.triton.flash_attention.dq_kernel import flash_bwd_dq

        arguments: dict[str, Any] = {n: self.operand(n) for n in ("base", "delta")}
        arguments |= {"do": self.heads("do", self.tiles.block_q), "dq": Out(0)}
        return self.over_queries(flash_bwd_dq, target, arguments)


@dataclass(frozen=True)
class DkvPlan(AttentionPlan):
    """q, k, v, do, base, delta -> dk, dv, or the one of them that ``parts`` names."""

    parts: tuple[str, ...] = ("dk", "dv")

    def dp_late(self, target: Target) -> bool:
        """Returns whether dp = do v^T waits for the exponentials.

        Before them Hopper's product runs while they are computed, which pays for the few bytes
        that a bias then spills: 467 TFLOP/s, 431 without spills. After, it holds fewer registers
        while whatever else a call has needs them.
        """
        p = self.problem
        late = p.dropout > 0.0
        if not target.hopper:
            late |= (
                p.biased
                or p.soft_cap is not None
                or p.group > 1
                or bool({"ranges", "listed"}.intersection(self.names))
            )
            late |= sum(split_dim(p.dim)) <= 64
        return late

    def outputs(self):
        p = self.problem
        width = {"dk": p.dim, "dv": p.value_dim}
        return tuple(
            struct(p.dtype, p.batch, p.kv_len, p.kv_heads, width[part]) for part in self.parts
        )

    def launch(self, target):
        from ejkernel.kernels.triton.flash_attention.dkv_kernel import flash_bwd_dkv

        p, t = self.problem, self.tiles
        maps = self.uses_tensor_maps(target)
        arguments, constants = self.common(maps)
        blocks, even = -(-p.kv_len // t.block_kv), p.q_len % t.block_q == 0
        arguments |= {
            "q": self.heads("q", t.block_q, maps),
            "k": self.heads("k", t.block_kv),
            "v": self.heads("v", t.block_kv) if "dk" in self.parts else None,
            "do": self.heads("do", t.block_q, maps),
            "base": self.operand("base"),
            "delta": self.operand("delta") if "dk" in self.parts else None,
            "walk": self.walk(target, blocks, even),
            **dict.fromkeys(("dk", "dv")),
            **{part: Out(n) for n, part in enumerate(self.parts)},
        }
        constants |= {
            "GROUP": p.group,
            "EVEN_Q": even,
            "EVEN_KV": p.kv_len % t.block_kv == 0,
            "DP_LATE": self.dp_late(target),
        }
        return Launch(
            flash_bwd_dkv, arguments, constants, (blocks * p.batch * p.kv_heads,), t.num_warps,
            t.num_stages, t.options,
        )  # fmt: skip
