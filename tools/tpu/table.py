"""The stored costs of TPU kernels: what a run is compared with, and the tables of the documents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

COSTS = Path(__file__).with_name("costs.json")
ALLOWED = 1.05  # of the stored counts
NEGLIGIBLE = 0.2  # MiB that a program may write outside its kernels without being listed
MOST_MOVED = 1.1  # bytes over the least, where memory may limit a kernel
# keys come again for each block of queries, in a third of the time that their code takes
PREFILL = ("ragged prefill", "ragged write prefill", "ragged write int8")
KEPT = (
    *("tiles", "bundles", "per_pass", "slots", "spills", "vmem_mib", "opening"),
    *("cycles", "moved", "intensity", "outside_mib"),
)
# What programs write outside their kernels, by the first word of a kernel's name.
OUTSIDE = {
    "d64": "q, k, v and do copied from [s, h * d] to [h, s, d], o and gradients back, each in two "
    "steps; the sum of do * o of every row",
    "d128": "as d64",
    "d256": "as d64",
    "blocksparse": "as d64; lists of the tiles in the pattern",
    "joined heads": "the sum of do * o of every row",
    "latent expanded": "keys and values that matmuls expand from latent rows, padded from 192 to "
    "256 columns; as d64",
    "native sparse": "both passes: q and do copied from [s, h * d] to [h, s, d], o and dq back, "
    "each in two steps; the sum of the branches; k and v as d64, in float32 for means; lists of "
    "tiles",
    "native sparse joined": "both passes: the sum of the branches; k and v copied as d64, in "
    "float32 for means; lists of tiles",
    "trees": "marks of nodes as rows of lanes; queries and outputs by sequence; block tables",
    "ragged write": "new keys and values as one array in the cache's dtype",
    "linear": "gates and their gradients as [heads, rows]; zeros of which states begin",
    "delta": "gates, beta and their gradients as [heads, rows]; zeros of which states begin",
    "convolution": "taps, bias and the new state",
    "grouped 8 bits": "scales as float32",
    "pooling": "counts of the rows that a mask leaves",
    "decode": "block tables",
    "ragged": "block tables",
    "ring": "q, k and v copied from [s, h * d] to [h, s, d], and o back; the merge of the parts",
}
SLOTS = {
    "matrix": ("MXU",),
    "vector": ("VALU",),
    "exp": ("EUP",),
    "lanes": ("XLU",),
    "load": ("VLOAD",),
    "store": ("VSTORE",),
}
"""Kinds of slots by the compiler's names for them."""

Row = dict[str, Any]


def load() -> dict[str, Any]:
    return json.loads(COSTS.read_text())


def name_of(row: Row) -> str:
    """Returns the name of a kernel in the table."""
    return f"{row['part']} {row['kernel']}"


def compare(
    chip: str, rows: Sequence[Row], parts: Sequence[str], every: Sequence[str]
) -> list[str]:
    """Returns what is worse than the table has it in our ``rows``, all kernels of some of ``every``
    part."""
    stored_rows, faults = load()["costs"].get(chip, {}), []
    counted = {name_of(row): row for row in rows if row["who"] == "ejkernel"}
    for name, row in counted.items():
        if name not in stored_rows:
            faults.append(f"{chip} {name}: not in {COSTS.name}; --store adds it")
        else:
            faults += [f"{chip} {name}: {text}" for text in _worse(row, stored_rows[name])]
    for name in stored_rows.keys() - counted.keys():
        if _longest(name, every) in parts:
            faults.append(f"{chip} {name}: in {COSTS.name}, but not counted")
    return faults


def _worse(row: Row, before: Row) -> Iterator[str]:
    # kernels of other tiles do another amount of work in their steady code
    same = row["tiles"] == before["tiles"]
    columns = ["bundles" if same else "per_pass", "vmem_mib", "moved", "opening"]
    if not same:
        columns = ["per_pass", "moved"]
    for column in columns:
        count, limit = row[column] or 0, before.get(column) or 0
        if limit and count > ALLOWED * limit:
            yield f"{count} {column}, {limit} in {COSTS.name}"
    yield from _written(row, before.get("outside_mib"))


