"""Write what every shipped Triton launch uses of the chip: registers, spills, shared memory.

python tools/gpu/aot_table.py                   # all: about an hour of one core, no GPU
python tools/gpu/aot_table.py --jobs 28         # as many processes
python tools/gpu/aot_table.py d128 "bias d256"  # only these calls; the others stay
python tools/gpu/aot_table.py --targets gfx942  # all calls for this chip

Rows are written as they come, so that what an interrupted run has is kept; those that differ from
the table before are named at the end. ``--out`` leaves the table as it is and writes another file.
Registers are those of the ``ptxas`` that Triton's wheel brings, or of TRITON_PTXAS_BLACKWELL_PATH.
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
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    text = f'{{\n  "triton": "{version("triton")}",\n  "rows": {{\n{lines}\n  }}\n}}\n'
    whole = path.with_suffix(".part")  # a reader never sees half a table
    whole.write_text(text)
    whole.replace(path)


def differences(name: str, before: Row, after: Row) -> list[str]:
    """What changed of a row, a line for each kernel."""
    found = []
    for kernel in dict.fromkeys((*before, *after)):
        old, new = before.get(kernel, {}), after.get(kernel, {})
        changed = [
            f"{fact} {old.get(fact, '-')} -> {new.get(fact, '-')}"
            for fact in dict.fromkeys((*old, *new))
            if old.get(fact) != new.get(fact)
        ]
        found += [f"{name} {kernel}: {', '.join(changed)}"] if changed else []
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("calls", nargs="*", help="of ejktest.triton_calls; none: all")
    parser.add_argument("--targets", nargs="+", choices=triton_calls.TARGETS, help="none: all")
    parser.add_argument("--jobs", type=int, help="processes; default: the cores but one")
    parser.add_argument("--out", type=Path, default=TABLE, help="the table that is written")
    given = parser.parse_args()
    unknown = [call for call in given.calls if call not in triton_calls.CALLS]
    if unknown:
        parser.error(f"no such calls: {unknown}; there are {list(triton_calls.CALLS)}")
    known = json.loads(TABLE.read_text())["rows"] if TABLE.exists() else {}
    cases = {f"{call} @ {target}": (call, target) for call, target in triton_calls.cases()}
    wanted = [
        name
        for name, (call, target) in cases.items()
        if call in (given.calls or [call]) and target in (given.targets or [target])
    ]
    wanted.sort(key=lambda name: -len(known.get(name, {})))  # what takes longest is not last
    rows = {name: known.get(name, {}) for name in cases}
    failed, changed = {}, []
    jobs = ((measured, *cases[name]) for name in wanted)
    for done, (number, row) in enumerate(as_finished(jobs, given.jobs), 1):
        name = wanted[number]
        print(f"{done}/{len(wanted)} {name}", flush=True)
        if isinstance(row, str) or not row:
            failed[name] = row
            continue
        changed += differences(name, rows[name], row)
        rows[name] = row
        write(given.out, rows)
        for kernel, r in row.items():
            if r["spills"]:
                print(f"{name} {kernel}: {r}  <--", flush=True)
    print("\n".join([f"{len(changed)} kernels differ from the table before:", *changed]))
    if failed:
        sys.exit(f"{len(failed)} calls failed, their rows stay: {failed}")


if __name__ == "__main__":
    main()
