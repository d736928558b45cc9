"""A vision transformer in Equinox that learns to read handwritten digits.

    python docs/examples/vit_equinox.py               # a minute on two cores
    python docs/examples/vit_equinox.py --steps 2000 --patch 1

The data are the 1797 pictures of 8 by 8 pixels that scikit-learn ships (Alpaydin and Kaynak 1998,
"Optical Recognition of Handwritten Digits"), of which a fifth is kept for the test. A picture is
cut into square patches; these and a class token are the tokens of a transformer (Dosovitskiy et
al. 2020, arXiv 2010.11929).

The layers are ``equinox.nn.MultiheadAttention``, as Equinox has them: one picture at a time, with
``jax.vmap`` over a batch. ``equinox_attention`` computes such a layer by ``flash_attention``. The
program checks that the trained model gives the same with the layer's own attention.

Needs equinox and scikit-learn; matplotlib, if it is there, draws the picture.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import FlashAttention, equinox_attention, get_default_executor

try:
    import equinox as eqx
except ImportError:
    sys.exit("vit_equinox.py needs equinox: pip install equinox")

SIDE, CLASSES = 8, 10
LAYERS, HEADS, WIDTH = 4, 4, 64


def attend_as_equinox(layer: eqx.nn.MultiheadAttention, x: jax.Array) -> jax.Array:
    """The layer's own attention: what ``attend`` must equal."""
    return layer(x, x, x)


def attend(layer: eqx.nn.MultiheadAttention, x: jax.Array) -> jax.Array:
    return equinox_attention(layer, x, x, x)


class Block(eqx.Module):
    """Attention and a network, each on the normed tokens and added to them."""

    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    network: eqx.nn.MLP

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.network = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x: jax.Array, attend: Callable[..., jax.Array]) -> jax.Array:
        x = x + attend(self.attention, jax.vmap(self.norm1)(x))
        return x + jax.vmap(self.network)(jax.vmap(self.norm2)(x))


