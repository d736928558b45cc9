"""A GPT in Flax NNX, trained on packed documents of real text and sampled by a cache.

    python docs/examples/gpt_flax.py                 # two minutes on two cores
    python docs/examples/gpt_flax.py --steps 1000 --prompt "The with statement "

Bytes of Python's help topics are learnt, cut into documents of all lengths. Documents stand one
after the other in rows, each byte with the id of its document: ``MaskInfo.from_segments`` hides
other documents and the padding, and ``flash_attention`` skips the tiles that hold nothing else.
Positions begin again with each document, and the last byte of one does not learn the first byte of
the next.

Sampling keeps the keys and values of every layer, ``[texts, length, heads, head_dim]``, and takes
one byte of every text at a time: ``ragged_decode_attention`` reads the keys there are so far. The
loop is one compiled ``scan``, in which the caches stay where they are. Its logits are those of the
full forward pass over the finished text, which the program checks.

Needs flax, which brings optax; matplotlib, if it is there, draws the picture.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import sys
from dataclasses import dataclass
from functools import partial
from pydoc_data import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import (
    FlashAttention,
    flash_attention,
    get_default_executor,
    ragged_decode_attention,
)
from ejkernel.types import MaskInfo

try:
    import optax
    from flax import nnx
except ImportError:
    sys.exit("gpt_flax.py needs flax: pip install flax")

Cache = list[tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class Size:
    """Sizes of the model; ``length``: the most bytes that it sees."""

    layers: int = 3
    heads: int = 4
    head_dim: int = 32
    length: int = 256

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotates pairs of channels by their position (Su et al. 2021, arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None] * 1000.0 ** (-jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nnx.Module):
    """Attention and a network, each on the normed stream and added to it."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        width, linear = size.width, partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.head_dim = size.head_dim
        self.norm1, self.norm2 = (nnx.RMSNorm(width, rngs=rngs) for _ in range(2))
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def project(self, x: jax.Array, positions: jax.Array) -> list[jax.Array]:
        """Queries, keys and values ``[batch, tokens, heads, head_dim]``, the first two rotated."""
        qkv = self.qkv(self.norm1(x)).reshape(*x.shape[:2], -1, self.head_dim)
        q, k, v = jnp.split(qkv, 3, 2)
        return [rotate(q, positions), rotate(k, positions), v]

    def finish(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    def __call__(self, x: jax.Array, positions: jax.Array, mask: MaskInfo) -> jax.Array:
        return self.finish(x, flash_attention(*self.project(x, positions), mask_info=mask))

    def step(self, x: jax.Array, keys: jax.Array, values: jax.Array, position: jax.Array):
        """The output for one token a text ``[texts, 1, width]``, and the cache with it."""
        q, k, v = self.project(x, position[None, None])
        keys, values = (
            jax.lax.dynamic_update_slice(cache, new, (0, position, 0, 0))
            for cache, new in ((keys, k), (values, v))
        )
        begin = jnp.zeros(x.shape[0], jnp.int32)
        end = jnp.full(x.shape[0], position + 1)
        return self.finish(x, ragged_decode_attention(q, keys, values, begin, end)), (keys, values)


class GPT(nnx.Module):
    """A decoder over bytes; the embedding is the output matrix too."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        self.size = size
        small = nnx.initializers.normal(0.02)
        self.bytes = nnx.Embed(256, size.width, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List([Block(size, rngs) for _ in range(size.layers)])
        self.norm = nnx.RMSNorm(size.width, rngs=rngs)

    def __call__(self, tokens: jax.Array, ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Logits ``[batch, tokens, 256]``; ids of documents, below 0 for padding."""
        mask = MaskInfo.from_segments(ids).apply_causal()
        x = self.bytes(tokens)
        for block in self.blocks:
            x = block(x, positions, mask)
        return self.bytes.attend(self.norm(x))

    def step(self, cache: Cache, token: jax.Array, position: jax.Array) -> tuple[jax.Array, Cache]:
        """Logits ``[texts, 256]`` after one byte a text ``[texts]``, and the cache with it."""
        x = self.bytes(token)[:, None]
        new = []
        for block, (keys, values) in zip(self.blocks, cache, strict=True):
            x, pair = block.step(x, keys, values, position)
            new.append(pair)
        return self.bytes.attend(self.norm(x))[:, 0], new

    def empty_cache(self, texts: int) -> Cache:
        size = self.size
        shape = (texts, size.length, size.heads, size.head_dim)
        return [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(size.layers)]


def documents(longest: int) -> list[bytes]:
    """Python's help topics, cut at blank lines into documents of 32 to ``longest`` bytes."""
    pieces, piece = [], b""
    for name in sorted(topics.topics):
        for paragraph in topics.topics[name].encode("ascii", "replace").split(b"\n\n"):
            if len(piece) + len(paragraph) > longest // 2:
                pieces.append(piece[:longest])
                piece = b""
            piece += paragraph + b"\n\n"
        pieces.append(piece[:longest])
        piece = b""
    return [piece for piece in pieces if len(piece) >= 32]


def pack(pieces: list[bytes], length: int) -> tuple[np.ndarray, ...]:
    """Rows ``[rows, length]`` of bytes, of document ids (-1: padding) and of positions."""
    rows: list[list[bytes]] = [[]]
    for i in np.random.default_rng(0).permutation(len(pieces)):
        if sum(map(len, rows[-1])) + len(pieces[i]) > length:
            rows.append([])
        rows[-1].append(pieces[i])
    tokens, positions = np.zeros((2, len(rows), length), np.int32)
    ids = np.full_like(tokens, -1)
    for r, row in enumerate(rows):
        first = 0
        for i, piece in enumerate(row):
            span = slice(first, first + len(piece))
            tokens[r, span] = np.frombuffer(piece, np.uint8)
            ids[r, span], positions[r, span] = i, np.arange(len(piece))
            first += len(piece)
    return tokens, ids, positions


def loss_of(model: GPT, tokens: jax.Array, ids: jax.Array, positions: jax.Array) -> jax.Array:
    """Mean bits of a byte after those before it in its document."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(tokens, ids, positions)[:, :-1], tokens[:, 1:]
    )
    counts = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
    return jnp.sum(losses * counts) / jnp.sum(counts) / jnp.log(2.0)


@nnx.jit
def learn(model: GPT, optimizer: nnx.Optimizer, *rows: jax.Array) -> jax.Array:
    """Takes one step, in the model and the optimizer; returns the loss before it."""
    value, gradients = nnx.value_and_grad(loss_of)(model, *rows)
    optimizer.update(model, gradients)
    return value


@partial(jax.jit, static_argnames=("graph", "count"), donate_argnames="cache")
def sample(graph: Any, state: Any, cache: Cache, prompt: jax.Array, count: int, key: jax.Array):
    """``prompt [texts, n]`` with ``count`` bytes drawn after it, the logits on the way, the cache.

    ``graph`` and ``state`` are a model taken apart by ``nnx.split``.
    """
    prompt_length = prompt.shape[1]

    def step(carry, position):
        cache, token = carry
        logits, cache = nnx.merge(graph, state).step(cache, token, position)
        drawn = jax.random.categorical(jax.random.fold_in(key, position), logits / 0.8)
        ahead = prompt[:, jnp.minimum(position + 1, prompt_length - 1)]
        token = jnp.where(position + 1 < prompt_length, ahead, drawn)
        return (cache, token), (token, logits)

    positions = jnp.arange(prompt_length + count - 1)
    (cache, _), (tokens, logits) = jax.lax.scan(step, (cache, prompt[:, 0]), positions)
    texts = jnp.concatenate([prompt[:, :1], tokens.T], 1)
    return texts, jnp.moveaxis(logits, 0, 1), cache


def draw(history: list[float], ids: np.ndarray, path: str) -> None:
    """The losses, and who sees whom in one packed row."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    left.plot(history)
    left.set(xlabel="step", ylabel="bits a byte", title="Training on Python's help topics")
    left.grid(alpha=0.3)
    mask = MaskInfo.from_segments(ids[None]).apply_causal()
    right.imshow(np.asarray(mask.get_or_compute_attention_mask())[0, 0], "Blues", vmax=1.3)
    right.set(xlabel="key", ylabel="query", title="A packed row: causal in each document")
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


def main(
    steps: int = 300,
    batch: int = 8,
    prompt: str = "The for statement ",
    picture: str = "gpt_flax.png",
    size: Size | None = None,
) -> tuple[GPT, list[float]]:
    """Train, then continue a text; returns the model and the bits a byte of every step."""
    size = size or Size()
    model = GPT(size, nnx.Rngs(0))
    rate = optax.warmup_cosine_decay_schedule(0.0, 4e-3, min(20, steps // 4 + 1), steps + 1)
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)
    data = pack(documents(size.length), size.length)
    print(
        f"text: {(data[1] >= 0).sum():,} bytes in {len(data[0])} rows of {size.length}, "
        f"{(data[1] >= 0).mean():.0%} filled"
    )
    heads = jax.ShapeDtypeStruct((batch, size.length, size.heads, size.head_dim), jnp.float32)
    mask = MaskInfo.from_segments(jnp.asarray(data[1][:batch])).apply_causal()
    ran = get_default_executor().explanation(FlashAttention(), heads, heads, heads, mask_info=mask)
    print(f"attention: {ran.implementation}, {ran.tier}, on {ran.device}")

    rng, history = np.random.default_rng(0), []
    for i in range(steps):
        rows = rng.choice(len(data[0]), min(batch, len(data[0])), replace=False)
        history.append(float(learn(model, optimizer, *(x[rows] for x in data))))
        if i % max(steps // 10, 1) == 0 or i == steps - 1:
            print(f"step {i:4d}  {history[-1]:.3f} bits a byte")

    start = np.frombuffer(prompt.encode("ascii", "replace"), np.uint8).astype(np.int32)
    graph, state = nnx.split(model)
    start, count = np.tile(start, (3, 1)), size.length - len(start)
    texts, logits, _ = sample(graph, state, model.empty_cache(3), start, count, jax.random.key(1))
    for text in np.asarray(texts, np.uint8):
        print(repr(text.tobytes().decode("ascii", "replace")))
    full = model(texts, jnp.zeros_like(texts), jnp.arange(texts.shape[1])[None])[:, :-1]
    print(f"cache against the full forward pass: logits differ by {abs(logits - full).max():.1e}")
    draw(history, data[1][np.argmax(data[1].max(1))], picture)
    return model, history


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"given {text}, expected a number >= 1")
    return int(text)


def png(text: str) -> str:
    if not text.endswith(".png") or not pathlib.Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"given {text}, expected a .png in a folder that exists")
    return text


def prompt_of(text: str) -> str:
    if not 0 < len(text) < Size.length:
        raise argparse.ArgumentTypeError(
            f"given {len(text)} characters, expected 1 to {Size.length - 1}"
        )
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--batch", type=positive, default=8, help="rows of a step")
    parser.add_argument("--prompt", type=prompt_of, default="The for statement ")
    parser.add_argument("--picture", type=png, default="gpt_flax.png", help="file to draw to")
    try:
        main(**vars(parser.parse_args()))
    except KeyboardInterrupt:
        print("gpt_flax.py: stopped", file=sys.stderr)
        sys.exit(130)
