"""Static cost of a compiled TPU kernel, read from what libtpu's compiler writes about it.

A TPU core issues one bundle of instructions a cycle, so the length of a straight piece of code is
its time, short of waiting for memory. The compiler lists the final bundles of every kernel and,
for each, how many of its slots are used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*>*\s*\{(.*)")
DELAY_SLOTS = 4  # bundles after a branch that are still executed


@dataclass(frozen=True)
class Piece:
    """A straight piece of code: its bundles and the slots they use, summed by name of the slot."""

    bundles: int
    slots: dict[str, int]
    capacity: dict[str, int]

    def share(self, slot: str) -> float:
        """Used slots of a kind, of those there are."""
        return self.slots[slot] / (self.bundles * self.capacity[slot])


@dataclass(frozen=True)
class KernelCode:
    """A kernel's final code. ``steady`` is the piece with the most matrix products, or the
    longest where there are none.

    ``vmem``: bytes of vector memory: windows, scratch and spilled registers. ``opening``: bundles
    before the first matrix product, each counted once; 0 where there are none.
    """

    bundles: int
    steady: Piece
    vmem: int
    opening: int

    @property
    def spills(self) -> int:
        """Stores of registers that did not fit, in the steady piece."""
        return self.steady.slots["VSTORE:SPILL"]


def _utilization(path: Path) -> tuple[list[str], list[int], list[list[int]]]:
    text = path.read_text().splitlines()
    names = [n.strip() for n in text[1].split(",")]
    rows = [[int(n) for n in line.split()] for line in text[4:] if line.strip()]
    return names, [int(n) for n in text[2].split()], rows


def _pieces(path: Path) -> list[tuple[int, int, int]]:
    """(first bundle, bundles, matrix products) of each straight piece."""
    pieces: list[tuple[int, int, int]] = []
    first = count = products = 0
    left = -1
    number = 0
    for line in path.read_text().splitlines():
        match = BUNDLE.match(line)
        if match is None:
            continue
        if match[2] and count:
            pieces.append((first, count, products))
            first, count, products = number, 0, 0
        count, number = count + 1, number + 1
        products += len(re.findall(r"= vmatmul\.", match[3]))
        left -= 1
        if left == 0:
            pieces.append((first, count, products))
            first, count, products = number, 0, 0
        if "sbr.rel" in match[3]:
            left = DELAY_SLOTS
    if count:
        pieces.append((first, count, products))
    return pieces


def _opening(path: Path) -> int:
    bundles = [m for line in path.read_text().splitlines() if (m := BUNDLE.match(line))]
    return next((n for n, m in enumerate(bundles) if "= vmatmul." in m[3]), 0)


def kernel_code(folder: Path, name: str) -> KernelCode:
    """The code of the kernel whose name contains ``name``, from the dump in ``folder``.

    Raises:
        LookupError: there is none.
    """
    final = [p for p in folder.glob("*-final_bundles.txt") if "schedule-analysis" not in p.name]
    mine = [p for p in final if name in p.name]
    if not mine:
        seen = sorted({p.name.split("-", 1)[1].rsplit("-", 2)[0] for p in final})
        raise LookupError(f"no kernel {name!r} in {folder}, only {', '.join(seen)}")
    path = mine[-1]
    kernel = path.name.split("-", 1)[1].rsplit("-", 2)[0]
    stamp = path.name.split("-", 1)[0]
    (used,) = folder.glob(f"{stamp}-{kernel}-*-final_hlo-static-per-bundle-utilization.txt")
    names, capacity, rows = _utilization(used)
    pieces = _pieces(path)
    products = max(piece[2] for piece in pieces)
    first, count, _ = max(pieces, key=lambda piece: piece[2] if products else piece[1])
    sums = [sum(column) for column in zip(*rows[first : first + count], strict=True)]
    steady = Piece(
        count, dict(zip(names, sums, strict=True)), dict(zip(names, capacity, strict=True))
    )
    vmem = _vmem(folder, stamp, kernel)
    return KernelCode(sum(n for _, n, _ in pieces), steady, vmem, _opening(path))


def _vmem(folder: Path, stamp: str, kernel: str) -> int:
    (path,) = folder.glob(f"{stamp}-{kernel}-*-post-delay-converter.txt")
    sizes = re.findall(r"^ *#allocation.*space=vmem, size = (0x[0-9a-f]+)", path.read_text(), re.M)
    return sum(int(size, 16) for size in sizes)
