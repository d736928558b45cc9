"""The ``ejk`` script, from outside the namespace, so that it starts when the namespace is broken.

The distribution ``ejkernel`` is another project, whose files lie in the folder that ours share:
whichever is installed last overwrites the other's, and uninstalling one takes files of both. This
module finds that out with the standard library alone, says how to repair it, and otherwise hands
over to ``ejkernel.modules.cli``.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import shlex
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

STRANGER = "ejkernel"
OURS = (
    "ejk-types",
    "ejk-ops",
    "ejk-kernels-xla",
    "ejk-kernels-pallas",
    "ejk-kernels-triton",
    "ejk-modules",
)


def installed(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def ours() -> dict[str, metadata.Distribution]:
    """Returns our distributions that are installed here."""
    distributions = {name: installed(name) for name in OURS}
    return {name: distribution for name, distribution in distributions.items() if distribution}


def strangers() -> list[str]:
    """Returns what is installed here that is not ours, judged by names alone."""
    problems: list[str] = []
    other = installed(STRANGER)
    if other is not None:
        problems.append(
            f"the distribution {STRANGER} {other.version} is another project, whose files lie in "
            "the folder of ours"
        )
    problems += [f"{init} is not ours and hides parts of the namespace" for init in regular()]
    return problems


def regular(*folders: str) -> list[Path]:
    """Returns files in ``folders`` and on the path that make the namespace a regular package."""
    names = ("ejkernel/__init__.py", "ejkernel/kernels/__init__.py")
    paths = [Path(entry) / name for entry in dict.fromkeys([*folders, *sys.path]) for name in names]
    return [path for path in paths if path.is_file()]


def damaged(*, contents: bool) -> list[str]:
    """Returns our files that are missing and, with ``contents``, those that were changed.

    Looking whether all of them exist takes milliseconds, so every command does.
    """
    problems = []
    for name, distribution in ours().items():
        missing, changed = [], []
        for file, mode, value in _recorded(distribution):
            path = Path(str(distribution.locate_file(file)))
            if not path.is_file():
                missing.append(file)
            elif contents and _digest(path, mode) != value:
                changed.append(file)
        for fault, files in (("missing", missing), ("overwritten", changed)):
            if files:
                others = f" and {len(files) - 1} more" if len(files) > 1 else ""
                problems.append(f"{name}: {files[0]}{others} {fault}")
    return problems


def _recorded(distribution: metadata.Distribution) -> Iterator[tuple[str, str, str]]:
    """Yields (file, hash function, hash) of every Python file that was installed.

    Reads RECORD itself: since Python 3.12 ``Distribution.files`` leaves out missing files.
    """
    for file, hashed, *_ in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        mode, _, value = hashed.partition("=")
        if file.endswith(".py") and value:
            yield file, mode, value


def _digest(path: Path, mode: str) -> str:
    digest = hashlib.new(mode, path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def repair() -> str:
    """Returns the line that removes both and installs ours again, from where it came."""
    sources = []
    for name, distribution in ours().items():
        url = json.loads(distribution.read_text("direct_url.json") or "{}").get("url", "")
        local = url2pathname(urlsplit(url).path) if url.startswith("file:") else url
        sources.append(local or f"{name}=={distribution.version}")
    pip = shlex.join([sys.executable, "-m", "pip"])
    names = " ".join([STRANGER, *ours()])
    sites = {Path(str(distribution.locate_file("."))).resolve() for distribution in ours().values()}
    unowned = [str(path) for path in regular() if sites & set(path.resolve().parents)]
    steps = [
        f"{pip} uninstall -y {names}",
        *([f"rm -f {shlex.join(unowned)}"] if unowned else []),
        f"{pip} install --no-deps {shlex.join(sources)}",
    ]
    return " && ".join(steps)


def main() -> int:
    is_doctor = "doctor" in sys.argv[1:]
    problems = strangers() + damaged(contents=is_doctor)
    if not problems:
        try:
            from ejkernel.modules.cli import command
        except ImportError as error:
            problems = damaged(contents=True) or [f"ejkernel cannot be imported: {error}"]
        else:
            return command()
    if "--json" in sys.argv:
        checks = [
            {"group": "installation", "what": "namespace", "status": "fail", "found": problem}
            | {"fix": repair()}
            for problem in problems
        ]
        error = f"ejkernel cannot be used here: {'; '.join(problems)}"
        report = {"error": error, "usable": False, "device": {}, "checks": checks}
        print(json.dumps({**report, "operations": []}))
    else:
        out = sys.stdout if is_doctor else sys.stderr
        text = ["ejkernel cannot be used here:", *(f"  {problem}" for problem in problems)]
        print("\n".join([*text, "This repairs it:", f"  {repair()}"]), file=out)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
