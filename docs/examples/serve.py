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

With ``--draft 4`` a request that is being answered has more rows: after its last token come the
four that followed where its last three tokens stood before (a draft by n-grams, without a second
model). One step checks them all: of the tokens that the model would have chosen after each row,
those count up to the first that differs from the draft (Leviathan et al. 2023, arXiv 2211.17192,
for greedy decoding). The answer is the same, in fewer steps; what was written for wrong tokens is
written over.

``--branches 2`` guesses more than one continuation, where the last three tokens were followed by
different ones: they are a tree, whose common beginnings are one node (Miao et al. 2024, SpecInfer,
arXiv 2305.09781). ``tree_mask`` shows each node its ancestors alone. Of an accepted branch the
cache keeps what lies in the order of the text; the rest are known tokens, which the next step
reads.

The model is a small transformer with random weights, answering bytes with bytes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import plan_ragged_attention, ragged_page_attention_v3


@dataclass(frozen=True)
class Size:
    """Sizes of the model; ``length``: the most tokens of a request."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    length: int = 256


def init(size: Size, key: jax.Array) -> dict:
    """Random weights of a transformer over bytes."""
    width, kv_width = (n * size.head_dim for n in (size.heads, size.kv_heads))
    shapes = {
        "q": (width, width), "k": (width, kv_width), "v": (width, kv_width), "o": (width, width),
        "up": (width, 4 * width), "down": (4 * width, width),
    }  # fmt: skip
    keys = iter(jax.random.split(key, 1 + len(shapes) * size.layers))

    def weights(shape):
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    blocks = [{name: weights(s) for name, s in shapes.items()} for _ in range(size.layers)]
    return {"embed": weights((256, width)), "blocks": blocks}


def normalize(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def rotate(x, positions):
    """Rotate pairs of channels of ``[rows, heads, head_dim]`` by their position."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1
    )


def transform(params, tokens, positions, attend, size: Size):
    """Logits ``[rows, 256]`` of rows of tokens; ``attend(layer, q, k, v)`` is the attention."""
    x = params["embed"][tokens]
    for layer, block in enumerate(params["blocks"]):
        h = normalize(x)
        q, k, v = (
            (h @ block[name]).reshape(len(tokens), -1, size.head_dim) for name in ("q", "k", "v")
        )
        o = attend(layer, rotate(q, positions), rotate(k, positions), v)
        x = x + o.reshape(len(tokens), -1) @ block["o"]
        x = x + jax.nn.gelu(normalize(x) @ block["up"]) @ block["down"]
    return normalize(x) @ params["embed"].T


@dataclass(frozen=True)
class Room:
    """The sizes of a server: rows and sequences of a step, pages of the cache and their size."""

    rows: int = 64
    sequences: int = 8
    pages: int = 48
    page: int = 16

    def __post_init__(self):
        if self.rows < self.sequences:
            minimum = f"at least one for each of {self.sequences} sequences"
            raise ValueError(f"{self.rows} rows, expected {minimum}")


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

    def draft(self, depth: int, branches: int, room: int, ngram: int = 3) -> list[tuple[int, int]]:
        """Returns guesses as a tree: a token and the number of its parent, -1 for the last token.

        A branch is up to ``depth`` tokens that came after the last ``ngram`` where these were
        before, the latest place first, and never more than the answer still has room for.
        There are at most ``room`` nodes.
        """
        depth = min(depth, self.end - len(self.tokens) - 1)
        tail, nodes, leaves = self.tokens[-ngram:], {}, 0
        for first in range(len(self.tokens) - ngram - 1, -1, -1):
            if depth < 1 or leaves == branches:
                break
            if self.tokens[first : first + ngram] != tail:
                continue
            before, node = len(nodes), -1
            for token in self.tokens[first + ngram :][:depth]:
                if (token, node) not in nodes and len(nodes) == room:
                    break
                node = nodes.setdefault((token, node), len(nodes))
            leaves += len(nodes) > before
        return list(nodes)


