"""Plants faults in a copy of the sources and shows that the tests catch each one.

    python tools/mutations.py            # all of them, a few minutes
    python tools/mutations.py --only sign

A fault that survives is a hole in the tests: the exit status is 1 and the line says SURVIVED.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[1]
XLA = "ejk-kernels-xla/src/ejkernel/kernels/xla"
TYPES = "ejk-types/src/ejkernel/types"
XLA_TESTS = "packages/ejk-kernels-xla/tests"


@dataclass(frozen=True)
class Fault:
    """Replace ``old``, which must stand exactly once in ``file``, by ``new``; run ``tests``."""

    name: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = (
    Fault(
        "sign of the softmax derivative", f"{XLA}/_common/blockwise.py",
        "ds = p * (dp - blk.take_block", "ds = p * (dp + blk.take_block",
        f"{XLA_TESTS}/test_flash_attention.py",
    ),
    Fault(
        "causal mask one key too wide", f"{TYPES}/rules.py",
        "return _clamp(self.offset)\n", "return _clamp(self.offset + 1)\n",
        f"{XLA_TESTS}/test_flash_attention.py",
    ),
    Fault(
        "window one key too narrow on the left", f"{TYPES}/rules.py",
        "_clamp(self.offset - self.window[0])", "_clamp(self.offset - self.window[0] + 1)",
        f"{XLA_TESTS}/test_flash_attention.py",
    ),
    Fault(
        "sinks left out of the sum", f"{XLA}/_common/softmax.py",
        "jnp.exp2(key + rows.l2) + jnp.exp2(sink) * weight", "jnp.exp2(key + rows.l2)",
        f"{XLA_TESTS}/test_flash_attention.py",
    ),
    Fault(
        "dropout without rescaling", f"{XLA}/_common/blockwise.py",
        "return 1.0 / (1.0 - self.spec.dropout_prob)", "return 1.0",
        f"{XLA_TESTS}/test_flash_attention.py",
    ),
    Fault(
        "another dropout hash", f"{XLA}/_common/dropout.py", "0xC2B2AE35", "0xC2B2AE37",
        f"{XLA_TESTS}/test_dropout.py",
    ),
    Fault(
        "the page before the right one", f"{XLA}/_paged/layouts.py",
        "return jnp.clip(tables[sequence[:, None], column], 0, self.num_pages - 1)",
        "return jnp.clip(tables[sequence[:, None], column] - 1, 0, self.num_pages - 1)",
        f"{XLA_TESTS}/test_paged.py",
    ),
    Fault(
        "unseen memory is read into the result", f"{XLA}/_paged/core.py",
        "used = jnp.any(seen, axis=1)[:, :, None, None]",
        "used = jnp.ones_like(jnp.any(seen, axis=1))[:, :, None, None]",
        f"{XLA_TESTS}/test_paged.py",
    ),
    Fault(
        "decode rows one position too far", f"{XLA}/page_attention/implementation.py",
        "lens[:, None] - 1, ", "lens[:, None], ", f"{XLA_TESTS}/test_paged.py",
    ),
    Fault(
        "value gate forgotten", f"{XLA}/_linear/chunk.py",
        "return o + _times_exp(q @ start, value and value.since)", "return o + q @ start",
        f"{XLA_TESTS}/test_linear_attention.py",
    ),
    Fault(
        "selection ignores the own block", f"{XLA}/native_sparse_attention/select.py",
        "return jnp.where(own[None, :, None], jnp.inf, score)", "return score",
        f"{XLA_TESTS}/test_native_sparse.py",
    ),
    Fault(
        "compressed blocks seen one token early", f"{XLA}/native_sparse_attention/blocks.py",
        "return (self.block + 1) * self.size\n", "return (self.block + 1) * self.size - 1\n",
        f"{XLA_TESTS}/test_native_sparse.py",
    ),
)  # fmt: skip


def plant(fault: Fault, folder: pathlib.Path) -> None:
    """A copy of the distribution's sources with the fault in it."""
    package = fault.file.split("/")[0]
    shutil.copytree(ROOT / "packages" / package / "src", folder, dirs_exist_ok=True)
    path = folder / fault.file.split("/src/")[1]
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.name}: {fault.file} holds {fault.old!r} {text.count(fault.old)}x")
    path.write_text(text.replace(fault.old, fault.new))


def caught(fault: Fault) -> tuple[bool, float, str]:
    """Whether the tests fail with the fault planted; seconds; the first failing test."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        plant(fault, pathlib.Path(folder))
        # the copy comes first on the path, so its part of the namespace hides the real one
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", fault.tests],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        )  # fmt: skip
    failing = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    # 1 = tests failed; anything else means that they did not run as they should
    if run.returncode not in (0, 1):
        raise SystemExit(f"{fault.name}: pytest ended with {run.returncode}\n{run.stdout[-2000:]}")
    first = failing[0].split(" - ")[0].removeprefix("FAILED ") if failing else ""
    return run.returncode == 1, time.perf_counter() - start, first


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mutations", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of a fault's name")
    args = parser.parse_args(argv)
    chosen = [f for f in FAULTS if args.only in f.name]
    if not chosen:
        print(f"no fault has {args.only!r} in its name; there are:", file=sys.stderr)
        print("\n".join(f"  {f.name}" for f in FAULTS), file=sys.stderr)
        return 2
    survived = 0
    for fault in chosen:
        found, seconds, test = caught(fault)
        survived += not found
        print(
            f"{'caught  ' if found else 'SURVIVED'} {seconds:5.0f} s  {fault.name}  {test}",
            flush=True,
        )
    print(f"{len(chosen) - survived} of {len(chosen)} faults caught")
    return 1 if survived else 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
