"""A small language model on real text, from packed training to cached decoding.

It reads the help texts that ship with Python, packs them into rows whose documents cannot see each
other, trains a byte-level transformer on them with ``flash_attention``, generates text with a
key/value cache, checks that decoding gives the logits of the full forward pass, and says which
kernel ran for every call and why. ``--op NAME`` shows one operation on a few bytes of text instead.
"""

from __future__ import annotations

import argparse
import os
import sys

from demo_lm.single import SHOWN
from ejkernel.modules.cli.app import at_least_one
from ejkernel.modules.cli.interrupt import Interrupts, leave


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="demo", description=__doc__.splitlines()[0])
    p.add_argument("--steps", type=at_least_one, default=120, help="training steps")
    p.add_argument("--tokens", type=at_least_one, default=160, help="bytes to generate")
    p.add_argument("--prompt", default="The for statement ", help="text to continue")
    p.add_argument("--out", default="demo-out", help="folder for the pictures")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--op", metavar="NAME", choices=SHOWN, help="show one operation instead")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.op == "ring_attention":
        # virtual devices, so that there is a ring to see; read when jax is imported
        os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    with Interrupts() as interrupts:
        try:
            return _run(args)
        except (KeyboardInterrupt, Exception):
            if not interrupts.seen:
                raise
            print("\nstopped", file=sys.stderr)
            return 130


def _run(args: argparse.Namespace) -> int:
    if args.op:
        from demo_lm.single import show

        show(args.op)
        return 0
    from demo_lm.run import run

    return run(args)


if __name__ == "__main__":
    raise SystemExit(leave(main()))
