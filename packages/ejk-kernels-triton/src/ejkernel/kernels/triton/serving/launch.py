"""Properties that the launches over a cache have in common, and their groups of arguments.

Scales and sinks have a leading axis of 1 (shared by all rows) or of the batch. Mapped calls are
batched before the launches (``ops.stages``); a launch itself runs them one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ejkernel.kernels.triton.language import tl
from ejkernel.kernels.triton.launch import SEQUENTIAL, Launch, power_of_two
from ejkernel.kernels.triton.serving.decode_tiles import DecodeTiles
from ejkernel.kernels.triton.serving.groups import (
    Cache,
    DotOptions,
    HeadLayout,
    Logits,
    Operand,
    Partial,
    Scale,
    Sinks,
    TileLayout,
    Tree,
)
from ejkernel.kernels.triton.serving.params import (
    column_parts,
    compute_dtype,
    layout_params,
    logit_params,
)
from ejkernel.kernels.triton.serving.ragged_tiles import RaggedTiles, decode_ranges, max_split_units
from ejkernel.kernels.triton.targets import Target
from ejkernel.types.serving.problem import ITEMSIZE, PagedProblem, RaggedProblem

MAX_LANES = 1024  # sequences that a program looks at at once


def sequential(names: str) -> dict[str, str]:
    """Returns how operands of these names batch: calls run one after the other."""
    return dict.fromkeys(names.split(), SEQUENTIAL)


class CacheLaunch(Launch):
    """A kernel over a cache."""

    def scale(self, name: str) -> Scale:
        """Returns a scale ``[1 or batch, 1 or kv_heads]``."""
        rows, heads = self.shape(name) or (1, 1)
        return Scale(self.operand(name), heads if rows > 1 else 0, 1 if heads > 1 else 0)

    def sinks(self) -> Sinks:
        """Returns the sinks ``[1 or batch, heads, n]``."""
        rows, heads, n = self.shape("sink") or (1, 1, 1)
        return Sinks(self.operand("sink"), heads * n if rows > 1 else 0, n, power_of_two(n))

    def tree(self) -> Tree:
        """Returns which new tokens the rows of a call see, where a mask says so."""
        count = (self.shape("tree") or (None,))[-1]
        return Tree(self.operand("tree"), self.operand("positions"), count)

    def attention_groups(self) -> dict[str, Any]:
        """Returns the arguments of a kernel that attends to a cache, besides queries and cache."""
        return {
            "tree": self.tree(),
            "k_scale": self.scale("k_scale"),
            "v_scale": self.scale("v_scale"),
            "sinks": self.sinks(),
            "partial": Partial(*map(self.result, ("acc", "m", "l"))),
        }

    def interpreter_arguments(self, target: Target) -> dict[str, Any]:
        return {"PTX": 0} if "PTX" in self.kernel.arg_names else {}


def cache_group(
    problem: PagedProblem, k: Operand, k_tail: Operand, v: Operand, convert_once: bool = False
) -> Cache:
    """Returns a cache of keys and values.

    ``convert_once``: keys that hold their values are converted once for both matmuls.
    """
    p, layout = problem, layout_params(problem)

    def head_layout(
        name: str, cache: str, dim: int, parts: tuple[int, int], once: str | None
    ) -> HeadLayout:
        kind = cache if ITEMSIZE[cache] == 1 and not convert_once else ""
        dtype = getattr(tl, p.query_dtype if convert_once else compute_dtype(p, cache))
        heads, step = layout[f"{name}_HEADS"], layout[f"{name}_STEP"]
        return HeadLayout(heads, step, dim, *parts, kind, once, dtype)

    keys, values = column_parts(p)
    return Cache(
        k=k,
        k_tail=k_tail,
        v=v,
        PAGE=p.page_size,
        V_OFFSET=layout["V_OFFSET"],
        K=head_layout("K", p.key_dtype, p.dim, keys, p.key_dtype if convert_once else None),
        V=head_layout("V", p.value_dtype, p.value_dim, values, None),
    )


def logits_group(problem: PagedProblem) -> Logits:
    """Returns how logits follow from dot products."""
    p = problem
    return Logits(**logit_params(p), CAPPED=p.soft_cap is not None, POSITIVE=p.scale > 0)


def dot_options(problem: PagedProblem, target: Target, **options: Any) -> DotOptions:
    """Returns how matmuls are computed, with other ``options`` than the plain ones."""
    p = problem
    plain = {"FORM": "", "BIASED": False, "RAW_QUERIES": False, "OPAQUE": False, "FUSED": False}
    normalise = p.query_dtype == "bfloat16" and compute_dtype(p, p.key_dtype) == "float16"
    return DotOptions(**(plain | options), NORMALISE=normalise, PRECISION=precision(p, target))


def precision(problem: PagedProblem, target: Target) -> str:
    """Returns the precision of float32 matmuls.

    Three tf32 matmuls cost nothing while memory is the limit, but their operands must fit the
    registers.
    """
    if target.platform != "cuda":
        return "ieee"
    return "tf32x3" if max(problem.dim, problem.value_dim) <= 128 else "tf32"


def expected_partials(ranges: int, batch: int) -> int:
    """Returns the partial results of a sequence of mean length."""
    return -(-ranges // batch) + 2


def partials_at_once(columns: int, expected: int, width: int = 4) -> tuple[int, int]:
    """Returns the partial results that a program of the merge loads at once, and its warps.

    ``expected``: of a sequence; ``width``: bytes of an element.
    """
    # all in one load, but a few thousand floats at most
    parts = min(4096 // columns, power_of_two(expected))
    return parts, max(1, parts * columns * width // 4096)  # more would wait for each other


@dataclass(frozen=True)
class PagedLaunch(CacheLaunch):
    """Common to the kernels of paged decoding.

    Attributes:
        ranges: work ranges of the keys of all sequences, with ``tiles.splits`` their splits.
    """

    problem: PagedProblem
    tiles: DecodeTiles
    ranges: int

    @property
    def direct(self) -> bool:
        """True where the first kernel writes the output itself."""
        return self.tiles.splits == 1 and not self.problem.return_lse

    @property
    def rows(self) -> int:
        """Query rows of a sequence with their heads."""
        return self.problem.tokens * self.problem.heads

    @property
    def partial_dtype(self) -> str:
        """Dtype of partial results.

        Averages of 8-bit values fit float16; rounding them errs by 2^-12 of a partial result, less
        than rounding the output to bfloat16 where partial results do not cancel.
        """
        short = self.tiles.form != "" and self.problem.query_dtype == "bfloat16"
        return "float16" if short else "float32"

    @property
    def slots(self) -> int:
        """Partial results: consecutive work ranges of a sequence have consecutive slots."""
        p = self.problem
        if self.tiles.splits is None:
            return self.ranges + p.batch - 1
        return 0 if self.direct else self.ranges


@dataclass(frozen=True)
class RaggedLaunch(CacheLaunch):
    """Common to the kernels of a ragged call.

    Attributes:
        target: the chip whose size decides the number of partial results.
    """

    problem: RaggedProblem
    tiles: RaggedTiles
    target: Target

    @property
    def max_split_units(self) -> int:
        """Most partial results of tiles whose keys are split."""
        return max_split_units(self.problem, self.tiles, self.target)

    @property
    def decode_ranges(self) -> int:
        """Equal parts of the keys of decoded sequences."""
        return decode_ranges(self.problem, self.tiles, self.target)

    @property
    def lanes(self) -> int:
        """Sequences that a program looks at at once."""
        return min(MAX_LANES, power_of_two(self.problem.sequences))

    @property
    def chunks(self) -> int:
        """Tiles for the query heads of a kv head."""
        return -(-self.tiles.group // self.tiles.members)

    def layout(self) -> TileLayout:
        """Returns the rows of a tile."""
        p, t = self.problem.paged, self.tiles
        return TileLayout(p.heads, p.kv_heads, self.chunks, t.rows, t.tile, t.members)
