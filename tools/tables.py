"""Write into the documents which operations exist, where they ran, and how their axes are sharded.

    tables.py            show what is out of date, exit status 1 if anything is
    tables.py --write    bring the documents up to date

Text between ``<!-- table NAME -->`` and ``<!-- end -->`` is written here, and within a line between
``<!-- figures NAME -->`` and ``<!-- end -->``; the descriptions come from
docs/operations/README.md.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import generated
import speeds
from tpu import table as tpu_costs

HARDWARE = ("CPU", "Hopper GPUs", "other NVIDIA", "AMD", "TPUs")
OTHER_NVIDIA = {"sm_80", "sm_89", "sm_100", "sm_120"}
SAME_KERNELS = {
    "scaled_dot_product_attention": "flash_attention",
    "ring_attention": "flash_attention",
    "mla_attention": "flash_attention",
    "ragged_page_attention": "ragged_page_attention_v3",
}
LEGEND = """\
- **run**: on CPUs by every test run; on an H200 timed, and compared with float64 by the tests
  that need a GPU.
- **compiled**: never run on such a chip. Kernels are compiled ahead for compute capability 8.0,
  8.9, 10.0 and 12.0 (flash attention for the last two with 8-bit inputs only), gfx942, and TPU v4
  to 7x by TPU's own compiler, and run in interpreters against float64.
