"""How ``help`` shows a public function: short words, one parameter a line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ejkernel.types.calls.words import shown

WIDTH = 100


class ShownSignature(inspect.Signature):
    """A signature for ``help``: short annotations, one parameter a line where it is long."""

    @classmethod
    def of(cls, signature: inspect.Signature) -> ShownSignature:
        parameters = [
            p.replace(annotation=shown(p.annotation)) for p in signature.parameters.values()
        ]
        return cls(parameters, return_annotation=shown(signature.return_annotation))

    def __str__(self) -> str:
        line = super().__str__()
        if len(line) <= WIDTH:
            return line
        lines: list[str] = []
        for p in self.parameters.values():
            if p.kind is p.KEYWORD_ONLY and "*" not in lines:
                lines.append("*")
            lines.append(str(p))
        return "(\n    " + ",\n    ".join(lines) + f",\n) -> {self.return_annotation}"


def show_signature(function: Callable[..., Any]) -> None:
    """Let ``help`` show the function's signature in short words; its annotations stay."""
    if not hasattr(function, "__signature__"):
        vars(function)["__signature__"] = ShownSignature.of(inspect.signature(function))
