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
        out: dtype of the result.
    """

    query: str
    key: str
    value: str
    later: bool
    starts: bool
    ends: bool = False
    states: bool = False
    out: str = "float32"

    @property
    def swapped(self) -> bool:
        """Whether the state here is the transposed one of the operation."""
        return ARRAYS[self.key][0] == "value_dim"

    def sizes(self, p: Problem) -> tuple[int, int]:
        """(channels of query and key, of the value)."""
        return getattr(p, ARRAYS[self.key][0]), getattr(p, ARRAYS[self.value][0])

    def heads(self, p: Problem) -> tuple[int, ...]:
        names = (self.query or self.key, self.key, self.value)
        return tuple(p.kv_heads if ARRAYS[n][1] else p.heads for n in names)

    def operands(self, p: Problem) -> list[str]:
        """Names of the operands, in order."""
        names = ["query"] * bool(self.query) + ["key", "value"]
        return [
            *names,
            *["gate"] * p.scalar,
            *["cu"] * bool(p.sequences),
            *["starts"] * self.starts,
        ]

    def results(self, p: Problem) -> list[str]:
        """Names of the results, in order."""
        wanted = ["out"] * bool(self.query) + ["ends"] * self.ends
        return [*wanted, *["decays"] * (self.ends and p.scalar), *["states"] * self.states]


SUMS = Roles("", "k", "v", later=False, starts=False, ends=True)
OUTPUT = Roles("q", "k", "v", later=False, starts=True)
LATER_SUMS = Roles("", "q", "do", later=True, starts=False, ends=True)
DQ = Roles("do", "v", "k", later=False, starts=True)
DK = Roles("v", "do", "q", later=True, starts=True)
DV = Roles("k", "q", "do", later=True, starts=True)