- **XLA**: no kernel of its own there; the XLA implementation serves the call, as wherever a kernel
  declines one. `explain` says so."""
PLATFORMS = {"xla": "XLA", "triton": "Triton", "pallas": "Pallas", "cuda": "CUDA library"}
NO_KERNELS = (
    "There are no kernels yet: the package registers itself and offers nothing, so the XLA\n"
    "implementations run."
)
ON_TPU = "compiled and interpreted, never run on a chip"
ROW = re.compile(r"^\| \[(\w+)\]\((\w+\.md)\) \| `\w+` \| `(\w+)` \| (.+) \|$", re.MULTILINE)
PAGES = (
    *("README.md", "docs/guides/numerics.md", "docs/hardware.md", "docs/measured.md"),
    *("docs/sharding.md", "docs/kernels/flash_attention_hopper.md"),
    *("docs/kernels/tpu.md", "docs/kernels/tpu_costs.md"),
)
SLOT = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
WITHIN_A_LINE = re.compile(r"(<!-- figures (\w+) -->).*?(<!-- end -->)")


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


def measured_on_hopper() -> set[str]:
    """Functions with timings of an H200: in records of the benchmark, or on their page."""
    records = (generated.ROOT / "tools/bench/results/nvidia-h200").glob("*.json")
    timed = {json.loads(path.read_text())["op"] for path in records}
    pages = generated.ROOT / "docs/operations"
    texts = {function: (pages / page).read_text() for function, page, *_ in operations()}
    return timed | {function for function, text in texts.items() if "H200" in text}


def compiled_by_triton() -> dict[str, set[str]]:
    """Function -> chips for which the record of launches has its kernels, compiled ahead."""
    from ejktest.triton_calls import CALLS

    table = generated.ROOT / "packages/ejk-kernels-triton/tests/aot_table.json"
    chips: dict[str, set[str]] = {}
    for row in json.loads(table.read_text())["rows"]:
        call, _, chip = row.partition(" @ ")
        chips.setdefault(CALLS[call].operation, set()).add(chip)
    return {**chips, **{name: chips[other] for name, other in SAME_KERNELS.items()}}


def run_where(function: str, name: str) -> list[str]:
    """Returns what became of an operation on each kind of hardware in HARDWARE."""
    from ejkernel.ops import kernel_registry as registry

    kinds = {(i.platform.value, i.backend) for i in registry.list_implementations(name)}
    has_kernel = ("triton", "gpu") in kinds or ("pallas", "gpu") in kinds
    chips = compiled_by_triton().get(function, set())
    return [
        "run",
        "XLA" if not has_kernel else "run" if function in measured_on_hopper() else "compiled",
        "compiled" if chips & OTHER_NVIDIA else "XLA",
        "compiled" if "gfx942" in chips else "XLA",
        "compiled" if ("pallas", "tpu") in kinds else "XLA",
    ]


def operations_table() -> str:
    """Returns what each function computes, and where it ran."""
    rows = [f"| function | what it computes | {' | '.join(HARDWARE)} |", "|---" * 7 + "|"]
    for function, page, name, summary in operations():
        cells = " | ".join((summary, *run_where(function, name)))
        rows.append(f"| [`{function}`](docs/operations/{page}) | {cells} |")
    return "\n".join([*rows, "", LEGEND])


def hardware_table() -> str:
    """Returns where each function ran."""
    rows = [f"| function | {' | '.join(HARDWARE)} |", "|---" * 6 + "|"]
    for function, page, name, _ in operations():
        cells = " | ".join(run_where(function, name))
        rows.append(f"| [`{function}`](operations/{page}) | {cells} |")
    return "\n".join([*rows, "", LEGEND])


def records_table() -> str:
    """Returns the records of the benchmark: operation, device, table and picture."""
    rows = ["| operation | device | table | picture |", "|---|---|---|---|"]
    folder = generated.ROOT / "tools/bench/results"
    for path in sorted(folder.glob("*/*.md")):
        link = f"../{path.relative_to(generated.ROOT)}"
        picture = f"[chart]({link[:-3]}.svg)" if path.with_suffix(".svg").is_file() else "-"
        cells = (f"`{path.stem}`", path.parent.name, f"[table]({link})", picture)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def accuracy_table() -> str:
    """Returns the errors that ``accuracy.py`` recorded: a row per operation and dtype, a column per
    device and backend that ran, and when these were."""
    from accuracy import DTYPES, FORMS, PLATFORMS, RECORDS

    records = [json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))]
    columns = [(record, p) for record in records for p in PLATFORMS if p in record["errors"]]
    heads = ["operation", "inputs", *(_column_title(r["device"], p) for r, p in columns)]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for operation in FORMS:
        for dtype in DTYPES:
            key = f"{operation} {dtype}"
            cells = [_accuracy_cell(record["errors"][p].get(key)) for record, p in columns]
            if any(cell != "-" for cell in cells):
                rows.append(f"| `{operation}` | {dtype} | {' | '.join(cells)} |")
    devices = [f"{_title(r['device'])}, {r['date']}, JAX {r['versions']['jax']}" for r in records]
    return "\n".join([*rows, "", f"Recorded: {'; '.join(devices)}."])


def _title(device: str) -> str:
    return "CPU" if device == "cpu" else device


def _column_title(device: str, platform: str) -> str:
    on_gpu = {"pallas": "Pallas for Hopper", "cuda": "cuDNN"}
    on_cpu = {"triton": "Triton, interpreted", "pallas": "Pallas for TPUs, interpreted"}
    if device == "cpu":
        return on_cpu.get(platform, f"{PLATFORMS[platform]}, CPU")
    names = PLATFORMS if "TPU" in device else PLATFORMS | on_gpu
    return f"{names[platform]}, {device}"


def _accuracy_cell(errors: list[float] | None) -> str:
    """The error of the output, and of the gradients where there are some.

    No line breaks at their hyphens.
    """
    if not errors:
        return "-"
    return ", ".join(
        f"{x:.1e}".replace("e-0", "e\N{NON-BREAKING HYPHEN}") if x else "0" for x in errors
    )


def kernels_of(platform: str) -> str:
    """One sentence on what a kernel package holds."""
    by_operation = platforms()
    rows = ((function, name) for function, _, name, _ in operations())
    have = [function for function, name in rows if platform in by_operation.get(name, [])]
    if not have:
        return NO_KERNELS
    if platform == "pallas":
        return pallas_table()
    return "Kernels:\n\n" + "\n".join(f"- `{function}`" for function in have)


def pallas_table() -> str:
    """Returns which chips the Pallas kernels of each operation are for."""
    from ejkernel.ops import kernel_registry as registry

    rows = ["| kernel | Hopper GPUs | TPUs |", "|---|---|---|"]
    for function, _, name, _ in operations():
        implementations = registry.list_implementations(name)
        backends = {i.backend for i in implementations if i.platform.value == "pallas"}
        if backends:
            cells = "yes" if "gpu" in backends else "-", ON_TPU if "tpu" in backends else "-"
            rows.append(f"| `{function}` | {cells[0]} | {cells[1]} |")
    return "\n".join(rows)


def sharding_table() -> str:
    """Returns the role of each axis of each operation, by the words of its signature."""
    from ejkernel.modules._table import operation_class

    heads = ("function", "sharded freely", "key heads", "sequence", "summed", "whole")
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for function, *_ in operations():
        rows.append(f"| `{function}` | {' | '.join(_axes_by_role(operation_class(function)))} |")
    return "\n".join(rows)


def _axes_by_role(operation: Any) -> list[str]:
    """Returns the axes that may be sharded, by their roles, and all others, as cells of a table."""
    from ejkernel.types.calls.axes import Kind, bare, meaning

    forms = (axes for p in operation.spec.boundary.parameters for _, axes in p.forms)
    names = ("free", "keys", "sequence", "summed", "whole")
    roles: dict[str, dict[str, None]] = {name: {} for name in names}
    for word in (bare(word) for axes in forms for word in axes.split()):
        axis = meaning(word)
        if word.isidentifier() and word != "_":
            role = "keys" if axis.kind is Kind.KEY_HEADS else "summed" if axis.is_summed else "free"
            role = role if axis.free else "whole"
            roles["sequence" if word in operation.spec.sequence_axes else role][word] = None
    return [", ".join(f"`{word}`" for word in words) or "-" for words in roles.values()]


def render(text: str) -> str:
    """``text`` with every slot filled."""

    tables = {
        "accuracy": accuracy_table,
        "hardware": hardware_table,
        "operations": operations_table,
        "records": records_table,
        "flash_comparison": speeds.comparison,
        "flash_rates": speeds.rates,
        "sharding": sharding_table,
        "tpu_comparison": tpu_costs.comparison,
        "tpu_costs": tpu_costs.page,
        "tpu_memory": tpu_costs.memory,
        "tpu_outside": tpu_costs.outside,
    }

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        body = tables[name]() if name in tables else kernels_of(name)
        return f"{match[1]}\n{body}\n\n{match[3]}"

    figures = {"flash_speeds": speeds.sentence}
    text = WITHIN_A_LINE.sub(lambda m: f"{m[1]}{figures[m[2]]()}{m[3]}", text)
    return SLOT.sub(fill, text)


if __name__ == "__main__":
    pages = [generated.ROOT / page for page in PAGES]
    pages += sorted(generated.ROOT.glob("packages/*/README.md"))
    texts = {path: render(path.read_text()) for path in pages}
    sys.exit(generated.main(texts, __doc__, None))
