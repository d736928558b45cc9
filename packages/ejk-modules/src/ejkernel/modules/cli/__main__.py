"""``python -m ejkernel.modules.cli``: the ``ejk`` command where no script was installed."""

from ejkernel.modules.cli import command

if __name__ == "__main__":
    raise SystemExit(command())
