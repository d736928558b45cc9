"""Static properties and tiles of linear attention on TPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ejkernel.kernels.pallas.tpu.common.chip import LANES, Chip
from ejkernel.types.problems.recurrence import RecurrentProblem

DTYPES = ("bfloat16", "float32")
MAX_DIM = 256
MIN_ROWS = 16
# Rows of a chunk: a chunk costs as many multiply-adds a row inside as through the state at dim 128,
# and fills a matrix unit of 128 rows.
CHUNK = 128
MAX_CHUNKS = 4  # of a grid step, whose overhead is about the time of one


@dataclass(frozen=True)
class Problem(RecurrentProblem):
    """Static properties of a call.

    Attributes:
        gated: whether the state decays.
    """

    gated: bool

    @property
    def total(self) -> int:
        """Rows of all batch rows."""
        return self.batch * self.rows

    @property
    def total_states(self) -> int:
        """Initial and final states of a head in all batch rows."""
        return self.batch * self.states

    @property
    def group(self) -> int:
        """Query heads that share a key."""
        return self.heads // self.kv_heads

    @property
    def itemsize(self) -> int:
        """Bytes of an operand of a matmul."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def padded_dims(self) -> tuple[int, int]:
        """Columns of keys and of values in vector memory."""
        return -(-self.dim // LANES) * LANES, -(-self.value_dim // LANES) * LANES


@dataclass(frozen=True)
class Tiles:
    """Blocks of both passes.

    Attributes:
        chunks: chunks of ``CHUNK`` rows in a grid step.
    """

    chunks: int

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.chunks * CHUNK

    def vmem(self, p: Problem, backward: bool = False) -> int:
        """Bytes of vector memory of a pass: two buffers of each block, states, and the values of
        a chunk."""
        dim, value_dim = p.padded_dims
        arrays = 4 * dim + 4 * value_dim if backward else 2 * dim + 2 * value_dim
        states = dim * value_dim * 4 * (self.chunks + 8 if backward else 8)
        chunk = CHUNK * 4 * (8 * CHUNK + 8 * (dim + value_dim))
        return 2 * self.rows * arrays * 4 + states + chunk


def problem_of(a: Mapping[str, Any]) -> Problem:
    """Returns the static properties of a call whose arguments are canonical."""
    gated = a.get("g") is not None or a.get("g_gamma") is not None or "layer_idx" in a
    return Problem.from_call(a, gated=gated, unsupported=unsupported(a))


def unsupported(a: Mapping[str, Any], *, channels: bool = False) -> str:
    """Returns the reason why no kernel takes the call, or ""; ``channels`` of keys may decay."""
    q, v = a["query"], a["value"]
    for name in ("query", "key", "value"):
        dtype = a[name].dtype.name
        if dtype not in DTYPES:
            return f"{name}: {dtype} is not supported, only {' and '.join(DTYPES)}"
    for name, dim in (("query", q.shape[3]), ("value", v.shape[3])):
        if dim > MAX_DIM:
            return f"{name}: head dim {dim} is more than {MAX_DIM}"
    if q.shape[1] < MIN_ROWS:
        return f"query: fewer than {MIN_ROWS} rows are not supported"
    gate = a.get("g")
    if gate is not None and gate.ndim == 4 and not channels:
        return "g: a decay for each key channel is not supported, only one for each head"
    return ""


def variant_reason(p: Problem, tiles: Tiles) -> str | None:
    """Returns None where every block has the rows of one batch row, at the same place in it."""
    if p.rows % tiles.rows == 0:
        return None
    return f"query: {p.rows} rows are not batch-invariant, only multiples of {tiles.rows}"


def choose(p: Problem, chip: Chip, tiles: type[Tiles] = Tiles, most: int = MAX_CHUNKS) -> Tiles:
    """Returns as many chunks as fill a sequence, at most ``most``.

    A block with the border of a sequence is visited twice, so short sequences get short blocks.
    """
    length = p.total // max(p.total_states, 1)
    chunks = most
    while chunks > 1 and chunks * CHUNK > length:
        chunks //= 2
    while chunks > 1 and tiles(chunks).vmem(p, backward=True) > chip.tile_memory:
        chunks //= 2
    return tiles(chunks)
