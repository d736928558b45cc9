"""Flash attention on Hopper as one kernel object: what it takes, its tiles, its two kernels.

Residuals are q, k, v, o, the lse of every row and what the caller gave; the [q, k] matrix is
recomputed tile by tile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ejkernel.kernels.pallas.gpu.common.chip import Chip, current_chip
from ejkernel.kernels.pallas.gpu.flash_attention import preference, tiles
from ejkernel.kernels.pallas.gpu.flash_attention.backward import backward
from ejkernel.kernels.pallas.gpu.flash_attention.forward import Forward
from ejkernel.kernels.pallas.gpu.flash_attention.forward_form import known_order
from ejkernel.kernels.pallas.gpu.flash_attention.operands import (
    backward_masks,
    backward_walks,
    folding,
    forward_masks,
    shared,
)
from ejkernel.kernels.pallas.gpu.flash_attention.tiles import FlashTiles
from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.errors import ConfigError
from ejkernel.types import calls, softmax
from ejkernel.types.hidden import cleared_rows, without_dead_rows
from ejkernel.types.latent import FromLatent
from ejkernel.types.pattern import rows_see_tiles
from ejkernel.types.problem import Problem
from ejkernel.types.structure import HULL, LISTED

DTYPES = ("float16", "bfloat16")
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))


class FlashAttention(PallasKernel):
    """Exact attention in memory linear in the lengths, on a Hopper GPU; see the operation.

    q, k and v are float16 or bfloat16, promoted to one dtype, with head dims 64, 128, 192 with
    values of 128, or 256. Masks are bands by index and segment ids. The tangent of a soft cap is
    the hardware's, exact to 2^-11. Sums are added in a fixed order, so two runs give the same
    bits. ``cfg``: ``fwd_params`` (q_blocksize, taken as 128; kv_blocksize, a multiple of 64;
    num_stages; or WarpgroupParams: 192 queries of three warpgroups where heads are 64 wide, 160
    keys of two where heads are 128 wide and nothing is masked) and ``bwd_params`` (num_stages;
    blocks have one size for each head dim).

    Source: Shah et al. 2024, FlashAttention-3 (arXiv 2407.08608), section 3.
    """

    call = calls.FlashAttention
    chip = staticmethod(current_chip)
    takes_warpgroups = True

    def refuse(self, problem: Problem, target: Chip) -> str | None:
        if problem.dtype not in DTYPES:
            return f"query: {problem.dtype} is not supported, only {' and '.join(DTYPES)}"
        if problem.logits_dtype == "float64":
            return "logits_dtype: float64 is not supported"
        if problem.biased:
            return "bias: not supported"
        if problem.dropout > 0.0:
            return "dropout_prob: dropout is not supported"
        dims = (problem.dim, problem.value_dim)
        if dims not in DIMS:
            allowed = ", ".join(f"{d} with {dv}" if d != dv else str(d) for d, dv in DIMS)
            return f"query: head dim {dims[0]} with value dim {dims[1]} is not among {allowed}"
        if "mask" in problem.rules.names:
            return "attention_mask: a dense mask is not supported"
        if "q_positions" in problem.rules.names:
            return "mask_info: given positions are not supported"
        if problem.rules.chunk is not None:
            return "mask_info: chunks are not supported"
        return None

    def priority_for(self, inv: Any) -> int:
        """Behind the kernels for every GPU where those are faster."""
        return preference.priority(self.facts(inv)[0])

    def comments(self, problem: Problem, target: Chip) -> tuple[str, ...]:
        if problem.pattern_blocks is not None:
            return (LISTED,)
        return (HULL,) if problem.rules.arrays else ()

    def choose(self, problem: Problem, target: Chip) -> FlashTiles:
        return tiles.choose(problem, target)

    def near(self, problem: Problem, target: Chip, chosen: FlashTiles) -> Iterable[FlashTiles]:
        for given in (
            {"q_blocksize": 128},
            {"kv_blocksize": 128},
            {"q_blocksize": 128, "kv_blocksize": 64, "num_stages": 3},
            {"num_stages": chosen.fwd.stages + 1},
        ):
            with contextlib.suppress(ConfigError):  # it does not fit
                yield chosen.honouring({"fwd_params": given}, problem, target)

    def known(self, work: Work, arrays: Arrays) -> Arrays:
        pattern, mask = arrays.get("pattern"), arrays["mask"]
        if not isinstance(pattern, np.ndarray):
            return arrays
        p, t = work.problem, work.tiles
        forward = forward_masks(mask, pattern, p, t.fwd)
        lists = forward["lists"]
        if isinstance(lists, np.ndarray):
            forward["order"] = known_order(lists[..., 1], p, work.target.cores)
        return arrays | {
            "forward_lists": forward,
            "backward_lists": backward_masks(mask, pattern, p, t.bwd),
        }

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, t, cores = work.problem, work.tiles.fwd, work.target.cores
        tensors = {name: arrays[name] for name in ("q", "k", "v")}
        tensors |= arrays.get("forward_lists") or forward_masks(
            arrays["mask"], arrays.get("pattern"), p, t
        )
        if "sink" in arrays:
            tensors["sink"] = arrays["sink"]

        def run(problem: Problem, tensors: Arrays) -> Any:
            tensors = dict(tensors)
            order = tensors.pop("order", None)
            names = tuple(name for name in tensors if name not in ("q", "k", "v"))
            kernel = Forward(problem, p.rules, t, names, shared(tensors), cores)
            if order is None or problem.batch != p.batch:
                return kernel(*tensors.values())
            return kernel(*tensors.values(), order=order)

        o, lse, base = self.alike(folding(p, run, tensors), arrays)
        return (o, lse), base

    def backward(
        self,
        work: Work,
        arrays: Arrays,
        outputs: tuple[Any, ...],
        saved: Any,
        cotangents: tuple[Any, ...],
    ) -> Mapping[str, Any]:
        p, t, cores = work.problem, work.tiles.bwd, work.target.cores
        (o, lse), (do, dlse) = outputs, cotangents
        q = arrays["q"]
        if p.pattern_blocks is None:
            q, do, dlse = without_dead_rows(arrays["mask"], p.kv_len, lse, q, do, dlse)
        elif not all(rows_see_tiles(p, *tile) for tile in backward_walks(t)):
            q, do, dlse = cleared_rows(lse, q, do, dlse)
        delta = softmax.row_delta(o, do, dlse)
        tensors = {"q": q, "k": arrays["k"], "v": arrays["v"]}
        tensors |= {"do": do, "base": saved, "delta": delta}
        tensors |= arrays.get("backward_lists") or backward_masks(
            arrays["mask"], arrays.get("pattern"), p, t
        )

        def run(problem: Problem, tensors: Arrays) -> Any:
            return backward(problem, **tensors, band=p.rules.band, tiles=t, cores=cores)

        grads = dict(zip("qkv", self.alike(folding(p, run, tensors), arrays), strict=True))
        if "sink" in arrays:
            grads["sink"] = softmax.sink_gradient(arrays["sink"], lse, delta)
        return grads


class ScaledDotProductAttention(FlashAttention):
    """The kernels of flash attention for the operation of this name, whose options are fewer.

    Dtypes, head dims and masks are those of ``flash_attention``; tiles are the kernel's own choice.
    """

    call = calls.ScaledDotProductAttention

    def near(self, problem: Problem, target: Chip, chosen: FlashTiles) -> Iterable[FlashTiles]:
        return ()

    def fields(self, chosen: FlashTiles) -> dict[str, Any]:
        return {}


class FlashMLA(FromLatent, FlashAttention):
    """The kernels of flash attention on keys and values expanded from latent rows; see
    ``mla_attention``.

    Dtypes, head dims (with the rotary part; of values), masks and ``cfg`` are those of
    ``flash_attention``. The backward pass expands anew: nothing expanded is kept.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """


flash_attention = FlashAttention()
mla_attention = FlashMLA()
scaled_dot_product_attention = ScaledDotProductAttention()
