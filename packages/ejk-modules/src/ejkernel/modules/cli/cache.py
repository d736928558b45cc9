"""The tuned configurations on disk.

  ejk cache ls                       files, devices, kernels, and how many configs each holds
  ejk cache show flash_attention     the configs themselves; also by device or digits of the key
  ejk cache export table.json        all or some in one file, with where they come from
  ejk cache import table.json        the other way; what is there stays unless --replace
  ejk cache clear --kernel NAME      forget; --all forgets everything

A file that another version of ejkernel wrote is left alone and reported.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ejkernel.modules.cli.app import FAILED, CommandError, add_common_options
from ejkernel.modules.cli.output import Output, counted


def arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    ls = actions.add_parser("ls", help="files and how many configs each holds")
    show = actions.add_parser("show", help="the configs")
    show.add_argument("what", nargs="?", metavar="NAME", help="kernel, device, or digits of a key")
    export = actions.add_parser("export", help="write configs to one file")
    export.add_argument("file", type=Path)
    bring = actions.add_parser("import", help="read configs from a file")
    bring.add_argument("file", type=Path)
    bring.add_argument("--replace", action="store_true", help="replace those that are there")
    clear = actions.add_parser("clear", help="forget configs")
    clear.add_argument("--all", action="store_true", help="all of them")
    for sub in (export, clear):
        sub.add_argument("--kernel", help="only this kernel's")
        sub.add_argument("--device", help="only those of devices with this in their name")
    for sub in (ls, show, export, bring, clear):
        add_common_options(sub, argparse.SUPPRESS)


def run_command(args: argparse.Namespace, out: Output) -> int:
    actions = {"ls": _ls, "show": _show, "export": _export, "import": _import, "clear": _clear}
    return actions[args.action](args, out)


def _ls(args: argparse.Namespace, out: Output) -> int:
    from ejkernel.modules.cli import stored

    files = stored.scan()
    root = stored.root()
    listed = [
        {"path": str(f.path), "status": f.status, "configs": len(f.entries), "problem": f.problem}
        for f in files
    ]
    out.data({"path": str(root), "files": listed})
    out.text(f"{root}" + ("" if files else ": nothing tuned yet (ejk tune)"))
    rows = []
    for f in files:
        kernels = sorted({c.kernel for c in stored.configs([f])})
        devices = sorted({c.device for c in stored.configs([f])})
        name = str(f.path.relative_to(root)) if f.path.is_relative_to(root) else str(f.path)
        rows.append((name, ", ".join(kernels), ", ".join(devices), len(f.entries), f.status))
    if rows:
        out.table(("file", "kernels", "devices", "configs", "status"), rows, right=(3,))
    _report_others(files, out)
    return 0


def _report_others(files: list[Any], out: Output) -> None:
    for f in files:
        if f.status != "ok":
            out.note(f"{f.path}: {f.problem}")


def _show(args: argparse.Namespace, out: Output) -> int:
    from ejkernel.modules.bench.record import config_fields
    from ejkernel.modules.cli import stored
    from ejkernel.modules.workloads.find import UnknownName

    files = stored.scan()
    every = stored.configs(files)
    query = (args.what or "").lower()
    matching = [
        c
        for c in every
        if query in ("", c.kernel.lower())
        or (query in c.device.lower() and ":" in query + c.device)
        or (len(query) >= 4 and c.digits.startswith(query))
        or query == c.key.lower()
    ]
    if query and not matching:
        raise UnknownName("kernel, device or key in the cache", args.what,
                          [n for c in every for n in (c.kernel, c.device)])  # fmt: skip
    out.data(
        [
            {
                "key": c.key,
                "kernel": c.kernel,
                "device": c.device,
                "config": config_fields(c.entry.plain["config"]),
                "facts": c.entry.metadata,
                "measured": c.entry.measured,
                "path": str(c.path),
            }
            for c in matching
        ]
    )
    rows = []
    for c in matching:
        times = c.measured.get("ms"), c.measured.get("heuristic_ms")
        rows.append((*c.cells, *times, c.digits[:8]))
    if rows:
        columns = ("kernel", "device", "arrays", "config", "ms", "heuristic ms", "key")
        out.table(columns, rows, right=(4, 5))
    else:
        out.text("nothing tuned yet (ejk tune)")
    _report_others(files, out)
    return 0


def _export(args: argparse.Namespace, out: Output) -> int:
    from ejkernel.modules.cli.tables import write_table

    count = write_table(args.file, kernel=_kernel(args.kernel), device=args.device)
    out.data({"file": str(args.file), "configs": count})
    out.text(f"{counted(count, 'config')} written to {args.file}" if count else "nothing to export")
    return 0 if count else FAILED


def _import(args: argparse.Namespace, out: Output) -> int:
    from ejkernel.modules.cli import stored
    from ejkernel.modules.cli.tables import import_table

    try:
        file = stored.read(args.file)
    except OSError as error:
        raise CommandError(f"{args.file}: {error.strerror or error}") from None
    if file.status != "ok":
        raise CommandError(f"{args.file}: {file.problem}", FAILED)
    try:
        outcome = import_table(args.file, replace=args.replace)
    except OSError as error:
        raise CommandError(str(error)) from None
    counts = {name: len(keys) for name, keys in outcome.items()}
    out.data({"file": str(args.file), "counts": counts, "keys": outcome})
    words = {
        "added": "added",
        "replaced": "replaced",
        "kept": "not taken, the cache has them already (--replace takes them)",
        "unknown": "not taken: of kernels that are not known here (ejk --import MODULE ...)",
        "illegal": "not taken: no config of this version",
    }
    out.fields([(str(n), words[name]) for name, n in counts.items()] or [("0", "configs there")])
    return FAILED if {"unknown", "illegal"} & set(counts) else 0


def _clear(args: argparse.Namespace, out: Output) -> int:
    from ejkernel.modules.cli import stored
    from ejkernel.ops.config.store import ConfigFile

    if not (args.all or args.kernel or args.device):
        raise CommandError("say what to forget: --kernel NAME, --device NAME, or --all")
    files = stored.scan()
    kernel = _kernel(args.kernel)
    gone = 0
    for file in files:
        chosen = {c.key for c in stored.configs([file], kernel=kernel, device=args.device)}
        if args.all:
            chosen = set(file.entries)
        if file.status != "ok" or not chosen:
            continue
        remaining = {key: entry for key, entry in file.entries.items() if key not in chosen}
        plain = ConfigFile.plain_path(file.path)
        try:
            ConfigFile(plain).update(remaining, 10.0, keep=False)
        except OSError as error:
            raise CommandError(f"{file.path}: {error.strerror or error}") from None
        gone += len(chosen)
    if args.all:
        _forget_failures()
    out.data({"forgotten": gone})
    out.text(f"{counted(gone, 'config')} forgotten")
    _report_others(files, out)
    return 0


def _forget_failures() -> None:
    """Clears the memory of candidates that failed, which belongs to the configurations."""
    from ejkernel.modules._executor import get_default_executor

    failures = getattr(get_default_executor().selector, "failures", None)
    if failures is not None:
        failures.clear()


def _kernel(name: str | None) -> str | None:
    """Returns the registry's name of an operation, or the name of another kernel in the cache.

    Raises:
        UnknownName: neither.
    """
    if name is None:
        return None
    from ejkernel.modules._table import operation_class
    from ejkernel.modules.cli import stored
    from ejkernel.modules.workloads.find import UnknownName, operation_names
    from ejkernel.ops import KernelNotFound

    try:
        return operation_class(name).shared().name
    except KernelNotFound:
        stored_kernels = {c.kernel for c in stored.configs(stored.scan())}
        if name in stored_kernels:
            return name
        raise UnknownName("kernel", name, [*sorted(stored_kernels), *operation_names()]) from None
