"""Compile the TPU kernels for chips that are not here, and count what they cost.

python tools/tpu/check_tpu.py                           # every chip: some fifteen minutes
python tools/tpu/check_tpu.py --chips v5e --parts d128  # one chip, static cost at one head dim
python tools/tpu/check_tpu.py --no-cost                 # only: does everything compile

Needs the libtpu wheel next to jax (``libtpu==0.0.42.*`` for jax 0.10.2), no TPU.

1. Every shipped call, forward and backward, is compiled. Exit status 1 if one is not (vector
   memory that does not suffice is such a failure), or takes longer than ``--slowest`` seconds.
2. The code of one tile without element mask is counted, next to JAX's flash, splash and megablox
   kernels at their best block size. A core issues a bundle a cycle; *bundles per pass* divides by
   the useful matmuls in units of 128 x 128 x 128. Exit status 1 if JAX's better one needs fewer,
   unless ours already need no more than the matrix units take (such cases are named).
3. Bundles by slot, vector memory, bytes that the kernel moves over the least (``traffic.py``,
   ``copies.py``) and what the program writes outside the kernel (``outside.py``) are listed with
   them. Exit status 1 where memory may limit a kernel that moves more than 1.1 of the least.
4. The counts are compared with ``costs.json``: exit status 1 where a kernel takes more than 5% more
   of any, where one is not kept or not counted any more, and where a program writes more outside.
   ``--store`` keeps the counts of this run there, which ``tools/tables.py --write`` brings into the
   documents; ``--ours`` leaves out JAX's kernels; ``--no-copies`` does not interpret the kernels
   that copy by hand. ``--outside`` does nothing but compare what programs write around kernels.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from tools.tpu import chips, table  # noqa: E402

PASS = 128**3
COMPARED = ["d64", "d128", "d256", "grouped", "decode", "ragged"]
ALONE = [
    *("native sparse", "native sparse joined", "linear", "delta", "convolution", "512 groups"),
    *("grouped short inner", "grouped 8 bits"),
    *("ragged decode", "decode 8 bits", "ragged write", "latent", "latent expanded", "pooling"),
    *("blocksparse", "joined heads", "trees", "ring"),
]
PARTS = [*COMPARED, *ALONE]


def compile_all(chip: str, names: list[str]) -> list[dict[str, Any]]:
    """Compiles every shipped call for a chip; seconds, or what went wrong."""
    chips.prepare_environment()
    from ejkernel.kernels import pallas
    from ejktest.cases import (
        attention,
        convolution,
        delta,
        grouped,
        latent,
        linear,
        paged,
        pooling,
        ragged,
        sparse,
    )

    families = (
        *(attention, convolution, delta, grouped, latent),
        *(linear, paged, pooling, ragged, sparse),
    )
    calls = {name: call for family in families for name, call in family.COMPILED_TPU.items()}

    device = chips.device(chip)
    rows = []
    for name, call in ((n, c) for n, c in calls.items() if not names or n in names):
        passes = [("forward", call.forward)]
        if call.gradients:
            passes.append(("gradients", call.backward))
        for part, make in passes:
            start = time.perf_counter()
            row: dict[str, Any] = {"call": name, "part": part}
            try:
                compiled = chips.compile_for(device, make(pallas), *call.shapes())
                row["temporary"] = compiled.memory_analysis().temp_size_in_bytes
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
            row["seconds"] = round(time.perf_counter() - start, 2)
            rows.append(row)
            print(f"{chip} {row}", file=sys.stderr, flush=True)
    return rows


def count_all(
    chip: str, names: list[str], *, ours: bool, copies: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the cost of the kernels of these parts on a chip, and metadata of the chip.

    With ``ours`` not of JAX's; ``copies``: interpret kernels that copy by hand.
    """
    dump = Path(tempfile.mkdtemp(prefix="llo"))
    chips.prepare_environment(dump)
    from jax.experimental.pallas import tpu as pltpu
    from tools.tpu.calls import sources

    device = chips.device(chip)
    rows, last = [], {}
    try:
        for name in names:
            kernels = sources(name)
            for source in kernels[:1] if ours and name in COMPARED else kernels:
                rows += _count(device, dump, source, name, chip, last, copies=copies)
    finally:
        shutil.rmtree(dump)
    with chips.targeting(device):
        info = pltpu.get_tpu_info()
    balance = round(info.bf16_ops_per_second / info.mem_bw_bytes_per_second)
    return rows, {"vmem_mib": info.vmem_capacity_bytes >> 20, "balance": balance}


