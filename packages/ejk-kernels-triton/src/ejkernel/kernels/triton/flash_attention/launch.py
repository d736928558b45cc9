"""Base classes of flash attention's launches, with the arguments that all kernels take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from ejkernel.kernels.triton import compat
from ejkernel.kernels.triton.bound_launch import TensorMap
from ejkernel.kernels.triton.flash_attention import groups, mods
from ejkernel.kernels.triton.flash_attention.eight_bit_operands import FLOAT8, probability_factor
from ejkernel.kernels.triton.flash_attention.terms import gradient_factor, logit_unit
from ejkernel.kernels.triton.flash_attention.tiles import Tiles, can_use_tensor_maps
from ejkernel.kernels.triton.launch import BATCHED, SHARED, WHOLE, Launch
from ejkernel.kernels.triton.targets import Target
from ejkernel.types.attention.problem import LOG2E, Problem
from ejkernel.types.calls.scaled_operands import block_size
from ejkernel.types.masks.structure import Band, Rules

Block = tuple[int, int, int]
FLOAT = jnp.float32
TINY = 2.0**-120
GRADIENT_OPERANDS = {"do": BATCHED, "base": BATCHED, "delta": BATCHED}


def is_fused(problem: Problem) -> bool:
    """Returns whether saved row values are in base 2, as a soft cap bounds the logits."""
    return problem.soft_cap is not None and problem.soft_cap < 2.0**16


@dataclass(frozen=True)
class AttentionLaunch(Launch):
    """Base of the launches of flash attention.

    Every operand has a leading batch axis of the full size, or of 1 where all batch rows share it.

    Attributes:
        problem, rules, tiles: the call and the tiles of this kernel.
        tensor_maps: whether TMA may be used (None = where it can).
        mask_block: rows and keys that one element of the mask stands for; keys of a word, if
            elements are bits of words.
    """

    batching: ClassVar = {
        **{name: BATCHED for name in ("q", "k", "v", "words")},
        **dict.fromkeys(("q_scale", "k_scale", "v_scale"), BATCHED),
        **{name: SHARED for name in ("bias", "sink", "mask", "order", "listed", "ranges")},
        **{name: SHARED for name in ("q_ids", "kv_ids", "q_positions", "kv_positions")},
        **dict.fromkeys(mods.OPERANDS, WHOLE),
    }
    shared_together = (frozenset({"q_ids", "kv_ids"}), frozenset({"q_positions", "kv_positions"}))
    by_key: ClassVar[bool] = False
    """Whether a program has a block of keys and iterates over blocks of queries."""
    iterates: ClassVar[bool] = True
    """Whether a program visits many blocks, which lists or ranges may name."""

    problem: Problem
    rules: Rules
    tiles: Tiles
    tensor_maps: bool | None = None
    mask_block: Block = (1, 1, 0)

    def options(self, target: Target) -> Mapping[str, Any]:
        return {**super().options(target), **self.tiles.options}

    def uses_tensor_maps(self, target: Target) -> bool:
        """Returns whether tiles are loaded by TMA."""
        if self.tensor_maps is not None:
            return self.tensor_maps
        return compat.has_tensor_maps() and can_use_tensor_maps(self.problem, target)

    def heads(self, name: str, block: int, maps: bool = False) -> groups.Heads:
        """Returns an operand read by tiles of ``block`` rows; ``maps``: by TMA."""
        operand, shape = self.operand(name), self.shape(name)
        assert operand is not None and shape is not None
        if name == "v" and self.problem.dtype == FLOAT8:
            _, _, dim, stride = shape
            parts = groups.split_columns(dim)
            return groups.Heads((operand,) * len(parts), dim, parts, block, False, stride)
        batch, length, heads, dim = shape
        parts, view = groups.split_columns(dim), (batch * length, heads * dim)
        arrays = tuple(
            TensorMap(operand.index, view, (block, part.WIDTH)) if maps else operand
            for part in parts
        )
        return groups.Heads(arrays, dim, parts, block, maps)

    def bias(self, maps: bool) -> groups.Bias | None:
        """Returns the bias, read by TMA where its rows are whole 16 bytes."""
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
        """Slope from q k^T to logits in base 2; not 0, so that masked keys stay at -inf."""
        return max(float(logit_unit(self.problem) * LOG2E), TINY)

    def partial(self, even: bool) -> bool:
        """Returns whether any block needs an element mask.

        ``even``: tiles divide the axis that programs iterate over.
        """
        rules = self.rules
        free = rules.band == Band() and rules.position_band == Band() and rules.chunk is None
        masked = rules.arrays or self.has("mask") or self.problem.mask_mod is not None
        return masked or not free or not even

    @property
    def longest_first(self) -> bool:
        """True if programs of the last blocks come first; an operand ``order`` replaces this."""
        return not self.has("order") and last_first(self.rules, self.by_key)

    def neighbours(self) -> int:
        """Returns which programs are neighbours (see ``program_of``): programs that share a bias.

        Where many rows meet few keys, by ranges, there are few programs and the first block's are
        the longest: then the programs of a block are neighbours, and the first blocks of all
        heads start first.
        """
        p, bias = self.problem, self.shape("bias")
        few_keys = self.by_key and 8 * p.kv_len <= p.q_len
        if bias is None and self.has("ranges") and few_keys:
            return 2
        if bias is None or self.has("order"):
            return 0
        return 1 if bias[0] < self.problem.batch else 2 if bias[1] < self.problem.heads else 0

    def block_schedule(self, target: Target, blocks: int, even: bool) -> groups.BlockSchedule:
        """Returns the blocks that programs visit, ``blocks`` programs a head.

        ``even``: tiles divide the axis that programs iterate over.
        """
        lists = self.shape("listed") or self.shape("ranges") or (1, 1, 1, 4)
        operands = (self.operand(name) for name in ("order", "listed", "ranges"))
        # two loops in addition to the pointers of a mask spill where MMA operands take registers
        full = not self.has("mask") or target.hopper
        if self.problem.mask_mod is not None and not self.has("listed"):
            full = False  # nobody knows which blocks every row sees
        return groups.BlockSchedule(
            blocks, self.problem.batch, *operands, *strides(lists, lists[2]), full,
            self.partial(even), self.longest_first, self.neighbours(),
        )  # fmt: skip

    def segment_pair(self, name: str) -> groups.SegmentPair | None:
        """Returns segment ids or positions of queries and keys, None without them."""
        q, shape = self.operand(f"q_{name}"), self.shape(f"q_{name}")
        if shape is None:
            return None
        return groups.SegmentPair(q, self.operand(f"kv_{name}"), 0 if shape[0] == 1 else 1)

    def visibility_rules(self) -> groups.Rules:
        """Returns the rules that decide which keys a row sees."""
        rules, mask = self.rules, self.shape("mask")
        ids, positions = self.segment_pair("ids"), self.segment_pair("positions")
        band, chunk = rules.band, rules.chunk or (None, None)
        position_band = Band() if positions is None else rules.position_band
        elements = None
        if mask is not None:
            steps = strides(mask, math.prod(mask[2:]))
            elements = groups.DenseMask(self.operand("mask"), *steps, *self.mask_block)
        return groups.Rules(
            band.lo, band.hi, position_band.lo, position_band.hi, *chunk, ids, positions, elements
        )

    @property
    def gradient(self) -> float | None:
        """Factor of a backward kernel's accumulators."""
        return self.problem.scale * gradient_factor(self.problem)

    def logits(self) -> groups.Logits:
        """Returns how logits follow from the matmul: in base 2 they are slope * s + shift.

        The slope must be positive: the sign of a scale goes into s.
        """
        p, cap, scale = self.problem, self.problem.soft_cap, None
        if p.in_natural_units:
            scale = float(p.scale)
        elif p.scale <= 0.0 and cap is None:
            scale = -1.0 if p.scale < 0.0 else 0.0
        unit = 1.0 if p.in_natural_units else p.scale
        cap_factor = float(2 / cap * LOG2E * unit) if cap else None
        return groups.Logits(scale, self.slope, self.gradient, cap_factor, FUSED=is_fused(p))

    def scales(self) -> groups.Scales | None:
        """Returns the scales of 8-bit operands, None for others."""
        p = self.problem
        if p.scale_blocks is None:
            return None
        arrays = (self.operand(f"{name}_scale") for name in "qkv")
        q_blocks, k_blocks = p.scale_blocks
        key_block = block_size(p.kv_len, k_blocks) if k_blocks > 1 else 0
        query_block = block_size(p.q_len, q_blocks)
        factor = probability_factor(p)
        return groups.Scales(*arrays, q_blocks, k_blocks, query_block, key_block, factor)

    def mods(self) -> groups.Mods:
        """Returns the functions of the call and their arrays."""
        p = self.problem
        arrays = []
        for form in (p.score_mod, p.mask_mod):
            names = () if form is None else (*form.names, f"{form.program.name}_origin")
            pointers = tuple(self.operand(name) for name in names if self.has(name))
            arrays.append(pointers or None)
        score, mask = p.score_mod, p.mask_mod
        return groups.Mods(
            p.seed_batches,
            *arrays,
            SCORE=None if score is None else mods.device_function(score),
            SLOPE=None if score is None else mods.device_function(score, slope=True),
            MASK=None if mask is None else mods.device_function(mask),
        )

    def common(self, maps: bool) -> dict[str, Any]:
        """Returns the arguments that every kernel here takes; ``maps``: TMA is used."""
        p, words = self.problem, self.operand("words")
        return {
            "sizes": groups.Sizes(p.q_len, p.kv_len, p.heads, p.kv_heads),
            "rules": self.visibility_rules(),
            "bias": self.bias(maps),
            "dropout": None
            if words is None
            else groups.Dropout(words, p.keep_threshold, p.keep_scale),
            "mods": None if p.score_mod is None and p.mask_mod is None else self.mods(),
            "logits": self.logits(),
            "PRECISION": p.precision,
        }


