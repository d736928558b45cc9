"""Progress messages of tuning."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Generator
from typing import Any

from ejkernel.ops import env

WIDTH = 24
SILENT_S = 2.0
"""Who waits longer for a call that tunes is told why."""


class Reporter:
    """One stderr line per candidate when ``EJKERNEL_LOG_AUTOTUNE=1``, a bar on a terminal."""

    def __init__(self, kernel: str, key: str, total: int):
        self.kernel = kernel
        self.key = key
        self.total = max(total, 1)
        self.done = 0
        self.best: float | None = None
        self.enabled = env.log_autotune()
        self.bar = self.enabled and bool(getattr(sys.stderr, "isatty", lambda: False)())

    @contextlib.contextmanager
    def announced(self, budget_s: float) -> Generator[None]:
        """Prints one line about a block that takes long, unless something was printed before."""
        text = (
            f"ejkernel: tuning {self.kernel} for this call: {self.total} candidates, about "
            f"{budget_s:.0f} s at most. {env.AUTOTUNE_POLICY}=heuristics turns it off, "
            f"{env.LOG_AUTOTUNE}=1 shows more.\n"
        )
        timer = threading.Timer(SILENT_S, self._write, [text])
        timer.daemon = True
        if not self.enabled:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def candidate(self, cfg: Any, ms: float | None, error: str | None) -> None:
        """Report one finished candidate."""
        self.done += 1
        if ms is not None:
            self.best = ms if self.best is None else min(ms, self.best)
        if not self.enabled:
            return
        outcome = f"{ms:.4f} ms" if ms is not None else f"skipped: {first_line(error)}"
        self._line(f"ejkernel autotune {self.kernel} {self.done}/{self.total} {outcome} {cfg!r}")
        self._draw()

    def finish(self, cfg: Any, ms: float | None, seconds: float) -> None:
        """Replace the bar by the outcome; a log has one line per candidate and no other."""
        if not self.bar:
            return
        time = "" if ms is None else f"{ms:.4f} ms "
        self._line(f"ejkernel autotune {self.kernel} best {time}{cfg!r} in {seconds:.1f} s")

    def note(self, text: str) -> None:
        """Prints an additional line."""
        if self.enabled:
            self._line(f"ejkernel autotune {self.kernel} {text}")

    def _line(self, text: str) -> None:
        clear = "\r\x1b[2K" if self.bar else ""
        self._write(clear + text + "\n")

    def _draw(self) -> None:
        if not self.bar or self.done >= self.total:
            return
        filled = WIDTH * self.done // self.total
        best = "" if self.best is None else f" best {self.best:.4f} ms"
        bar = "#" * filled + "." * (WIDTH - filled)
        self._write(f"\r{self.kernel} [{bar}] {self.done}/{self.total}{best}")

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):
            self.enabled = False  # a closed stderr must not fail the call


def first_line(text: str | None) -> str:
    """The first line of an error, at most 200 characters."""
    lines = (text or "").strip().splitlines()
    return lines[0][:200] if lines else ""