def _count(
    device: Any,
    dump: Path,
    source: Any,
    name: str,
    chip: str,
    last: dict[str, Any],
    *,
    copies: bool,
) -> list[dict[str, Any]]:
    """Counts the kernels of a source; ``last``: the program whose code is in ``dump``."""
    from jax.experimental.pallas import tpu as pltpu
    from tools.tpu.cost import integers
    from tools.tpu.llo import kernel_code
    from tools.tpu.outside import written_outside
    from tools.tpu.traffic import count_traffic

    rows: list[dict[str, Any]] = []
    try:
        with chips.targeting(device):
            costs = list(source())
            columns = pltpu.get_tpu_info().mxu_column_size
    except Exception as error:  # JAX's kernels refuse some head dims
        print(f"{chip} {name}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return rows
    for cost in costs:
        key = cost.function if cost.call is None else (id(cost.call), cost.backward)
        if last.get("failed") == key:
            continue
        start = time.perf_counter()
        try:
            if last.get("key") != key:
                for old in dump.iterdir():
                    old.unlink()
                program = _program(device, cost)
                last |= {"key": key, "outside": written_outside(program.as_text())}
            outside = last["outside"]
            code = kernel_code(dump, cost.kernel)
            moved = None
            if cost.call is not None:
                with chips.targeting(device):
                    moved = count_traffic(
                        cost.function, cost.shapes, integers(cost.shapes), cost.kernel
                    )
            if cost.copies is not None:
                moved = cost.copies().traffic(device.device_kind) if copies else None
        except Exception as error:
            last |= {"failed": key, "key": None}
            print(f"{chip} {name} {cost}: {str(error)[:300]}", file=sys.stderr, flush=True)
            continue
        passes = cost.work / PASS
        rows.append(
            {
                "part": name,
                "kernel": cost.row,
                "who": cost.who,
                "tiles": cost.tiles or "x".join(map(str, moved.block if moved else ())),
                "bundles": code.steady.bundles,
                "per_pass": round(code.steady.bundles / passes, 2),
                "slots": _slots(code.steady, passes),
                "cycles": _cycles(columns, code.steady.capacity["MXU"], cost.depth),
                "mxu": round(code.steady.share("MXU"), 3),
                "spills": code.spills,
                "vmem_mib": round(code.vmem / 2**20, 1),
                "code": code.bundles,
                "opening": code.opening,
                "moved": None if moved is None else moved.ratio,
                "intensity": None if moved is None else moved.intensity,
                "outside_mib": round(sum(x.bytes for x in outside) / 2**20, 1),
                "outside": [x for x in outside if x.bytes > 2**16],
            }
        )
        rows[-1]["seconds"] = round(time.perf_counter() - start, 1)
        print(f"{chip} {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def _program(device: Any, cost: Any) -> Any:
    """Compiles the call of a kernel, on rows as a projection leaves them."""
    from tools.tpu.outside import with_rows_as_projected

    if cost.compiled is not None:
        return cost.compiled(device)
    function, shapes = cost.function, cost.shapes
    if cost.call is not None:
        with chips.targeting(device):
            function, shapes = with_rows_as_projected(cost.call, cost.backward, cost.returns_output)
    if cost.call is None or "kv_cache" not in shapes[1]:
        return chips.compile_for(device, function, *shapes)
    # a server's cache is written in place: the result takes the memory of the operand
    others = {name: x for name, x in shapes[1].items() if name != "kv_cache"}

    def serve(smooth: Any, fixed: Any, cache: Any) -> Any:
        return function(smooth, {**fixed, "kv_cache": cache})

    return chips.compile_for(device, serve, shapes[0], others, shapes[1]["kv_cache"], donate=(2,))


def list_outside(chip: str, names: list[str]) -> list[dict[str, Any]]:
    """Returns what the programs of these parts write outside our kernels on a chip."""
    chips.prepare_environment()
    from tools.tpu.calls import sources
    from tools.tpu.outside import written_outside

    device, rows = chips.device(chip), []
    for name in names:
        kernels = sources(name)
        for source in kernels[:1] if name in COMPARED else kernels:
            with chips.targeting(device):
                costs = list(source())
            for cost in costs:
                instructions = written_outside(_program(device, cost).as_text())
                size = round(sum(x.bytes for x in instructions) / 2**20, 1)
                row = {"part": name, "kernel": cost.row, "outside_mib": size}
                rows.append(row | {"outside": [x for x in instructions if x.bytes > 2**16]})
                print(f"{chip} {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def _slots(steady: Any, passes: float) -> dict[str, float]:
    """Bundles a pass would take if only one kind of slot were limited: used ones over all of a
    bundle."""
    return {
        kind: round(sum(steady.slots[n] / steady.capacity[n] for n in names) / passes, 2)
        for kind, names in table.SLOTS.items()
    }


def _cycles(columns: int, units: int, depth: int) -> float:
    """Cycles a pass takes in units of 128 columns, which accept a row a cycle; 0: not known.

    The compiler does not count waiting for them: its code may be shorter.
    """
    return 0.0 if columns > 128 else 128 / units * max(1, 128 // depth)


def in_child(*arguments: str) -> Any:
    """libtpu reads its flags once a process."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def report_compiled(chip: str, rows: list[dict[str, Any]], slowest: float) -> list[str]:
    print(f"\n### {chip}: seconds to compile\n\n| call | forward | forward and gradients |")
    print("|---|---|---|")
    faults = []
    by_call: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_call.setdefault(row["call"], {})[row["part"]] = row
    for call, parts in by_call.items():
        columns = [parts.get(p, {}) for p in ("forward", "gradients")]
        cells = [row.get("error") or row.get("seconds", "") for row in columns]
        print(f"| {call} | {cells[0]} | {cells[1]} |")
        for row in parts.values():
            if "error" in row:
                faults.append(f"{chip} {call} {row['part']}: {row['error']}")
            elif row["seconds"] > slowest:
                faults.append(f"{chip} {call} {row['part']}: {row['seconds']} s to compile")
    return faults


def report_cost(chip: str, rows: list[dict[str, Any]]) -> list[str]:
    print(f"\n### {chip}: one unmasked tile\n")
    columns = ("part", "kernel", "", "tile", "bundles", "per pass", "of the better", *table.SLOTS)
    extra = ("spills", "VMEM", "before matmuls", "FLOPs a byte", "bytes over least", "outside")
    print("| " + " | ".join((*columns, *extra)) + " |")
    print("|" + "---|" * (len(columns) + len(extra)))
    faults, notes = [], []
    for part, kernel in dict.fromkeys((r["part"], r["kernel"]) for r in rows):
        mine = [r for r in rows if (r["part"], r["kernel"]) == (part, kernel)]
        best = {}
        for row in mine:
            if row["who"] not in best or row["per_pass"] < best[row["who"]]["per_pass"]:
                best[row["who"]] = row
        others = [r["per_pass"] for who, r in best.items() if who != "ejkernel"]
        least = min(others, default=None)
        for who, r in best.items():
            ratio = "" if least is None else f"{r['per_pass'] / least:.3f}"
            print(
                f"| {part} | {kernel} | {who} | {r['tiles']} | {r['bundles']} | {r['per_pass']} | "
                f"{ratio} | {' | '.join(f'{n:g}' for n in r['slots'].values())} | {r['spills']} | "
                f"{r['vmem_mib']} MiB | {r['opening']} | {r['intensity'] or ''} | "
                f"{r['moved'] or ''} | {r['outside_mib']} MiB |"
            )
        if "ejkernel" not in best:
            faults.append(f"{chip} {part} {kernel}: not counted")
        elif least is not None and best["ejkernel"]["per_pass"] > least:
            count, cycles = (best["ejkernel"][name] for name in ("per_pass", "cycles"))
            text = f"{chip} {part} {kernel}: {count} bundles per pass, JAX's better {least}"
            if count > cycles:
                faults.append(text)
            else:
                notes.append(f"{text}; the matrix units take {cycles:g} cycles")
    for row in (row for row in rows if row["who"] == "ejkernel"):
        notes += [f"{chip} {table.name_of(row)}: writes {x[0]} {x[1]}" for x in row["outside"]]
    print("".join(f"\n{note}" for note in notes))
    return faults


def _versions() -> str:
    from importlib.metadata import version

    return ", ".join(f"{name} {version(name)}" for name in ("jax", "libtpu"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", default=list(chips.TOPOLOGIES))
    parser.add_argument("--parts", nargs="+", default=PARTS)
    parser.add_argument("--no-cost", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--slowest", type=float, default=60.0)
    parser.add_argument("--ours", action="store_true", help="count no kernels of JAX")
    parser.add_argument("--store", action="store_true", help="keep the counts in costs.json")
    parser.add_argument("--calls", nargs="+", default=[], help="compile only these calls")
    parser.add_argument("--no-copies", action="store_true", help="interpret no kernel")
    parser.add_argument("--outside", action="store_true", help="only: what stands around kernels")
    parser.add_argument("--child", choices=("compile", "cost", "outside"))
    args = parser.parse_args()
    if args.child:
        (chip,) = args.chips
        if args.child == "compile":
            rows = compile_all(chip, args.calls)
        elif args.child == "outside":
            rows = list_outside(chip, args.parts)
        else:
            rows = count_all(chip, args.parts, ours=args.ours, copies=not args.no_copies)
        print(json.dumps(rows))
        return
    faults = []
    calls = ["--calls", *args.calls] if args.calls else []
    for chip in args.chips:
        if args.outside:
            rows = in_child("--child", "outside", "--chips", chip, "--parts", *args.parts)
            faults += table.compare_outside(chip, rows)
            continue
        if not args.no_compile:
            rows = in_child("--child", "compile", "--chips", chip, *calls)
            faults += report_compiled(chip, rows, args.slowest)
        if not args.no_cost:
            flags = ["--ours"] * args.ours + ["--no-copies"] * args.no_copies
            child = "--child", "cost", "--chips", chip, *flags, "--parts", *args.parts
            rows, metadata = in_child(*child)
            faults += report_cost(chip, rows)
            faults += table.excess(chip, rows, metadata["balance"])
            if args.store:
                table.store(chip, rows, {"chip": metadata, "versions": _versions()})
            else:
                faults += table.compare(chip, rows, args.parts, PARTS)
    print("\n" + ("\n".join(faults) if faults else "nothing is wrong"))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
