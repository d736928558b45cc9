"""A small language model on real text, from packed training to cached decoding.

It reads the help texts that ship with Python, packs them into rows whose documents cannot see each
other, trains a byte-level transformer on them with ``flash_attention``, generates text with a
key/value cache, checks that decoding gives the logits of the full forward pass, and says which
kernel ran for every call and why.
"""

from __future__ import annotations

import argparse
import sys

from ejkernel.modules.cli.app import at_least_one
from ejkernel.modules.cli.interrupt import Interrupts, leave


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="demo", description=__doc__.splitlines()[0])
    p.add_argument("--steps", type=at_least_one, default=120, help="training steps")
    p.add_argument("--tokens", type=at_least_one, default=160, help="bytes to generate")
    p.add_argument("--prompt", default="The for statement ", help="text to continue")
    p.add_argument("--out", default="demo-out", help="folder for the pictures")
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with Interrupts() as interrupts:
        try:
            from demo_lm.run import train_and_decode

            return train_and_decode(args)
        except (KeyboardInterrupt, Exception):
            if not interrupts.seen:
                raise
            print("\nstopped", file=sys.stderr)
            return 130


if __name__ == "__main__":
    raise SystemExit(leave(main()))
