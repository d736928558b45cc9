"""The passes of one call over the same loop: which arrays take the places of q, k and v."""

from __future__ import annotations

from dataclasses import dataclass

from ejkernel.kernels.triton.linear_attention.launch import GATE_SUMS
from ejkernel.kernels.triton.linear_attention.problem import Problem

# head dim of the operation's arrays, and whether it has key heads
ARRAYS = {
    "q": ("dim", False),
    "k": ("dim", True),
    "v": ("value_dim", True),
    "do": ("value_dim", False),
}


@dataclass(frozen=True)
class Pass:
    """One launch of ``chunk_loop``.

    Attributes:
        query: array that reads, "" where only the states of segments are computed.
        key, value: arrays whose outer products a state accumulates.
        later: whether rows see the rows after them in time (gradients of keys and values).
        starts: whether segments start from given states, otherwise from 0.
        ends: whether the states after segments, and their decays, are results.
        states: whether the states before every chunk are results.
        dot_with: array of the output's columns. Its dot products with what the state before the
            chunk adds to a row are a result, for the gate's gradient; "" = not computed.
        out: dtype of the output.
    """

    query: str
    key: str
    value: str
    later: bool
    starts: bool
    ends: bool = False
    states: bool = False
    dot_with: str = ""
    out: str = "float32"

    @property
    def swapped(self) -> bool:
        """True where the state is the transpose of the operation's."""
        return ARRAYS[self.key][0] == "value_dim"

    def sizes(self, p: Problem) -> tuple[int, int]:
        """Returns the channels of query and key, and of the value."""
        return getattr(p, ARRAYS[self.key][0]), getattr(p, ARRAYS[self.value][0])

    def decayed(self, p: Problem) -> tuple[bool, bool]:
        """Returns whether channels of query and key decay, and channels of the value.

        Such arrays come from ``decay_channels``, with all heads.
        """
        channels = (p.key_parts > 0, p.value_parts > 0)
        return channels[::-1] if self.swapped else channels

    def heads(self, p: Problem) -> tuple[int, ...]:
        """Returns the heads of query, key and value."""
        names = (self.query or self.key, self.key, self.value)
        rows, columns = self.decayed(p)
        return tuple(
            p.kv_heads if ARRAYS[name][1] and not all_heads else p.heads
            for name, all_heads in zip(names, (rows, rows, columns), strict=True)
        )

    def operands(self, p: Problem) -> dict[str, str]:
        """Returns the operands of ``chunk_loop`` and the arrays that they are."""
        side, other = ("v", "k") if self.swapped else ("k", "v")
        rows, columns = self.decayed(p)
        row_suffix, column_suffix = ("_decayed" if decay else "" for decay in (rows, columns))
        sums = (("constant",) if p.steady else GATE_SUMS) if p.scalar else ()
        operands = {
            "query": self.query and self.query + row_suffix,
            "key": self.key + row_suffix,
            "value": self.value + column_suffix,
            **{name: name for name in sums},
            "pairs": f"pairs_{side}" if rows and self.query else "",
            "totals": f"totals_{side}" if rows else "",
            "value_totals": f"totals_{other}" if columns else "",
            "dot_with": self.dot_with,
            "cu": "cu" if p.sequences else "",
            "starts": "starts" if self.starts else "",
        }
        return {name: array for name, array in operands.items() if array}


SEGMENT_STATES = Pass("", "k", "v", later=False, starts=False, ends=True)
OUTPUT = Pass("q", "k", "v", later=False, starts=True)
CHUNK_STATES = Pass("", "k", "v", later=False, starts=True, states=True)
LATER_SEGMENT_STATES = Pass("", "q", "do", later=True, starts=False, ends=True)
LATER_CHUNK_STATES = Pass("", "q", "do", later=True, starts=True, states=True)
DQ = Pass("do", "v", "k", later=False, starts=True)
DK = Pass("v", "do", "q", later=True, starts=True)
DV = Pass("k", "q", "do", later=True, starts=True)