class ViT(eqx.Module):
    """Logits ``[CLASSES]`` of a picture ``[SIDE, SIDE]``."""

    patch: int = eqx.field(static=True)
    embed: eqx.nn.Linear
    first: jax.Array
    places: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, patch: int, key: jax.Array):
        keys = jax.random.split(key, 4 + LAYERS)
        tokens = 1 + (SIDE // patch) ** 2
        self.patch = patch
        self.embed = eqx.nn.Linear(patch**2, WIDTH, key=keys[0])
        self.first = jax.random.normal(keys[1], (1, WIDTH)) * 0.02
        self.places = jax.random.normal(keys[2], (tokens, WIDTH)) * 0.5
        self.blocks = [Block(key) for key in keys[4:]]
        self.norm, self.head = eqx.nn.LayerNorm(WIDTH), eqx.nn.Linear(WIDTH, CLASSES, key=keys[3])

    def __call__(self, image: jax.Array, attend: Callable[..., jax.Array] = attend) -> jax.Array:
        n, p = SIDE // self.patch, self.patch
        patches = image.reshape(n, p, n, p).swapaxes(1, 2).reshape(n * n, p * p)
        x = jnp.concatenate([self.first, jax.vmap(self.embed)(patches)]) + self.places
        for block in self.blocks:
            x = block(x, attend)
        return self.head(self.norm(x[0]))


def digits() -> tuple[np.ndarray, ...]:
    """Pictures and classes to learn, then those for the test; pixels from -1 to 1."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("vit_equinox.py needs scikit-learn: pip install scikit-learn") from None
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.images))
    images = (data.images[order] / 8 - 1).astype(np.float32)
    classes = data.target[order].astype(np.int32)
    last = len(order) // 5
    return images[last:], classes[last:], images[:last], classes[:last]


def shift(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Moves every picture by a pixel at most, in each direction; what it leaves is empty."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)), constant_values=-1)
    down, right = rng.integers(3, size=(2, len(images), 1, 1))
    rows, columns = np.arange(SIDE)[:, None], np.arange(SIDE)
    return padded[np.arange(len(images))[:, None, None], rows + down, columns + right]


def loss_of(model: ViT, images: jax.Array, classes: jax.Array) -> jax.Array:
    log_probabilities = jax.nn.log_softmax(jax.vmap(model)(images))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, classes[:, None], 1))


@eqx.filter_jit
def learn(model: ViT, moments: Any, images: jax.Array, classes: jax.Array, i: jax.Array, steps):
    """One step of Adam (Kingma and Ba 2014, arXiv 1412.6980), its rate falling to zero."""
    value, gradient = eqx.filter_value_and_grad(loss_of)(model, images, classes)
    means, squares = moments
    means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, gradient)
    squares = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g**2, squares, gradient)
    rate = 2e-3 * jnp.minimum(1, (i + 1) / 20) * 0.5 * (1 + jnp.cos(jnp.pi * i / steps))
    rate = rate * jnp.sqrt(1 - 0.99 ** (i + 1)) / (1 - 0.9 ** (i + 1))
    updates = jax.tree.map(lambda m, s: -rate * m / (jnp.sqrt(s) + 1e-8), means, squares)
    return eqx.apply_updates(model, updates), (means, squares), value


@eqx.filter_jit
def logits_of(model: ViT, images: jax.Array, attend: Callable[..., jax.Array] = attend):
    return jax.vmap(partial(model, attend=attend))(images)


def draw(
    history: list[float], images: np.ndarray, predicted: np.ndarray, right: np.ndarray, path: str
):
    """The losses, and pictures of the test with the answers, wrong ones first and in red."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, pictures = figure.subfigures(1, 2, width_ratios=(1, 1))
    axes = left.subplots()
    axes.semilogy(history)
    axes.set(xlabel="step", ylabel="loss", title="Training on digits")
    axes.grid(alpha=0.3)
    order = np.argsort(right, kind="stable")
    for axes, i in zip(pictures.subplots(3, 7).flat, order, strict=False):
        axes.imshow(images[i], "gray_r")
        axes.set_title(str(predicted[i]), color="black" if right[i] else "red", fontsize=10)
        axes.axis("off")
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


def main(
    steps: int = 400, batch: int = 128, patch: int = 2, picture: str = "vit_equinox.png"
) -> tuple[ViT, float]:
    """Train and test; returns the model and the part of the test that it reads right."""
    images, classes, test_images, test_classes = digits()
    model = ViT(patch, jax.random.key(0))
    tokens = len(model.places)
    print(f"{len(images)} pictures to learn, {len(test_images)} to test, {tokens} tokens each")
    heads = jax.ShapeDtypeStruct((batch, tokens, HEADS, WIDTH // HEADS), jnp.float32)
    ran = get_default_executor().explanation(FlashAttention(), heads, heads, heads)
    print(f"attention: {ran.implementation}, {ran.tier}, on {ran.device}")

    zeros = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_inexact_array))
    moments, history, rng = (zeros, zeros), [], np.random.default_rng(0)
    for i in range(steps):
        rows = rng.choice(len(images), min(batch, len(images)), replace=False)
        batch_images, step = shift(images[rows], rng), jnp.int32(i)
        model, moments, value = learn(
            model, moments, batch_images, classes[rows], step, jnp.int32(steps)
        )
        history.append(float(value))
        if i % max(steps // 10, 1) == 0 or i == steps - 1:
            predicted = np.argmax(logits_of(model, test_images), 1)
            right = predicted == test_classes
            print(f"step {i:4d}  loss {history[-1]:.3f}  test {right.mean():.1%} right")
    difference = logits_of(model, test_images) - logits_of(model, test_images, attend_as_equinox)
    print(f"accuracy: {right.sum()} of {len(right)} pictures of the test, {right.mean():.1%}")
    print(f"against Equinox's own attention: logits differ by {abs(difference).max():.1e}")
    draw(history, test_images, predicted, right, picture)
    return model, float(right.mean())


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"given {text}, expected a number >= 1")
    return int(text)


def png(text: str) -> str:
    if not text.endswith(".png") or not pathlib.Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"given {text}, expected a .png in a folder that exists")
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=400)
    parser.add_argument("--batch", type=positive, default=128, help="pictures of a step")
    parser.add_argument("--patch", type=int, default=2, choices=(1, 2, 4), help="pixels of a side")
    parser.add_argument("--picture", type=png, default="vit_equinox.png", help="file to draw to")
    try:
        main(**vars(parser.parse_args()))
    except KeyboardInterrupt:
        print("vit_equinox.py: stopped", file=sys.stderr)
        sys.exit(130)
