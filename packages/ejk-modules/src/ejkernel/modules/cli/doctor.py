"""Checks of the installation and of the device, each with the line that fixes it.

The exit status is 0 when the operations can be used here, 1 when something must be fixed first.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from ejkernel.modules.cli import checks
from ejkernel.modules.cli.output import Output


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-run", action="store_true", help="look only, run nothing")


def run_command(args: argparse.Namespace, out: Output) -> int:
    results, device, table = examine(run=not args.no_run)
    usable = not any(c.status == "fail" for c in results)
    out.data(
        {
            "usable": usable,
            "device": device,
            "checks": [asdict(c) for c in results],
            "operations": table,
        }
    )
    for group in dict.fromkeys(c.group for c in results):
        out.title(group)
        out.checks([(c.status, c.what, c.found, c.fix) for c in results if c.group == group])
    if table:
        _show_operations(table, out)
    fixes = [c for c in results if c.fix and c.status in ("warn", "fail")]
    out.text("")
    if usable:
        name = device.get("name", "this machine")
        notes = f"; {len(fixes)} remark{'s'[: len(fixes) != 1]} above" if fixes else ""
        out.text(f"ejkernel can be used here, on {name}{notes}.", "ok")
    else:
        first = next(c for c in results if c.status == "fail")
        out.text(f"Not usable yet. First: {first.fix or first.found}", "fail")
    return 0 if usable else 1


def examine(*, run: bool) -> tuple[list[checks.Check], dict[str, Any], list[dict[str, Any]]]:
    """Returns all checks, the device, and what each operation can run on.

    Checks that need a missing part are left out: the check of that part reports it.
    """
    results = [c for check in checks.INSTALLATION for c in check()]
    if any(c.status == "fail" for c in results):
        return results, {}, []
    on_device, device = checks.devices()
    results += on_device
    results += [c for check in checks.SETTINGS for c in check()]
    if any(c.status == "fail" for c in results):
        return results, device, []
    from ejkernel.modules.cli import doctor_checks

    results += doctor_checks.packages()
    table = doctor_checks.operations()
    unserved = [row["operation"] for row in table if row["chosen"] == "none"]
    if unserved:
        results.append(
            checks.Check(
                "kernels", "operations", "fail", f"nothing can run {', '.join(unserved)}",
                "python -m pip install --force-reinstall ejk-kernels-xla",
            )
        )  # fmt: skip
    if run:
        results += doctor_checks.small_call()
        gated = next(row for row in table if row["operation"] == "recurrent_attention")
        if gated["platforms"]["triton"] == "yes":
            results += doctor_checks.gated_gradients("triton")
    return results, device, table


def _show_operations(table: list[dict[str, Any]], out: Output) -> None:
    out.title("operations")
    platforms = list(table[0]["platforms"])
    rows, reasons = [], {}
    for row in table:
        cells = []
        for platform in platforms:
            answer = row["platforms"][platform]
            if answer == "yes":
                cells.append("yes" + ("*" if row["chosen"] == platform else ""))
            else:
                cells.append("-")
                reasons.setdefault((platform, answer), []).append(row["operation"])
        rows.append((row["operation"], *cells))
    out.table(("operation", *platforms), rows)
    out.text("* what a typical call gets; `ejk explain OP` says why")
    out.title("why not")
    texts = []
    for (platform, reason), names in reasons.items():
        count = len(names)
        who = "every operation" if count == len(table) else ", ".join(names)
        if count > 4 and count != len(table):
            who = f"{count} operations"
        texts.append((platform, f"{reason}  [{who}]"))
    out.fields(texts)
