"""A small hybrid model of gated-linear, delta-rule and windowed-attention layers, on real text.

    python docs/examples/hybrid.py                # half a minute on a CPU
    python docs/examples/hybrid.py --steps 600

Bytes of Python's help topics are learnt in rows, all tokens of a row at once. A gated-linear layer
keeps one state ``[key_dim, value_dim]`` a head, which forgets as its gates say
(``recurrent_attention``). A delta layer, as in Qwen3-Next, convolves its queries, keys and values
over the last tokens (``causal_conv1d``), replaces in its state what a key reads
(``gated_delta_rule``), and multiplies the normed output by a gate. The attention layer sees the
last ``WINDOW`` tokens and so keeps as many keys and values. Decoding takes one token, the states
and that window, whatever the length of the text: ``step`` gives the logits of ``forward`` token by
token. Donated, as ``generate`` does it, the states are updated where they lie.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pydoc_data import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import (
    causal_conv1d,
    flash_attention,
    gated_delta_rule,
    recurrent_attention,
)

WINDOW = 32  # tokens that the attention layer sees, the present one included
HEADS, DIM = 2, 16
WIDTH = HEADS * DIM
TAPS = 4  # of the convolution in a delta layer
LAYERS = ("linear", "delta", "attention", "delta")

Params = dict[str, Any]
State = list[Any]


def init(key: jax.Array) -> Params:
    def normal(*shape: int) -> jax.Array:
        nonlocal key
        key, now = jax.random.split(key)
        return jax.random.normal(now, shape) * shape[0] ** -0.5

    def block(kind: str) -> Params:
        params = {
            "qkv": normal(WIDTH, 3 * WIDTH),
            "gate": normal(WIDTH, HEADS),
            "out": normal(WIDTH, WIDTH),
            "up": normal(WIDTH, 4 * WIDTH),
            "down": normal(4 * WIDTH, WIDTH),
        }
        if kind == "delta":
            params |= {
                "taps": normal(TAPS, 3 * WIDTH).T,
                "beta": normal(WIDTH, HEADS),
                "output_gate": normal(WIDTH, WIDTH),
            }
        return params

    blocks = [block(kind) for kind in LAYERS]
    return {"bytes": normal(256, WIDTH) * 16, "blocks": blocks, "logits": normal(WIDTH, 256)}


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def project(block: Params, x: jax.Array) -> tuple[jax.Array, ...]:
    """Queries, keys, values ``[batch, tokens, HEADS, DIM]`` and log decays ``[..., HEADS]``."""
    y = norm(x)
    q, k, v = jnp.split((y @ block["qkv"]).reshape(*x.shape[:2], 3 * HEADS, DIM), 3, 2)
    return norm(q), norm(k), v, decays(block, y)


def decays(block: Params, y: jax.Array) -> jax.Array:
    """About 1 / 32 a token before training: a head remembers a sentence."""
    return jax.nn.log_sigmoid(y @ block["gate"] + 3.4)


def delta(block: Params, x: jax.Array, state: State | None = None) -> tuple[jax.Array, State]:
    """The output of a delta layer ``[batch, tokens, HEADS, DIM]``, and its state afterwards.

    The state is the last tokens before the convolution, and the matrices.
    """
    y = norm(x)
    history, matrices = (None, None) if state is None else state
    mixed, history = causal_conv1d(
        y @ block["qkv"],
        block["taps"],
        initial_state=history,
        activation="silu",
        return_state=True,
    )
    q, k, v = jnp.split(mixed.reshape(*x.shape[:2], 3 * HEADS, DIM), 3, 2)
    out, matrices = gated_delta_rule(
        q,
        k,
        v,
        decays(block, y),
        jax.nn.sigmoid(y @ block["beta"]),
        initial_state=matrices,
        normalize_qk=True,
        return_state=True,
    )
    output_gate = jax.nn.silu(y @ block["output_gate"]).reshape(out.shape)
    return norm(out) * output_gate, [history, matrices]


def finish(block: Params, x: jax.Array, mixed: jax.Array) -> jax.Array:
    """The layer's output, from what its tokens exchanged, and its network."""
    x = x + mixed.reshape(x.shape) @ block["out"]
    return x + jax.nn.gelu(norm(x) @ block["up"]) @ block["down"]


def forward(params: Params, tokens: jax.Array) -> jax.Array:
    """Logits ``[batch, tokens, 256]``, all tokens at once."""
    x = params["bytes"][tokens]
    for kind, block in zip(LAYERS, params["blocks"], strict=True):
        if kind == "delta":
            mixed, _ = delta(block, x)
        elif kind == "linear":
            mixed = norm(recurrent_attention(*project(block, x)))
        else:
            q, k, v, _ = project(block, x)
            mixed = norm(flash_attention(q, k, v, causal=True, sliding_window=(WINDOW - 1, 0)))
        x = finish(block, x, mixed)
    return norm(x) @ params["logits"]


