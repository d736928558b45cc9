"""The ``ejk`` command: explains, times and tunes calls on this machine.

Starting it imports no JAX; each subcommand imports what it needs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``ejk`` on ``argv``, None = the process's words, and returns the exit status."""
    from ejkernel.modules.cli.app import run_cli

    return run_cli(argv)


def command() -> int:
    """Runs the ``ejk`` script: ``main``, and a process that ends at once after Ctrl-C."""
    from ejkernel.modules.cli.interrupt import leave

    try:
        status = main()
    except KeyboardInterrupt:  # before a command runs, while the modules of all are imported
        print("ejk: interrupted", file=sys.stderr)
        status = 130
    return leave(status)
