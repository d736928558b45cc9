"""Write what every shipped Triton launch uses of the chip: registers, spills, shared memory.

python tools/gpu/aot_table.py                   # all: about an hour of one core, no GPU
python tools/gpu/aot_table.py --jobs 28         # as many processes
python tools/gpu/aot_table.py d128 "bias d256"  # only these calls; the others stay
python tools/gpu/aot_table.py --targets gfx942  # all calls for this chip

Rows are written as they come, so that what an interrupted run has is kept; those that differ from
the table before are named at the end. ``--out`` leaves the table as it is and writes another file.
The ``ptxas`` of Triton's wheel counts registers, or that of TRITON_PTXAS_BLACKWELL_PATH.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checkout

checkout.use()

from ejktest import triton_calls  # noqa: E402
from ejktest.ahead import as_finished  # noqa: E402

TABLE = checkout.ROOT / "packages/ejk-kernels-triton/tests/aot_table.json"
Row = dict[str, dict[str, Any]]


def measured(call: str, target: str) -> Row:
    return {kernel: r.row for kernel, r in triton_calls.resources(call, target).items()}


def write(path: Path, rows: dict[str, Row]) -> None:
    body = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    text = f'{{\n  "triton": "{version("triton")}",\n  "rows": {{\n{body}\n  }}\n}}\n'
    part = path.with_suffix(".part")  # a reader never sees half a table
    part.write_text(text)
    part.replace(path)


def differences(name: str, before: Row, after: Row) -> list[str]:
    """Returns what changed in a row, a line for each kernel."""
    changes = []
    for kernel in dict.fromkeys((*before, *after)):
        old, new = before.get(kernel, {}), after.get(kernel, {})
        changed = [
            f"{fact} {old.get(fact, '-')} -> {new.get(fact, '-')}"
            for fact in dict.fromkeys((*old, *new))
            if old.get(fact) != new.get(fact)
        ]
        changes += [f"{name} {kernel}: {', '.join(changed)}"] if changed else []
    return changes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("calls", nargs="*", help="of ejktest.triton_calls; none: all")
    parser.add_argument("--targets", nargs="+", choices=triton_calls.TARGETS, help="none: all")
    parser.add_argument("--jobs", type=int, help="processes; default: the cores but one")
    parser.add_argument("--out", type=Path, default=TABLE, help="the table that is written")
    args = parser.parse_args()
    unknown = [call for call in args.calls if call not in triton_calls.CALLS]
    if unknown:
        parser.error(f"no such calls: {unknown}; there are {list(triton_calls.CALLS)}")
    before_rows = json.loads(TABLE.read_text())["rows"] if TABLE.exists() else {}
    cases = {f"{call} @ {target}": (call, target) for call, target in triton_calls.cases()}
    requested = [
        name
        for name, (call, target) in cases.items()
        if call in (args.calls or [call]) and target in (args.targets or [target])
    ]
    # calls of many kernels first, so that the last ones are short
    requested.sort(key=lambda name: -len(before_rows.get(name, {})))
    rows = {name: before_rows.get(name, {}) for name in cases}
    failed, changed = {}, []
    jobs = ((measured, *cases[name]) for name in requested)
    for done, (number, row) in enumerate(as_finished(jobs, args.jobs), 1):
        name = requested[number]
        print(f"{done}/{len(requested)} {name}", flush=True)
        if isinstance(row, str) or not row:
            failed[name] = row
            continue
        changed += differences(name, rows[name], row)
        rows[name] = row
        write(args.out, rows)
        for kernel, r in row.items():
            if r["spills"]:
                print(f"{name} {kernel}: {r}  <--", flush=True)
    print("\n".join([f"{len(changed)} kernels differ from the table before:", *changed]))
    if failed:
        sys.exit(f"{len(failed)} calls failed, their rows stay: {failed}")


if __name__ == "__main__":
    main()
