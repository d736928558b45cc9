"""The ejk command on a GPU: each subcommand once, and the two clocks of short kernels compared.

    python tools/gpu/check_cli.py [FOLDER]      under two minutes; exit status 1 when anything fails

Leaves the JSON of every step and the report's page in FOLDER (default $OUT, else ./cli-out).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import sys
import time

from ejkernel.modules.cli import main

LIGHT = ["--rounds", "3", "--target-s", "0.03"]
SHORT = ["b=1", "c=2k", "h=32", "hk=8", "d=128"]
STEPS = {
    "doctor": ["doctor"],
    "explain": ["explain", "flash_attention", "--shapes"],
    "bench": ["bench", "flash_attention", "--shape", "llama3-8b-4k", "--modes", "fwd", *LIGHT],
    "bench-short": ["bench", "page_attention", *SHORT, *LIGHT],
    "tune": ["tune", "flash_attention", "b=2", "s=2k", "h=16", "d=128", "causal=true", "--force",
             "--budget", "20"],
    "cache": ["cache", "show"],
}  # fmt: skip


def asked(words: list[str]) -> tuple[int, object]:
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        status = main([*words, "--json"])
    return status, json.loads(told.getvalue())


def summary(name: str, found) -> str:
    """The one line that matters of a step."""
    if name == "doctor":
        bad = [f"{c['what']}: {c['found']}" for c in found["checks"] if c["status"] == "fail"]
        chosen = {r["operation"]: r["chosen"] for r in found["operations"]}
        native = sum(p != "xla" for p in chosen.values())
        return "; ".join(bad) or f"usable, {native} of {len(chosen)} operations have own kernels"
    if name == "explain":
        return ", ".join(sorted({f"{a['platform']} from {a['tier']}" for a in found}))
    if name.startswith("bench"):
        rows = [r for r in found["rows"] if r["ms"] is not None]
        return "  ".join(
            f"{r['contender']} {r['ms']:.4f} ms {r['percent_of_limit']:.0f}% ({r['clock']})"
            for r in rows
        )
    if name == "tune":
        return "  ".join(
            f"{r['heuristic_ms']:.3f} -> {r['best_ms']:.3f} ms in {r['seconds']:.0f} s, "
            f"{r['timed']}/{r['candidates']} timed"
            for r in found["tuned"]
        )
    return f"{len(found)} configs"


def wrong(name: str, status: int, found) -> str:
    """What is not as it should be; empty when all is."""
    if status != 0:
        return f"exit status {status}"
    if name == "bench-short" and any(r["clock"] != "device" for r in found["rows"] if r["ms"]):
        return "short kernels were timed from the host: CUPTI did not answer"
    if name == "tune" and not found["tuned"]:
        return "nothing was tuned"
    if name == "cache" and not found:
        return "the tuned config is not in the cache"
    return ""


def check(folder: pathlib.Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["EJKERNEL_CACHE_DIR"] = str(folder / "cache")
    failed = 0
    for name, words in STEPS.items():
        start = time.perf_counter()
        status, found = asked(words)
        (folder / f"{name}.json").write_text(json.dumps(found, indent=1))
        problem = wrong(name, status, found)
        failed += bool(problem)
        mark = f"FAILED {problem}" if problem else "ok"
        print(f"{name:12} {time.perf_counter() - start:6.1f} s  {mark}  {summary(name, found)}")
    status = main(["report", "--out", str(folder / "report.html")])
    return int(bool(failed or status))


if __name__ == "__main__":
    default = os.environ.get("OUT", "cli-out")
    raise SystemExit(check(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else default)))
