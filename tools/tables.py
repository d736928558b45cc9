"""Write into the READMEs which operations exist and which kernels they have, from the registry.

    tables.py            show what is out of date, exit status 1 if anything is
    tables.py --write    bring the READMEs up to date

Text between ``<!-- table NAME -->`` and ``<!-- end -->`` is written here; the descriptions come
from docs/operations/README.md.
"""

from __future__ import annotations

import re
import sys

import generated

PLATFORMS = {"xla": "XLA", "triton": "Triton", "pallas": "Pallas", "cuda": "CUDA library"}
NO_KERNELS = (
    "There are no kernels yet: the package registers itself and offers nothing, so the XLA\n"
    "implementations run."
)
ROW = re.compile(r"^\| \[(\w+)\]\((\w+\.md)\) \| `\w+` \| `(\w+)` \| (.+) \|$", re.MULTILINE)
SLOT = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def platforms() -> dict[str, list[str]]:
    """Registry name -> platforms that have an implementation, in the order of PLATFORMS."""
    from ejkernel.ops import kernel_registry as registry

    return {
        name: [
            platform
            for platform in PLATFORMS
            if any(i.platform.value == platform for i in registry.list_implementations(name))
        ]
        for name in registry.list_algorithms()
    }


def operations() -> list[tuple[str, str, str, str]]:
    """Function, page, registry name and description of every documented operation."""
    return ROW.findall((generated.ROOT / "docs/operations/README.md").read_text())


def operations_table() -> str:
    by_operation = platforms()
    rows = ["| function | what it computes | kernels |", "|---|---|---|"]
    for function, page, name, summary in operations():
        kernels = ", ".join(PLATFORMS[p] for p in by_operation.get(name, [])) or "none yet"
        rows.append(f"| [`{function}`](docs/operations/{page}) | {summary} | {kernels} |")
    return "\n".join(rows)


def kernels_of(platform: str) -> str:
    """One sentence on what a kernel package holds."""
    by_operation = platforms()
    rows = ((function, name) for function, _, name, _ in operations())
    have = [function for function, name in rows if platform in by_operation.get(name, [])]
    if not have:
        return NO_KERNELS
    return "Kernels:\n\n" + "\n".join(f"- `{function}`" for function in have)


def render(text: str) -> str:
    """``text`` with every slot filled."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        body = operations_table() if name == "operations" else kernels_of(name)
        return f"{match[1]}\n{body}\n\n{match[3]}"

    return SLOT.sub(fill, text)


if __name__ == "__main__":
    pages = (generated.ROOT / "README.md", *sorted(generated.ROOT.glob("packages/*/README.md")))
    texts = {path: render(path.read_text()) for path in pages}
    sys.exit(generated.main(texts, __doc__, None))
