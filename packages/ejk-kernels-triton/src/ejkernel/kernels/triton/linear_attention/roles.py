"""Who reads, who is read and what is summed: the passes of one call over the same walk."""

from __future__ import annotations

from dataclasses import dataclass

from ejkernel.kernels.triton.linear_attention.problem import Problem

# of the operation's arrays: which head dim they have, and whether their heads are those of keys
ARRAYS = {
    "q": ("dim", False),
    "k": ("dim", True),
    "v": ("value_dim", True),
    "do": ("value_dim", False),
}

# of one log decay a row and head (``gates.gate_sums``)
GATE_SUMS = ("high_sums", "low_sums", "gate_totals")


def prepared_results(reads: bool) -> tuple[str, ...]:
    """Names of the results of ``prepare``; ``reads``: whether there is an array that reads."""
    read = ("pairs", "reading") if reads else ()
    return (*read, "entering", "totals", "halves")


@dataclass(frozen=True)
class Roles:
    """One launch of the walk.

    Attributes:
        query: array that reads, "" where only the states of segments are wanted.
        key, value: what a state is the sum of.
        later: whether rows see those after them in time (the gradients of what was read).
        starts: whether segments start from given states, else from 0.
        ends: whether states after segments are wanted, and their decays.
        states: whether those before every chunk are kept.
        partner: array of the output's columns whose products with what the state before the chunk
            gives a row are wanted ("" = none): the share of a gate's gradient.
        out: dtype of the result.
    """

    query: str
    key: str
    value: str
    later: bool
    starts: bool
    ends: bool = False
    states: bool = False
    partner: str = ""
    out: str = "float32"

    @property
    def swapped(self) -> bool:
        """Returns whether the state here is the transposed one of the operation."""
        return ARRAYS[self.key][0] == "value_dim"

    def sizes(self, p: Problem) -> tuple[int, int]:
        """(channels of query and key, of the value)."""
        return getattr(p, ARRAYS[self.key][0]), getattr(p, ARRAYS[self.value][0])

    def prepared(self, p: Problem) -> tuple[bool, bool]:
        """Whether channels of (query and key, the value) decay: then they come with that, a head of
        their own each."""
        found = (p.key_parts > 0, p.value_parts > 0)
        return found[::-1] if self.swapped else found

    def heads(self, p: Problem) -> tuple[int, ...]:
        """Of query, key and value."""
        names = (self.query or self.key, self.key, self.value)
        rows, columns = self.prepared(p)
        return tuple(
            p.kv_heads if ARRAYS[n][1] and not own else p.heads
            for n, own in zip(names, (rows, rows, columns), strict=True)
        )

    def operands(self, p: Problem) -> dict[str, str]:
        """Parameters of the walk in the order of the operands, and the arrays that they get.

        Prepared arrays have the name of what they are made of, and a stroke.
        """
        found = {"query": self.query, "key": self.key, "value": self.value}
        found = {name: x for name, x in found.items() if x}
        side, other = ("v", "k") if self.swapped else ("k", "v")
        rows, columns = self.prepared(p)
        if p.scalar:
            found |= {name: name for name in (("constant",) if p.steady else GATE_SUMS)}
        if rows:
            found |= {name: found[name] + "'" for name in ("query", "key") if name in found}
            found |= {"pairs": f"pairs {side}"} if self.query else {}
            found |= {"totals": f"totals {side}"}
        if columns:
            found |= {"value": found["value"] + "'", "value_totals": f"totals {other}"}
        if self.partner:
            found["partner"] = self.partner
        if p.sequences:
            found["cu"] = "cu"
        return found | ({"starts": "starts"} if self.starts else {})

    def results(self, p: Problem) -> list[str]:
        """Names of the results, in order."""
        wanted = ["out"] * bool(self.query) + ["ends"] * self.ends
        if self.ends:
            wanted += ["decays"] * p.scalar
            wanted += ["key_decays"] * bool(p.key_parts) + ["value_decays"] * bool(p.value_parts)
        return [*wanted, *["states"] * self.states, *["reached"] * bool(self.partner)]


SUMS = Roles("", "k", "v", later=False, starts=False, ends=True)
OUTPUT = Roles("q", "k", "v", later=False, starts=True)
STATES = Roles("", "k", "v", later=False, starts=True, states=True)
LATER_SUMS = Roles("", "q", "do", later=True, starts=False, ends=True)
LATER_STATES = Roles("", "q", "do", later=True, starts=True, states=True)
DQ = Roles("do", "v", "k", later=False, starts=True)
DK = Roles("v", "do", "q", later=True, starts=True)
DV = Roles("k", "q", "do", later=True, starts=True)
