"""Runs three type checkers on a user's code: ``user_script.py``, READMEs and pages of the site.

The files are copied into a folder outside the repository and checked from there, so that the
checkers find the packages as they are installed. Run inside the environment:
``python3 tools/dev.py run user-types``; an argument names one checker.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "packages/*/README.md",
    "docs/*.md",
    "docs/guides/*.md",
    "docs/operations/*.md",
)
PARTS_OF_FILES = ("docs/writing-a-kernel.md",)
"""Pages whose blocks are parts of the files of a package, which is checked itself."""
SCRIPTS = (
    "tools/tests/user_script.py",
    *sorted(
        name
        for pattern in PAGES
        for page in ROOT.glob(pattern)
        if (name := str(page.relative_to(ROOT))) not in PARTS_OF_FILES
    ),
)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

CHECKERS = {
    "mypy": [sys.executable, "-m", "mypy", "--cache-dir", os.devnull],
    "ty": [sys.executable, "-m", "ty", "check", "--python", sys.prefix],
    "pyright": [
        *(sys.executable, "-m", "basedpyright"),
        *("--level", "error", "--pythonpath", sys.executable),
    ],
}


def script(path: Path) -> str:
    """A file's Python: all of it, or the examples of a document one after the other."""
    text = path.read_text()
    return "\n".join(BLOCK.findall(text)) if path.suffix == ".md" else text


def complaints(checker: str, folder: Path) -> str:
    """Returns a checker's errors in the scripts, "" if there are none."""
    files = []
    for name in SCRIPTS:
        files.append(folder / (re.sub(r"\W", "_", name.rpartition(".")[0]) + ".py"))
        files[-1].write_text(script(ROOT / name))
    command = [*CHECKERS[checker], *map(str, files)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.stdout + done.stderr if done.returncode else ""


def main(argv: list[str] | None = None) -> int:
    failed = False
    for checker in (sys.argv[1:] if argv is None else argv) or CHECKERS:
        with tempfile.TemporaryDirectory(prefix="ejkernel-types-") as folder:
            report = complaints(checker, Path(folder))
        print(report if report else f"{checker}: nothing to complain about")
        failed = failed or bool(report)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
