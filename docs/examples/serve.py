"""A server's loop: requests arrive and end while one compiled program runs.

    python docs/examples/serve.py                 # a few seconds on a CPU
    python docs/examples/serve.py --requests 64 --pages 96

Continuous batching (Yu et al. 2022, "Orca") over pages (Kwon et al. 2023, "PagedAttention",
arXiv 2309.06180). A step has room for ``Room.rows`` tokens of up to ``Room.sequences`` requests:
a row for each that is being answered, and as much of the prompts still to be read as fits.
``ragged_page_attention_v3`` writes the rows' keys and values into pages and
attends to them, whatever the mix; shapes never change, so nothing is compiled again. The cache is
donated and stays where it is.

A request takes a page when its last one is full and gives all of them back when it ends. When no
page is free, the youngest request gives up its own and waits: its tokens are read again later.

The model is that of ``tools/demo_lm`` with random weights, answering bytes with bytes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from demo_lm.model import Size, finish, init, logits_of, project
from ejkernel.modules import ragged_page_attention_v3


@dataclass(frozen=True)
class Room:
    """What a server has: rows and sequences of a step, pages of the cache and their size."""

    rows: int = 64
    sequences: int = 8
    pages: int = 48
    page: int = 16

    def __post_init__(self):
        if self.rows < self.sequences:
            each = f"at least one for each of {self.sequences} sequences"
            raise ValueError(f"{self.rows} rows, expected {each}")


@dataclass(eq=False)
class Request:
    """``tokens``: the prompt, then of the answer what there is; ``end``: of them in the end.

    ``done`` of them are in the cache, on ``pages``.
    """

    tokens: list[int]
    answer: int
    end: int
    done: int = 0
    pages: list[int] = field(default_factory=list)


def empty_cache(size: Size, room: Room) -> list[jax.Array]:
    """Pages ``[P, page, 2 * kv_heads, head_dim]`` of every layer, heads as K0 V0 K1 V1 ..."""
    shape = (room.pages, room.page, 2 * size.kv_heads, size.head_dim)
    return [jnp.zeros(shape) for _ in range(size.layers)]


@partial(jax.jit, static_argnames="size", donate_argnums=1)
def step(params, cache, tokens, positions, lens, tables, starts, counts, size: Size):
    """The next byte of every sequence ``[n]``, and the cache with this step's rows."""
    x = params["embed"][tokens][None]
    new = []
    for block, held in zip(params["blocks"], cache, strict=True):
        q, k, v = project(block, x, positions[None], size)
        o, held = ragged_page_attention_v3(q[0], k[0], v[0], held, lens, tables, starts, counts)
        x = finish(block, x, o[None])
        new.append(held)
    last = jnp.maximum(starts[1:] - 1, 0)
    return jnp.argmax(logits_of(params, x[:, last])[0], -1), new


class Server:
    """Requests waiting and running, and who holds which pages."""

    def __init__(self, params, size: Size, room: Room):
        self.params, self.size, self.room = params, size, room
        self.cache = empty_cache(size, room)
        self.free = list(range(room.pages))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first
        self.columns = -(-size.length // room.page)

    def submit(self, prompt: bytes, answer: int) -> Request:
        """A request of ``answer`` bytes after ``prompt``."""
        end = len(prompt) + answer
        most = min(self.columns, self.room.pages) * self.room.page
        if not prompt or answer < 1 or end > most:
            given = f"prompt of {len(prompt)} and answer of {answer} bytes"
            raise ValueError(f"{given}, expected at least 1 each and at most {most} together")
        request = Request(list(prompt), answer, end)
        self.waiting.append(request)
        return request

    @property
    def fill(self) -> float:
        """The part of the cache that is held."""
        return 1 - len(self.free) / self.room.pages

    def release(self, request: Request) -> None:
        self.free += request.pages
        request.pages, request.done = [], 0

    def hold(self, request: Request, tokens: int) -> bool:
        """Pages for ``tokens`` tokens, if need be of younger requests; False: there are none."""
        missing = -(-tokens // self.room.page) - len(request.pages)
        while missing > len(self.free):
            youngest = self.running[-1]
            if youngest is request:
                return False
            self.release(self.running.pop())
            self.waiting.appendleft(youngest)
        for _ in range(missing):
            request.pages.append(self.free.pop())
        return True

    def plan(self) -> list[tuple[Request, int]]:
        """Who has how many rows in this step, those with one row first."""
        while self.waiting and len(self.running) < self.room.sequences:
            self.running.append(self.waiting.popleft())
        # a row for everyone, then what is left to the oldest that still read
        left, turns = self.room.rows - len(self.running), []
        for request in list(self.running):
            if request not in self.running:
                break  # gave its pages to an older one, and so did all behind it
            more = min(len(request.tokens) - request.done - 1, left)
            if not self.hold(request, request.done + 1 + more):
                break
            turns.append((request, 1 + more))
            left -= more
        return sorted(turns, key=lambda turn: turn[1] > 1)

    def run(self) -> int:
        """One step; returns how many bytes were answered."""
        room, turns = self.room, self.plan()
        tokens = np.zeros(room.rows, np.int32)
        positions = np.zeros(room.rows, np.int32)
        lens = np.zeros(room.sequences, np.int32)
        tables = np.zeros((room.sequences, self.columns), np.int32)
        starts = np.zeros(room.sequences + 1, np.int32)
        for i, (request, n) in enumerate(turns):
            rows = slice(starts[i], starts[i] + n)
            tokens[rows] = request.tokens[request.done : request.done + n]
            positions[rows] = request.done + np.arange(n)
            request.done = lens[i] = request.done + n
            tables[i, : len(request.pages)] = request.pages
            starts[i + 1 :] = rows.stop
        ones = sum(n == 1 for _, n in turns)
        counts = np.array([ones, len(turns), len(turns)], np.int32)
        best, self.cache = step(
            self.params, self.cache, tokens, positions, lens, tables, starts, counts, self.size
        )
        answered = 0
        for (request, _), byte in zip(turns, np.asarray(best), strict=False):
            if request.done < len(request.tokens):
                continue  # still reads
            request.tokens.append(int(byte))
            answered += 1
            if len(request.tokens) == request.end:
                self.running.remove(request)
                self.release(request)
        return answered


def main(requests: int = 24, pages: int = Room.pages, seed: int = 0) -> list[Request]:
    """Serve random prompts that arrive two a step; returns the requests as answered."""
    size, rng = Size(layers=2, length=256), np.random.default_rng(seed)
    server = Server(init(size, jax.random.key(seed)), size, Room(pages=pages))
    made, answered, steps, began = [], 0, 0, 0.0
    while len(made) < requests or server.waiting or server.running:
        for _ in range(min(2, requests - len(made))):
            prompt = rng.integers(32, 127, rng.integers(8, 150), np.uint8).tobytes()
            made.append(server.submit(prompt, int(rng.integers(4, 60))))
        answered += server.run()
        if steps == 0:
            answered, began = 0, time.perf_counter()  # the first step compiled
        if steps % 20 == 0:
            rate = answered / max(time.perf_counter() - began, 1e-9)
            print(
                f"step {steps:4d}  running {len(server.running)}  waiting {len(server.waiting):2d}"
                f"  cache {server.fill:4.0%} full  {rate:7.0f} bytes/s"
            )
        steps += 1
    rate = answered / (time.perf_counter() - began)
    print(f"{requests} requests in {steps} steps, {rate:.0f} bytes/s")
    print(f"compiled programs: {step._cache_size()}")
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--pages", type=int, default=Room.pages)
    main(**vars(parser.parse_args()))