def empty_cache(size: Size, room: Room) -> list[jax.Array]:
    """Pages ``[P, page, 2 * kv_heads, head_dim]`` of every layer, heads as K0 V0 K1 V1 ..."""
    shape = (room.pages, room.page, 2 * size.kv_heads, size.head_dim)
    return [jnp.zeros(shape) for _ in range(size.layers)]


@partial(jax.jit, static_argnames="size", donate_argnums=1)
def step(params, cache, tokens, positions, lens, tables, starts, counts, size: Size, tree=None):
    """The byte after every row ``[rows]``, and the cache with this step's rows.

    ``tree [rows, rows]``: which of the new tokens of its request a row sees; None: those before it.
    """
    pages = list(cache)
    # which row belongs to which sequence is the same in every layer
    plan = plan_ragged_attention(lens, starts, counts[2], tokens=len(tokens))

    def attend(layer, q, k, v):
        o, pages[layer] = ragged_page_attention_v3(
            q, k, v, pages[layer], lens, tables, starts, counts, plan=plan, tree_mask=tree
        )
        return o

    return jnp.argmax(transform(params, tokens, positions, attend, size), -1), pages


class Server:
    """Requests waiting and running, and who holds which pages.

    ``draft``: the most tokens in a row that are guessed for a request in a step; 0: none.
    ``branches``: the most guesses for the same place.
    """

    def __init__(self, params, size: Size, room: Room, draft: int = 0, branches: int = 1):
        self.params, self.size, self.room = params, size, room
        self.draft, self.branches = draft, branches
        self.cache = empty_cache(size, room)
        self.free = list(range(room.pages))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first
        self.columns = -(-size.length // room.page)
        self.drafted = self.accepted = self.beside = 0

    def submit(self, prompt: bytes, answer: int) -> Request:
        """A request of ``answer`` bytes after ``prompt``."""
        end = len(prompt) + answer
        most = min(self.columns, self.room.pages) * self.room.page
        if not prompt or answer < 1 or end > most:
            raise ValueError(
                f"prompt of {len(prompt)} and answer of {answer} bytes, expected at least 1 each "
                f"and at most {most} together, with {self.room.pages} pages of {self.room.page}"
            )
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

    def plan(self) -> list[tuple[Request, list[int], list[int]]]:
        """Returns the requests of this step, their tokens and parent rows, single rows first."""
        while self.waiting and len(self.running) < self.room.sequences:
            self.running.append(self.waiting.popleft())
        # a row for everyone, then what is left to the oldest that still read or guess
        left, turns = self.room.rows - len(self.running), []
        for request in list(self.running):
            if request not in self.running:
                break  # gave its pages to an older one, and so did all behind it
            tokens = request.tokens[request.done :][: 1 + left]
            parents = [row - 1 for row in range(len(tokens))]
            done = request.done + len(tokens)
            if self.draft and done == len(request.tokens) and len(tokens) <= 1 + self.draft:
                # a guess takes no page from another request
                space = (len(request.pages) + len(self.free)) * self.room.page - done
                last, room = len(tokens) - 1, max(min(1 + left - len(tokens), space), 0)
                nodes = request.draft(self.draft, self.branches, room)
                tokens = tokens + [token for token, _ in nodes]
                parents += [last if parent < 0 else last + 1 + parent for _, parent in nodes]
            if not self.hold(request, request.done + len(tokens)):
                break
            turns.append((request, tokens, parents))
            left -= len(tokens) - 1
        return sorted(turns, key=lambda turn: len(turn[1]) > 1)

    def run(self) -> int:
        """One step; returns how many bytes were answered."""
        room, turns = self.room, self.plan()
        tokens = np.zeros(room.rows, np.int32)
        positions = np.zeros(room.rows, np.int32)
        lens = np.zeros(room.sequences, np.int32)
        tables = np.zeros((room.sequences, self.columns), np.int32)
        starts = np.zeros(room.sequences + 1, np.int32)
        tree = np.zeros((room.rows, room.rows), bool)
        for i, (request, given, parents) in enumerate(turns):
            first, count = starts[i], len(given)
            tokens[first : first + count] = given
            for row, parent in enumerate(parents):
                tree[first + row, row] = True
                positions[first + row] = request.done
                if row:
                    tree[first + row] |= tree[first + parent]
                    positions[first + row] = positions[first + parent] + 1
            lens[i] = request.done + count
            tables[i, : len(request.pages)] = request.pages
            starts[i + 1 :] = first + count
        ones = sum(len(given) == 1 for _, given, _ in turns)
        counts = np.array([ones, len(turns), len(turns)], np.int32)
        arrays = tokens, positions, lens, tables, starts, counts
        mask = tree if self.branches > 1 else None  # without branches rows are causal
        best, self.cache = step(self.params, self.cache, *arrays, self.size, mask)
        best, answered = np.asarray(best), 0
        for i, turn in enumerate(turns):
            answered += self.accept(*turn, best[starts[i] : starts[i + 1]])
        return answered

    def accept(
        self, request: Request, given: list[int], parents: list[int], best: np.ndarray
    ) -> int:
        """Takes the tokens that the model chose after those given; returns how many."""
        num_certain = len(request.tokens) - request.done  # of those given, the rest is a draft
        if len(given) < num_certain:
            request.done += len(given)
            return 0  # still reads
        children = {(parents[row], given[row]): row for row in range(num_certain, len(given))}
        path, row = [], num_certain - 1
        while (row := children.get((row, int(best[row])), -1)) >= 0:
            path.append(row)
        self.drafted += len(given) - num_certain
        self.accepted += len(path)
        in_place = sum(row == num_certain + i for i, row in enumerate(path))
        self.beside += len(path) - in_place
        request.done += num_certain + in_place
        request.tokens += [int(best[row]) for row in (num_certain - 1, *path)]
        if len(request.tokens) == request.end:
            self.running.remove(request)
            self.release(request)
        return len(path) + 1


def main(
    requests: int = 24, pages: int = Room.pages, draft: int = 0, branches: int = 1, seed: int = 0
) -> list[Request]:
    """Serve random prompts that arrive two a step; returns the requests as answered."""
    size, rng = Size(), np.random.default_rng(seed)
    room = Room(pages=pages)
    server = Server(init(size, jax.random.key(seed)), size, room, draft, branches)
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
    rate = answered / max(time.perf_counter() - began, 1e-9)
    print(f"{requests} requests in {steps} steps, {rate:.0f} bytes/s")
    if draft:
        print(
            f"drafts: {server.accepted} of {server.drafted} tokens accepted, {server.beside} of "
            "them of later branches"
        )
    print(f"compiled programs: {step._cache_size()}")
    return made


def at_least(least: int) -> Callable[[str], int]:
    """The reader of an option."""

    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"given {value}, expected at least {least}")
        return value

    read.__name__ = "whole number"  # in argparse's error for text that int() refuses
    return read


def command(arguments: list[str] | None = None) -> None:
    """Serves as the command line says; what cannot be served, and Ctrl-C, end in a sentence."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default, least, text in (
        ("requests", 24, 1, "that arrive, two a step"),
        ("pages", Room.pages, 1, "of 16 tokens each"),
        ("draft", 0, 0, "tokens guessed in a row a step"),
        ("branches", 1, 1, "guesses for one place"),
    ):
        parser.add_argument(f"--{name}", type=at_least(least), default=default, help=text)
    try:
        main(**vars(parser.parse_args(arguments)))
    except ValueError as error:
        sys.exit(f"serve.py: {error}")
    except KeyboardInterrupt:
        sys.exit("serve.py: stopped before all requests were answered")


if __name__ == "__main__":
    command()
