"""Write what every shipped Triton launch uses of the chip: registers, spills, shared memory.

python tools/gpu/aot_table.py                   # all: some ten minutes on two cores, no GPU
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

from ejktest.ahead import in_parallel  # noqa: E402
from ejktest.triton_configs import cases, resources  # noqa: E402

TABLE = checkout.ROOT / "packages/ejk-kernels-triton/tests/aot_table.json"


def measured(call: str, target: str) -> dict[str, dict[str, int]]:
    return {kernel: r.row for kernel, r in resources(call, target).items()}


def main() -> None:
    wanted = [c for c in cases() if not sys.argv[1:] or c[0] in sys.argv[1:]]
    old = json.loads(TABLE.read_text())["rows"] if TABLE.exists() and sys.argv[1:] else {}
    rows = {f"{call} @ {target}": {} for call, target in cases()}
    rows |= {name: row for name, row in old.items() if name in rows}
    for (call, target), row in zip(
        wanted, in_parallel((measured, *c) for c in wanted), strict=True
    ):
        rows[f"{call} @ {target}"] = row
        for kernel, r in {"": row}.items() if isinstance(row, str) else row.items():
            mark = "" if not isinstance(r, str) and r["spills"] == 0 else "  <--"
            print(f"{call} @ {target} {kernel}: {r}{mark}", flush=True)
    failed = {name: row for name, row in rows.items() if isinstance(row, str) or not row}
    if failed:
        sys.exit(f"not written, {len(failed)} calls failed: {failed}")
    lines = [f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()]
    head = f'{{\n  "triton": "{version("triton")}",\n  "rows": {{\n'
    TABLE.write_text(head + ",\n".join(lines) + "\n  }\n}\n")


if __name__ == "__main__":
    main()
