"""Write what every shipped Triton launch uses of the chip: registers, spills, shared memory.

python tools/gpu/aot_table.py                   # all: an hour on two cores, no GPU
python tools/gpu/aot_table.py d128 "bias d256"  # only these calls; the others stay
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checkout

checkout.use()

from ejktest import triton_calls  # noqa: E402
from ejktest.ahead import in_parallel  # noqa: E402

TABLE = checkout.ROOT / "packages/ejk-kernels-triton/tests/aot_table.json"


def measured(call: str, target: str) -> dict[str, dict[str, int]]:
    return {kernel: r.row for kernel, r in triton_calls.resources(call, target).items()}


def main() -> None:
    asked = set(sys.argv[1:])
    known = json.loads(TABLE.read_text())["rows"] if TABLE.exists() else {}
    cases = {f"{call} @ {target}": (call, target) for call, target in triton_calls.cases()}
    rows = {name: known.get(name, {}) for name in cases}
    wanted = [name for name, case in cases.items() if not asked or case[0] in asked]
    found = in_parallel((measured, *cases[name]) for name in wanted)
    for name, row in zip(wanted, found, strict=True):
        rows[name] = row
        for kernel, r in {"": row}.items() if isinstance(row, str) else row.items():
            mark = "" if not isinstance(r, str) and r["spills"] == 0 else "  <--"
            print(f"{name} {kernel}: {r}{mark}", flush=True)
    failed = {name: row for name, row in rows.items() if isinstance(row, str) or not row}
    if failed:
        sys.exit(f"not written, {len(failed)} calls failed: {failed}")
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    TABLE.write_text(f'{{\n  "triton": "{version("triton")}",\n  "rows": {{\n{lines}\n  }}\n}}\n')


if __name__ == "__main__":
    main()