def _written(row: Row, before: float | None) -> Iterator[str]:
    count, limit = row["outside_mib"], before or 0.0
    if count > NEGLIGIBLE and reason(name_of(row)) is None:
        yield f"{count} MiB written outside the kernel, for which {__name__}.OUTSIDE has no reason"
    if before is not None and count > max(ALLOWED * limit, limit + NEGLIGIBLE):
        yield f"{count} MiB written outside the kernel, {limit} in {COSTS.name}"


def reason(name: str) -> str | None:
    """Returns what the program of a kernel writes outside it; None: nothing is known of."""
    return OUTSIDE.get(_longest(name, OUTSIDE))


def _longest(name: str, parts: Iterable[str]) -> str:
    """Returns the part that a kernel belongs to: some names of parts begin with another's."""
    return max((part for part in parts if name.startswith(f"{part} ")), key=len, default="")


def compare_outside(chip: str, rows: Sequence[Row]) -> list[str]:
    """Returns which programs write more outside their kernels than the table has."""
    stored_rows = load()["costs"].get(chip, {})
    return [
        f"{chip} {name_of(row)}: {text}"
        for row in rows
        for text in _written(row, stored_rows.get(name_of(row), {}).get("outside_mib"))
    ]


def excess(chip: str, rows: Sequence[Row], balance: float) -> list[str]:
    """Returns our kernels that memory may limit and that move too many bytes.

    ``balance``: FLOPs that the chip computes while a byte arrives.
    """
    return [
        f"{chip} {name_of(row)}: {row['moved']} of the least bytes at "
        f"{row['intensity']} FLOPs a byte, of which the chip takes {balance:.0f}"
        for row in rows
        if row["who"] == "ejkernel"
        and row["moved"]
        and row["moved"] > MOST_MOVED
        and row["intensity"] < balance
        and name_of(row) not in PREFILL
    ]


def store(chip: str, rows: Sequence[Row], about: dict[str, Any]) -> None:
    """Keeps the counts of these rows; ``about``: metadata of the chip and versions."""
    table = load()
    stored_rows = table["costs"].setdefault(chip, {})
    for row in rows:
        if row["who"] == "ejkernel":
            name = name_of(row)
            before = stored_rows.get(name, {})
            others = {"jax": before["jax"]} if "jax" in before else {}
            if row["moved"] is None:  # not interpreted in this run
                others |= {column: before.get(column) for column in ("moved", "intensity")}
            stored_rows[name] = {column: row.get(column) for column in KEPT} | others
    for name in {name_of(row) for row in rows} & stored_rows.keys():
        theirs = [row for row in rows if name_of(row) == name and row["who"] != "ejkernel"]
        # the slower first: each is stored at its best tiles
        for row in sorted(theirs, key=lambda row: -row["per_pass"]):
            stored_rows[name].setdefault("jax", {})[row["who"]] = [row["per_pass"], row["tiles"]]
    table.setdefault("chips", {})[chip] = about["chip"]
    table["versions"] = about["versions"]
    COSTS.write_text(_dumped(table))


def _dumped(table: dict[str, Any]) -> str:
    """Returns JSON with a line for each kernel."""
    chips = []
    for chip, stored_rows in sorted(table["costs"].items()):
        lines = [
            f"   {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(stored_rows.items())
        ]
        chips.append(f"  {json.dumps(chip)}: {{\n" + ",\n".join(lines) + "\n  }")
    metadata = json.dumps(table.get("chips", {}), sort_keys=True)
    costs, versions = ",\n".join(chips), json.dumps(table["versions"])
    return f'{{\n "chips": {metadata},\n "costs": {{\n{costs}\n }},\n "versions": {versions}\n}}\n'


