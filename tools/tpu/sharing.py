"""Compile attention over a sequence on four TPUs, and see which communication kernels hide.

python tools/tpu/sharing.py --chips v5e v6e        # needs libtpu, no TPU

The compiler starts a transfer and waits for it at two places of a program. A transfer is hidden
where a kernel, or a loop or branch that holds one, runs between the two. Exit status 1 if the keys
of a ring travel while nothing is computed.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from tools.tpu import chips  # noqa: E402

from ejktest.transfers import trace_shared, transfers  # noqa: E402

SENDING_FORM = "ring_remote_copy", "zigzag"
FORMS = (
    ("ring", "zigzag"), ("ring", "contiguous"), ("all_gather", "zigzag"), ("ulysses", "contiguous"),
    SENDING_FORM,
)  # fmt: skip
SENDING = re.compile(r"%ejkernel_flash_fwd_send[.\d]* = .*custom-call\(")
DEVICES = 4


def compile_on(devices: Any, form: tuple[str, str], *, backward: bool, tokens: int = 16384) -> Any:
    """Compiles one form of ring attention, causal, for some TPUs."""
    from ejkernel.kernels.pallas.tpu.flash_attention.implementation import ring_attention

    with chips.targeting(devices[0]):
        traced = trace_shared(ring_attention, devices, form, (1, tokens, 8, 128), backward=backward)
        return traced.lower(lowering_platforms=("tpu",)).compile()


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--chips", nargs="+", default=["v5e", "v6e"], choices=chips.TOPOLOGIES)
    p.add_argument("--tokens", type=int, default=16384)
    args = p.parse_args(argv)
    chips.prepare_environment()
    exposed = 0
    for chip in args.chips:
        devices = chips.devices(chip)[:DEVICES]
        for form in FORMS:
            for backward in (False, True):
                program = compile_on(devices, form, backward=backward, tokens=args.tokens).as_text()
                sent = list(transfers(program))
                hidden = sum(transfer.kernels > 0 for transfer in sent)
                label = f"{chip:<6} {' '.join(form):<20} {'both' if backward else 'forward':<8}"
                text = f"{label} {len(sent)} transfers, a kernel runs during {hidden}"
                kernels = len(SENDING.findall(program))
                print(text + (f"; {kernels} kernels send" if kernels else ""), flush=True)
                # at the end the gradients of two arrays go home, with nothing left to compute
                last = 2 if backward else 0
                exposed += form[0] == "ring" and len(sent) - hidden > last
    return 1 if exposed else 0


if __name__ == "__main__":
    raise SystemExit(main())
