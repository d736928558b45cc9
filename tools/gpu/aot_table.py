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

from ejktest import triton_calls, triton_configs  # noqa: E402
from ejktest.ahead import in_parallel  # noqa: E402

TABLE = checkout.ROOT / "packages/ejk-kernels-triton/tests/aot_table.json"
PARTS = {"rows": triton_configs, "others": triton_calls}  # flash attention's, and all others


def measured(part: str, call: str, target: str) -> dict[str, dict[str, int]]:
    return {kernel: r.row for kernel, r in PARTS[part].resources(call, target).items()}


def main() -> None:
    asked = set(sys.argv[1:])
    old = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    table: dict[str, dict[str, dict]] = {}
    for part, module in PARTS.items():
        known = old.get(part, {})
        table[part] = {
            name: known.get(name, {})
            for name in (f"{c} @ {target}" for c, target in module.cases())
        }
    wanted = [
        (part, *case)
        for part, module in PARTS.items()
        for case in module.cases()
        if not asked or case[0] in asked
    ]
    jobs = ((measured, *case) for case in wanted)
    for (part, call, target), row in zip(wanted, in_parallel(jobs), strict=True):
        name = f"{call} @ {target}"
        table[part][name] = row
        for kernel, r in {"": row}.items() if isinstance(row, str) else row.items():
            mark = "" if not isinstance(r, str) and r["spills"] == 0 else "  <--"
            print(f"{name} {kernel}: {r}{mark}", flush=True)
    everything = {name: row for rows in table.values() for name, row in rows.items()}
    failed = {name: row for name, row in everything.items() if isinstance(row, str) or not row}
    if failed:
        sys.exit(f"not written, {len(failed)} calls failed: {failed}")
    parts = []
    for part, rows in table.items():
        lines = [f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()]
        parts.append(f'  "{part}": {{\n' + ",\n".join(lines) + "\n  }")
    head = f'{{\n  "triton": "{version("triton")}",\n'
    TABLE.write_text(head + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
