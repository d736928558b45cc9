"""Seconds that ``import ejkernel.modules`` adds to ``import jax``, each in a new process."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from bench import report


def _seconds(statement: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main(args: argparse.Namespace) -> int:
    statements = {"jax": "import jax, jax.numpy", "ejkernel": "import jax, ejkernel.modules"}
    samples: dict[str, list[float]] = {name: [] for name in statements}
    for _ in range(args.rounds):
        for name, statement in statements.items():
            samples[name].append(_seconds(statement))
    seconds = {name: statistics.median(values) for name, values in samples.items()}
    seconds["more"] = seconds["ejkernel"] - seconds["jax"]
    report.write_json(args.out, "imports", seconds)
    for name, value in seconds.items():
        print(f"{name}: {value:.3f} s")
    return 0
