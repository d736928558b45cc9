"""Files of the repository that scripts write: said to be out of date, or brought up to date."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(texts: Mapping[Path, str | None], about: str | None, argv: Sequence[str] | None) -> int:
    """Name the files that are not as texts, None being not there; ``--write`` makes them so."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="bring them up to date")
    write = parser.parse_args(argv).write
    stale = [
        path
        for path, text in texts.items()
        if (path.read_text() if path.is_file() else None) != text
    ]
    for path in stale:
        text = texts[path]
        if write and text is None:
            path.unlink()
        elif write:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text or "")
        print(f"{os.path.relpath(path, ROOT)}: {'written' if write else 'out of date'}")
    return int(bool(stale) and not write)