# ---- tables of the documents ---------------------------------------------------------------------

CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
COLUMNS = (
    *("kernel", "tile", "bundles", *SLOTS, "spills", "FLOPs a byte", "bytes over least"),
    *("VMEM MiB", "before matmuls", "outside MiB"),
)


def page() -> str:
    """Returns the costs of every kernel, a table for each chip."""
    table = load()
    sections = [f"Counted with {table['versions']}."]
    for chip in CHIPS:
        metadata, stored_rows = table["chips"][chip], table["costs"][chip]
        memory, balance = metadata["vmem_mib"], metadata["balance"]
        text = f"{memory} MiB of vector memory; {balance} FLOPs while a byte arrives."
        rows = [_cells(name, row) for name, row in sorted(stored_rows.items())]
        sections.append(f"## {chip}\n\n{text}\n\n{_table(COLUMNS, rows)}")
    return "\n\n".join(sections)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])


def _cells(name: str, row: Row) -> list[str]:
    slots = row.get("slots") or {}
    numbers = [row.get("per_pass", row["bundles"]), *(slots.get(kind) for kind in SLOTS)]
    numbers += [row.get(column) for column in ("spills", "intensity", "moved")]
    numbers += [row.get(column) for column in ("vmem_mib", "opening", "outside_mib")]
    return [name, row["tiles"] or "-", *("-" if x is None else f"{x:g}" for x in numbers)]


def comparison() -> str:
    """Returns bundles a unit of work of each kernel over bundles of JAX's, for each chip.

    Where the matrix units take longer than either code, the ratio of times, 1, stands behind it.
    """
    stored_rows, rows = load()["costs"], []
    names = {
        (n, who) for chip in CHIPS for n, row in stored_rows[chip].items() for who in _jax(row)
    }
    for name, who in sorted(names):
        cells = [_ratio(stored_rows[chip].get(name), who) for chip in CHIPS]
        rows.append([name, who.removeprefix("jax "), *cells])
    return _table(("kernel", "JAX's", *CHIPS), rows)


def _jax(row: Row) -> dict[str, Any]:
    return row.get("jax") or {}


def _ratio(row: Row | None, who: str) -> str:
    if row is None or who not in _jax(row):
        return "-"
    mine, theirs, least = row["per_pass"], row["jax"][who][0], row.get("cycles") or 0
    note = " (1)" if max(mine, theirs) <= least else ""
    return f"{mine:g} / {theirs:g} = {mine / theirs:.3f}{note}"


def memory() -> str:
    """Returns the vector memory of each kernel on each chip, and of each chip."""
    table = load()
    stored_rows = table["costs"]
    names = sorted({name for chip in CHIPS for name in stored_rows[chip]})
    heads = [f"{chip}: {table['chips'][chip]['vmem_mib']} MiB" for chip in CHIPS]
    rows = []
    for name in names:
        stored_cells = [stored_rows[chip].get(name, {}) for chip in CHIPS]
        tiles = [f" ({row['tiles']})" if row.get("tiles") else "" for row in stored_cells]
        cells = [f"{row['vmem_mib']:g}" if "vmem_mib" in row else "-" for row in stored_cells]
        rows.append([name, *(c + t for c, t in zip(cells, tiles, strict=True))])
    return _table(("kernel", *heads), rows)


def outside() -> str:
    """Returns what programs write outside the kernels, where that is more than little."""
    stored_rows, rows = load()["costs"], []
    for name in sorted({name for chip in CHIPS for name in stored_rows[chip]}):
        sizes = [stored_rows[chip].get(name, {}).get("outside_mib") for chip in CHIPS]
        if any(size is not None and size > NEGLIGIBLE for size in sizes):
            cells = ["-" if size is None else f"{size:g}" for size in sizes]
            rows.append([name, *cells, reason(name) or ""])
    return _table(("kernel", *CHIPS, "what"), rows)