class QueryBlockLaunch(AttentionLaunch):
    """One program per block of queries, which iterates over keys."""

    @property
    def blocks(self) -> int:
        """Blocks of queries in a head."""
        return -(-self.problem.q_len // self.tiles.block_q)

    def grid(self, target: Target) -> tuple[int, ...]:
        return (self.blocks * self.problem.batch * self.problem.heads,)

    def arguments(self, target: Target) -> dict[str, Any]:
        p, t = self.problem, self.tiles
        maps, even = self.uses_tensor_maps(target), p.kv_len % t.block_kv == 0
        return self.common(maps) | {
            "q": self.heads("q", t.block_q),
            "k": self.heads("k", t.block_kv, maps),
            "v": self.heads("v", t.block_kv, maps),
            "schedule": self.block_schedule(target, self.blocks, even),
            "EVEN_KV": even,
        }


def last_first(rules: Rules, by_key: bool) -> bool:
    """Returns whether the last blocks have the most work, judged by the band alone.

    Under a causal mask the first keys are seen by the most rows: they are first anyway.
    """
    band = rules.band
    return band.hi is None and band.lo is not None if by_key else band.hi is not None


def strides(shape: tuple[int, ...], rows: int) -> tuple[int, int]:
    """Returns the steps to the next batch row and the next head of ``[#b, #h, rows]``.

    They are 0 where an axis is shared.
    """
    return 0 if shape[0] == 1 else shape[1] * rows, 0 if shape[1] == 1 else rows
