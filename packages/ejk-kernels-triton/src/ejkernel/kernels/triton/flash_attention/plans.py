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

from ejkernel.kernels.triton.bridge import merge_leading
from ejkernel.kernels.triton.common.dims import split_dim
from ejkernel.kernels.triton.flash_attention.terms import gradient_factor, logit_shift, logit_unit
from ejkernel.kernels.triton.flash_attention.tiles import Tiles, can_use_tensor_maps
from ejkernel.kernels.triton.launch import In, Launch, Out, TensorMap
from ejkernel.kernels.triton.targets import Target
from ejkernel.types.problem import LOG2E, Problem
from ejkernel.types.structure import Band, Rules

FLOAT = jnp.float32
MAX = float(jnp.finfo(FLOAT).max)
TINY = 2.0**-120


@dataclass(frozen=True)
class AttentionPlan:
    """Common to the kernels here.

    Attributes:
        problem, rules, tiles: what is computed and how.
        shapes: name and shape of every operand, in order.
        tensor_maps: whether TMA may be used (None = where it can).
        mask_block: rows and keys that an element of the mask speaks for.
    """

    problem: Problem
    rules: Rules
    tiles: Tiles
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    tensor_maps: bool | None = None
    mask_block: tuple[int, int] = (1, 1)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.shapes)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return dict(self.shapes).get(name)

    def operand(self, name: str) -> In | None:
        return In(self.names.index(name)) if name in self.names else None

    def uses_tensor_maps(self, target: Target) -> bool:
        if self.tensor_maps is not None:
            return self.tensor_maps
        from ejkernel.kernels.triton import compat

        return compat.has_tensor_maps() and can_use_tensor_maps(self.problem, target)

    def columns(self) -> dict[str, int]:
        p = self.problem
        d_main, d_rest = split_dim(p.dim)
        dv_main, dv_rest = split_dim(p.value_dim)
        return {
            "D": p.dim,
            "DV": p.value_dim,
            "D_MAIN": d_main,
            "D_REST": d_rest,
            "DV_MAIN": dv_main,
            "DV_REST": dv_rest,
        }

    def walked(self, name: str, parts: tuple[str, str], block: int, maps: bool) -> dict[str, Any]:
        """Arguments for a tensor read tile by tile: its main columns and the rest."""
        operand = self.operand(name)
        assert operand is not None
        batch, length, heads, dim = self.shape(name) or (0, 0, 0, 0)
        main, rest = split_dim(dim)
        out: dict[str, Any] = {}
        for parameter, width in zip(parts, (main, rest), strict=True):
            if width == 0:
                out[parameter] = None
            elif maps:
                view = (batch * length, heads * dim)
                out[parameter] = TensorMap(operand.index, view, (block, width))
            else:
                out[parameter] = operand
        return out

    def biases(self, maps: bool) -> In | TensorMap | None:
        """The bias, by TMA where its rows are whole 16 bytes."""
        p, bias = self.problem, self.operand("bias")
        if bias is None or not maps or p.kv_len % 8:
            return bias
        rows = math.prod((self.shape("bias") or ())[:3])
        return TensorMap(bias.index, (rows, p.kv_len), (self.tiles.block_q, self.tiles.block_kv))

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
        """Whether the last blocks come first; where an order is given it says so itself."""
        return "order" not in self.names and last_first(self.rules, type(self) is DkvPlan)

    def order(self) -> int:
        """Which programs are neighbours (see ``program_of``): those that share a bias."""
        bias = self.shape("bias")
        if bias is None or "order" in self.names:
            return 0
        return 1 if bias[0] < self.problem.batch else 2 if bias[1] < self.problem.heads else 0

    def common(self, target: Target, maps: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments and constants every kernel here takes; ``maps``: TMA is used."""
        p, rules = self.problem, self.rules
        biased = p.biased
        cap = p.soft_cap
        # logits in base 2 are slope * s + shift, s being the products; that takes a positive
        # slope: a scale that is not becomes a sign of the products
        scaled = p.scale <= 0.0 and not biased and cap is None
        scale = p.scale if biased else -1.0 if p.scale < 0.0 else 0.0
        band, positions = rules.band, rules.position_band
        placed = "q_positions" in self.names

        def leading(name: str, step: int) -> int:
            shape = self.shape(name)
            return 0 if shape is None or shape[0] == 1 else step

        def strides(name: str) -> tuple[int, int]:
            shape = self.shape(name)
            if shape is None:
                return 0, 0
            tile = math.prod(shape[2:])
            return (
                0 if shape[0] == 1 else shape[1] * tile,
                0 if shape[1] == 1 else tile,
            )

        mask = strides("mask")
        bias = self.shape("bias") or (1, 1)
        ranges = self.shape("listed") or self.shape("ranges") or (1, 1, 1, 4)
        chunk = rules.chunk
        arguments: dict[str, Any] = {
            name: self.operand(name)
            for name in (
                "q_ids", "kv_ids", "q_positions", "kv_positions", "mask", "words", "ranges",
                "listed", "order",
            )
        }  # fmt: skip
        arguments |= {
            "bias": self.biases(maps),
            "q_len": p.q_len,
            "kv_len": p.kv_len,
            "heads": p.heads,
            "kv_heads": p.kv_heads,
            "lo": band.lo or 0,
            "hi": band.hi or 0,
            "position_lo": positions.lo or 0,
            "position_hi": positions.hi or 0,
            "chunk": chunk[0] if chunk else None,
            "chunk_offset": chunk[1] if chunk else None,
            "scale": float(scale),
            "slope": self.slope,
            "cap_in": float(2 / cap * LOG2E * (1.0 if biased else p.scale)) if cap else 0.0,
            "keep_threshold": p.keep_threshold,
            "ids_stride": leading("q_ids", 1),
            "positions_stride": leading("q_positions", 1),
            "ranges_batch": 0 if ranges[0] == 1 else ranges[1] * ranges[2],
            "ranges_head": 0 if ranges[1] == 1 else ranges[2],
            "mask_batch": mask[0],
            "mask_head": mask[1],
            "bias_batch": 0 if bias[0] == 1 else bias[1] * p.q_len,
            "bias_head": 0 if bias[1] == 1 else p.q_len,
        }
        constants = {
            **self.columns(),
            "BLOCK_Q": self.tiles.block_q,
            "BLOCK_KV": self.tiles.block_kv,
            "BIAS_TMA": isinstance(arguments["bias"], TensorMap),
            "HAS_LO": band.lo is not None,
            "HAS_HI": band.hi is not None,
            "POSITION_LO": placed and positions.lo is not None,
            "POSITION_HI": placed and positions.hi is not None,
            "MASK_Q": self.mask_block[0],
            "MASK_KV": self.mask_block[1],
            # two loops beside the pointers of a mask spill where products take registers
            "HAS_FULL": "mask" not in self.names or target.hopper,
            "CAPPED": cap is not None,
            "FUSED": cap is not None and cap < 2.0**16,
            "DROPOUT": p.keep_threshold > 0,
            "SCALED": scaled,
            "PRECISION": p.precision,
        }
        return arguments, constants

    def over_queries(self, kernel: Any, target: Target, arguments: Any, constants: Any) -> Launch:
        """A launch of one program per query block, which walks over keys."""
        p, t = self.problem, self.tiles
        maps = self.uses_tensor_maps(target)
        blocks = -(-p.q_len // t.block_q)
        even = p.kv_len % t.block_kv == 0
        shared, same = self.common(target, maps)
        shared |= {
            "q": self.operand("q"),
            **self.walked("k", ("k", "k_rest"), t.block_kv, maps),
            **self.walked("v", ("v", "v_rest"), t.block_kv, maps),
            "q_blocks": blocks,
            "batch": p.batch,
        }
        same |= {
            "TMA": maps,
            "EVEN_KV": even,
            "HAS_PARTIAL": self.partial(even),
            "LONGEST_FIRST": self.longest_first,
            "ORDER": self.order(),
        }
        return Launch(
            kernel, shared | arguments, same | constants, (blocks * p.batch * p.heads,),
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
        shapes = tuple((n, tuple(a.shape)) for n, a in zip(self.names, new, strict=True))
        folded = replace(self, problem=self.problem.folded(size), shapes=shapes)
        return folded, new

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        raise NotImplementedError

    def launch(self, target: Target) -> Launch:
        raise NotImplementedError


def last_first(rules: Rules, by_key: bool) -> bool:
    """Whether the last blocks have the most work, by the band alone.

    Under a causal mask the first keys are seen by the most rows: they are first anyway.
    """
    band = rules.band
    return band.hi is None and band.lo is not None if by_key else band.hi is not None


def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@dataclass(frozen=True)
class ForwardPlan(AttentionPlan):
    """q, k, v -> o ``[b, q, h, dv]``, lse float32 ``[b, h, q]`` and lse for the backward kernels.

    That is base ``[b, h, q]``, lse in the units of s (in base 2 with a soft cap), +inf for rows
    that see nothing, and with a bias the rest, in base 2, of what base does not hold.
    """

    def outputs(self):
        p = self.problem
        return (
            _struct((p.batch, p.q_len, p.heads, p.value_dim), p.dtype),
            *(_struct((p.batch, p.heads, p.q_len), FLOAT),) * (3 if p.biased else 2),
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
        arguments = {
            "sink": self.operand("sink"),
            "sink_batch": 0 if sink is None or sink[0] == 1 else p.heads,
            "power": 2.0 ** math.floor(math.log2(max(logit_unit(p), TINY))),
            "large": min(2.0**30 / self.slope, MAX),
            "unit": logit_unit(p),
            "shift": (logit_shift(p) + (peak if fixed else 0.0)) / LOG2E,
            "peak": peak,
            "keep_scale": p.keep_scale,
            "o": Out(0),
            "lse": Out(1),
            "base": Out(2),
            "rest": Out(3) if p.biased else None,
        }
        # see ``fused_softmax``; elsewhere masked forms would spill
        multiply_add = target.hopper and p.dtype != "float16"
        constants = {"FIXED": fixed, "MULTIPLY_ADD": multiply_add}
        return self.over_queries(flash_fwd, target, arguments, constants)


@dataclass(frozen=True)
class DqPlan(AttentionPlan):
    """q, k, v, do, base, delta -> dq."""

    def outputs(self):
        p = self.problem
        return (_struct((p.batch, p.q_len, p.heads, p.dim), p.dtype),)

    def launch(self, target):
        from ejkernel.kernels.triton.flash_attention.dq_kernel import flash_bwd_dq

        p = self.problem
        arguments: dict[str, Any] = {n: self.operand(n) for n in ("do", "base", "delta")}
        arguments |= {"dq": Out(0), "grad_scale": p.scale * gradient_factor(p)}
        return self.over_queries(flash_bwd_dq, target, arguments, {})


@dataclass(frozen=True)
class DkvPlan(AttentionPlan):
    """q, k, v, do, base, delta -> dk, dv, or the one of them that ``parts`` names."""

    parts: tuple[str, ...] = ("dk", "dv")

    def dp_late(self, target: Target) -> bool:
        """Whether dp = do v^T waits for the exponentials.

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
            _struct((p.batch, p.kv_len, p.kv_heads, width[part]), p.dtype) for part in self.parts
        )

    def launch(self, target):
        from ejkernel.kernels.triton.flash_attention.dkv_kernel import flash_bwd_dkv

        p, t = self.problem, self.tiles
        maps = self.uses_tensor_maps(target)
        arguments, constants = self.common(target, maps)
        blocks = -(-p.kv_len // t.block_kv)
        arguments |= {
            **self.walked("q", ("q", "q_rest"), t.block_q, maps),
            "k": self.operand("k"),
            "v": self.operand("v") if "dk" in self.parts else None,
            **self.walked("do", ("do", "do_rest"), t.block_q, maps),
            "base": self.operand("base"),
            "delta": self.operand("delta") if "dk" in self.parts else None,
            **dict.fromkeys(("dk", "dv")),
            **{part: Out(n) for n, part in enumerate(self.parts)},
            "kv_blocks": blocks,
            "batch": p.batch,
            "keep_scale": p.keep_scale,
            "grad_scale": p.scale * gradient_factor(p),
        }
        constants |= {
            "TMA": maps,
            "GROUP": p.group,
            "EVEN_Q": p.q_len % t.block_q == 0,
            "EVEN_KV": p.kv_len % t.block_kv == 0,
            "HAS_PARTIAL": self.partial(p.q_len % t.block_q == 0),
            "DP_LATE": self.dp_late(target),
            "LONGEST_FIRST": self.longest_first,
            "ORDER": self.order(),
        }
        return Launch(
            flash_bwd_dkv, arguments, constants, (blocks * p.batch * p.kv_heads,), t.num_warps,
            t.num_stages, t.options,
        )  # fmt: skip