def empty(batch: int) -> State:
    """Returns the states that decoding starts with, before the first token."""
    matrices = (batch, HEADS, DIM, DIM)
    shapes = {
        "linear": matrices,
        "delta": [(batch, 3 * WIDTH, TAPS - 1), matrices],
        "attention": (2, batch, WINDOW, HEADS, DIM),
    }
    # every layer has arrays of its own, so that all can be donated
    layers = [shapes[kind] for kind in LAYERS]
    return jax.tree.map(jnp.zeros, layers, is_leaf=lambda x: isinstance(x, tuple))


def step(params: Params, state: State, token: jax.Array, position: jax.Array):
    """Logits ``[batch, 256]`` after one token a text ``[batch]``, and the state with it."""
    x = params["bytes"][token][:, None]
    caches = []
    for kind, block, layer_state in zip(LAYERS, params["blocks"], state, strict=True):
        if kind == "delta":
            mixed, layer_state = delta(block, x, layer_state)
        elif kind == "linear":
            mixed, layer_state = recurrent_attention(
                *project(block, x), initial_state=layer_state, return_state=True
            )
            mixed = norm(mixed)
        else:
            q, k, v, _ = project(block, x)
            # the oldest row gives way: attention does not ask for the order of keys
            row = position % WINDOW
            layer_state = layer_state.at[:, :, row].set(jnp.stack([k, v])[:, :, 0])
            seen = jnp.arange(WINDOW) <= position
            mask = jnp.broadcast_to(seen, (x.shape[0], 1, 1, WINDOW))
            mixed = norm(flash_attention(q, *layer_state, attention_mask=mask))
        caches.append(layer_state)
        x = finish(block, x, mixed)
    return (norm(x) @ params["logits"])[:, 0], caches


@functools.partial(jax.jit, static_argnames="count", donate_argnames="state")
def generate(params: Params, state: State, prompt: jax.Array, count: int, key: jax.Array):
    """``prompt [batch, n]`` with ``count`` bytes drawn after it, the logits on the way, the last
    state."""
    given = prompt.shape[1]

    def one(carry, position):
        state, token = carry
        logits, state = step(params, state, token, position)
        drawn = jax.random.categorical(jax.random.fold_in(key, position), logits)
        ahead = prompt[:, jnp.minimum(position + 1, given - 1)]
        token = jnp.where(position + 1 < given, ahead, drawn)
        return (state, token), (token, logits)

    first = (state, prompt[:, 0])
    (state, _), (tokens, logits) = jax.lax.scan(one, first, jnp.arange(given + count - 1))
    texts = jnp.concatenate([prompt[:, :1], tokens.T], 1)
    return texts, jnp.moveaxis(logits, 0, 1), state


def bits(params: Params, tokens: jax.Array) -> jax.Array:
    """Mean bits of a byte after those before it."""
    log_probabilities = jax.nn.log_softmax(forward(params, tokens[:, :-1]))
    chosen = jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], 2)
    return -jnp.mean(chosen) / jnp.log(2.0)


@jax.jit
def learn(params: Params, moments: Any, tokens: jax.Array, i: jax.Array, rate: float = 3e-3):
    """One step of Adam (Kingma and Ba 2014, arXiv 1412.6980)."""
    value, gradient = jax.value_and_grad(bits)(params, tokens)
    means, squares = moments
    means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, gradient)
    squares = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g**2, squares, gradient)
    size = rate * jnp.sqrt(1 - 0.99 ** (i + 1)) / (1 - 0.9 ** (i + 1))
    params = jax.tree.map(
        lambda w, m, s: w - size * m / (jnp.sqrt(s) + 1e-8), params, means, squares
    )
    return params, (means, squares), value


def text() -> np.ndarray:
    """Python's help topics, one after the other."""
    every = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return np.frombuffer(every.encode("ascii", "replace"), np.uint8).astype(np.int32)


def main(steps: int = 200, batch: int = 8, length: int = 128) -> tuple[Params, list[float]]:
    """Train, then continue a text; returns the parameters and the bits of every step."""
    data, params = text(), init(jax.random.key(0))
    zeros = jax.tree.map(jnp.zeros_like, params)
    moments, history = (zeros, zeros), []
    for i in range(steps):
        starts = np.random.default_rng(i).integers(len(data) - length, size=batch)
        rows = data[starts[:, None] + np.arange(length + 1)]
        params, moments, value = learn(params, moments, rows, jnp.int32(i))
        history.append(float(value))
        if i % max(steps // 10, 1) == 0 or i == steps - 1:
            print(f"step {i:4d}  {history[-1]:.3f} bits a byte")
    prompt = np.frombuffer(b"The assert statement ", np.uint8).astype(np.int32)[None]
    texts, *_ = generate(params, empty(1), prompt, 120, jax.random.key(1))
    print(bytes(np.asarray(texts[0], np.uint8)).decode("ascii", "replace"))
    return params, history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    if steps < 1:
        parser.error(f"argument --steps: given {steps}, expected at least 1")
    try:
        main(steps)
    except KeyboardInterrupt:
        print("hybrid.py: stopped", file=sys.stderr)
        sys.exit(130)
