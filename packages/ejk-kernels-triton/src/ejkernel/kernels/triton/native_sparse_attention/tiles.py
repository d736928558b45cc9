"""Tiles of the selected branch and of selection: arithmetic, with a reason next to each line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.native_sparse_attention.problem import Problem, padded
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.params import config_field


@dataclass(frozen=True)
class Tiles:
    """The tile of one kernel.

    Attributes:
        keys: keys of a block at once.
        heads: heads of a group, at most, that are rows of one matmul.
        tokens: tokens of a step of the key gradients.
    """

    keys: int
    num_warps: int
    num_stages: int
    tokens: int = 1
    heads: int = 64


@dataclass(frozen=True)
class SparseTiles:
    """Tiles of the three passes: forward, query gradient, key gradients."""

    fwd: Tiles
    dq: Tiles
    dkv: Tiles

    @property
    def fields(self) -> dict[str, int]:
        """Values by the names of the config's fields."""
        fields = {theirs: getattr(self.fwd, mine) for mine, theirs in FIELDS.items()}
        return fields | {"q_tile": self.dkv.tokens * self.dkv.heads}

    def apply_config(self, cfg: Any, problem: Problem, target: Target) -> SparseTiles:
        """Returns these tiles with the values that a config sets for the forward pass.

        Its keys hold for all passes, warps and stages for the two that loop over lists of tokens;
        ``q_tile``: rows of a step of the key gradients, tokens times query heads.
        """
        values = {mine: config_field(cfg, theirs) for mine, theirs in FIELDS.items()}
        new = {n: int(x) for n, x in values.items() if x not in (None, getattr(self.fwd, n))}
        dkv, rows = self.dkv, config_field(cfg, "q_tile")
        if "keys" in new:
            new["keys"] = min(power_of_two(max(16, new["keys"])), padded(problem.size))
            dkv = replace(dkv, keys=new["keys"])
        if rows is not None:
            dkv = replace(dkv, tokens=max(1, power_of_two(int(rows)) // dkv.heads))
        return SparseTiles(replace(self.fwd, **new), replace(self.dq, **new), dkv)


def choose(p: Problem, target: Target) -> SparseTiles:
    """Returns the tiles of a call by the arithmetic below."""
    fwd = _forward_tiles(p, target)
    dq = fwd
    older = target.platform == "cuda" and not target.hopper
    if p.itemsize == 2 and older and padded(p.dim) > 128:
        # one more accumulator and keys in two layouts: the registers of eight warps
        dq = replace(fwd, num_warps=8)
    if p.itemsize == 2 and target.hopper and (fwd.keys, fwd.heads) == (64, 16):
        # keys alone leave room for a third stage
        dq = replace(dq, num_stages=3) if p.stores_ds else dq
        fwd = replace(fwd, keys=32, num_stages=3)  # 6.8 ms where 64 keys by two take 7.2
    return SparseTiles(fwd, dq, _key_tiles(p, target))


def columns_of(p: Problem) -> int:
    """Returns the columns of a key and a value."""
    return padded(p.dim) + padded(p.value_dim)


def _heads(p: Problem) -> int:
    """Returns the rows for which a thread has registers next to their accumulator."""
    if p.itemsize == 4:
        return 32 if columns_of(p) <= 256 else 16
    return 64 if columns_of(p) <= 384 else 32


def _forward_tiles(p: Problem, target: Target) -> Tiles:
    """Returns the tile of a kernel with one program a token."""
    heads = min(_heads(p), padded(p.group))
    # wide rows: accumulator and operands of 16 of them take the registers of more than two warps
    warps = max(2 if columns_of(p) <= 384 else 4, heads // 16)
    keys = min(64, padded(p.size))
    if p.itemsize == 4 or target.platform == "rocm":
        t = Tiles(min(32 if columns_of(p) <= 256 else 16, keys), warps, 1, heads=heads)
    else:
        t = Tiles(min(32, keys) if columns_of(p) > 256 else keys, warps, 2, heads=heads)
    while t.keys > 16 and t.num_stages * t.keys * _bytes(p) > target.shared_limit // 3:
        t = replace(t, keys=t.keys // 2)  # three programs a multiprocessor hide each other's waits
    while (t.heads + t.num_stages * t.keys) * _bytes(p) > target.shared_limit and t.heads > 16:
        t = replace(t, heads=t.heads // 2)
    return t


def _bytes(p: Problem) -> int:
    """Returns the bytes of a row of queries and output gradients, or of keys and values."""
    return columns_of(p) * p.itemsize


def _key_tiles(p: Problem, target: Target) -> Tiles:
    """Returns the tile of the key gradients: rows are the query heads of several tokens."""
    columns = columns_of(p)
    keys, rows, warps = min(64, padded(p.size)), 64, 4
    if columns > 256:
        keys, rows = min(32, keys), 32
    elif columns > 128 and target.hopper and p.group <= 8:
        rows = 32  # addresses of more tokens take too many registers
    if target.platform == "rocm" or p.itemsize == 4:
        rows, keys = 32, min(16 if columns > 256 else 32, keys)
    elif columns > 128 and not target.hopper:
        warps = 8  # two accumulators of 64 x 128
    stages = 1 if target.platform == "rocm" or p.itemsize == 4 else 2
    if target.hopper and p.stores_ds and rows == 64:
        stages = 3  # indices of tokens are loaded before their queries: 5.5 ms, not 5.8
    # keys and values in two layouts
    while (2 * keys + stages * rows) * _bytes(p) > target.shared_limit and rows > 16:
        rows //= 2
    heads = min(rows, _heads(p), power_of_two(p.group))
    return Tiles(keys, warps, stages, rows // heads, heads)


FIELDS = {"num_warps": "num_warps", "num_stages": "num_stages", "keys": "kv_tile"}


def neighbours(p: Problem, target: Target, t: SparseTiles) -> list[SparseTiles]:
    """Tiles worth timing: another stage, twice the warps, half the keys."""
    changes = [
        {"num_stages": t.fwd.num_stages + 1},
        {"num_warps": 2 * t.fwd.num_warps},
        {"num_warps": 2 * t.fwd.num_warps, "num_stages": t.fwd.num_stages + 1},
    ]
    if t.fwd.keys > 16:
        changes += [{"kv_tile": t.fwd.keys // 2, "num_stages": t.fwd.num_stages + 2}]
    return [t.apply_config(change, p, target) for change in changes]


def piece_length(p: Problem) -> int:
    """Returns the entries of a list that one program of the key gradients has.

    Lists have as many entries on average; a block that every token selects has many more, which
    several programs share.
    """
    return max(64, min(4096, power_of_two(p.slots * p.size)))


@dataclass(frozen=True)
class SelectTiles:
    """The tiles of ``score_blocks``.

    Attributes:
        rows: query heads of tokens at once.
        keys: means at once.
        programs: of every batch row.
        registers: upper bound for a thread.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    programs: int
    registers: int | None = None

    def members(self, p: Problem) -> int:
        """Returns the heads of a group that are rows."""
        return min(power_of_two(p.group), self.rows)

    def tokens(self, p: Problem) -> int:
        """Returns the tokens at once."""
        return self.rows // self.members(p)


def choose_select_tiles(p: Problem, target: Target) -> SelectTiles:
    """Returns the tiles of ``score_blocks`` for a call."""
    wide = padded(p.dim) > 128
    if target.hopper:
        # two programs a multiprocessor; addresses of more tokens take more registers
        registers = 128 if not wide and p.group >= 8 else None
        t = SelectTiles(128, 32 if wide else 64, 8, 2, 2 * target.cores, registers)
    else:
        # without a bound the compiler takes 168 registers, and spills four bytes
        registers = 255 if wide and target.platform == "cuda" else None
        t = SelectTiles(64, 16 if wide else 32, 4, 2, 2 * target.cores, registers)
    if p.dtype == "float32":  # queries are two operands
        t = replace(t, rows=64, num_warps=4 if target.hopper else 8, registers=None)
    if target.platform == "rocm":
        t = replace(t, num_stages=1)
    return replace(t, programs=min(t.programs, p.kv_heads * -(-p.length // t.tokens(p))))


def query_term_count(dtype: str) -> int:
    """Returns the number of float16 values whose sum a query is."""
    return 2 if dtype == "float32" else 1
