"""The demo from start to end."""

from __future__ import annotations

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from demo_lm import pictures
from demo_lm.decode import PAGE, empty_cache, generate
from demo_lm.model import Size, forward, init
from demo_lm.text import documents, pack
from demo_lm.train import train
from demo_lm.why import choice_text, why
from ejkernel.modules import FlashAttention, PageAttention, get_default_executor
from ejkernel.types import MaskInfo

SAMPLES = 3


def explain_all(size: Size, batch: int, segment_ids) -> None:
    """Prints which kernel ran each operation and why, then the whole answer for training."""
    f32 = jnp.float32
    q = jax.ShapeDtypeStruct((batch, size.length, size.heads, size.head_dim), f32)
    kv = jax.ShapeDtypeStruct((batch, size.length, size.kv_heads, size.head_dim), f32)
    mask = MaskInfo.from_segments(jnp.asarray(segment_ids))
    explain = get_default_executor().explanation
    training = explain(FlashAttention(), q, kv, kv, causal=True, mask_info=mask)
    cache, tables = empty_cache(size, SAMPLES, 0)
    token = jax.ShapeDtypeStruct((SAMPLES, 1, size.heads, size.head_dim), f32)
    lens = jnp.ones((SAMPLES,), jnp.int32)
    decoding = explain(PageAttention(), token, cache[0]["k"], cache[0]["v"], lens, tables)
    print("\nwhat ran, and why")
    for step, e in (("training", training), ("decoding", decoding)):
        print(f"  {step}  {choice_text(e)}\n            {why(e)}")
    print("\nthe whole answer for training")
    print(training)


def train_and_decode(args: argparse.Namespace) -> int:
    size, batch = Size(), 4
    device = jax.devices()[0]
    print(f"device: {device.device_kind} ({device.platform})")
    pieces = documents(size.length)
    data = pack(pieces, size.length, args.seed)
    filled = np.mean(data.segment_ids >= 0)
    print(
        f"text: {sum(map(len, pieces)):,} bytes of Python's help topics, {len(pieces)} documents "
        f"packed into {len(data.tokens)} rows of {size.length}, {filled:.1%} filled"
    )

    params = init(size, jax.random.key(args.seed))
    params, history = train(params, data, size, steps=args.steps, batch=batch, seed=args.seed)
    few = max(1, len(history) // 10)
    print(
        f"loss: {np.mean(history[:few]):.3f} -> {np.mean(history[-few:]):.3f} bits per byte "
        f"(first and last {few} steps)"
    )

    texts, seen = generate(
        params, args.prompt.encode(), args.tokens, size, rows=SAMPLES, seed=args.seed
    )
    print(f"generated, {SAMPLES} rows from one pool of pages of {PAGE}:")
    for row in texts:
        print("  " + repr(row.tobytes().decode("ascii", "replace")))
    positions = jnp.arange(texts.shape[1] - 1)[None]
    full = forward(params, jnp.asarray(texts[:, :-1]), positions, None, size)
    difference = float(np.abs(np.asarray(full) - seen).max())
    print(f"decoding against the full forward pass: largest logit difference {difference:.2e}")
    if not difference < 1e-2:
        raise AssertionError("decoding and the full forward pass disagree")

    explain_all(size, batch, data.segment_ids[:batch])
    shown = int(np.argmax(data.segment_ids.max(axis=1)))
    row = MaskInfo.from_segments(data.segment_ids[shown : shown + 1]).apply_causal()
    print("\none packed row, blocks of 32 by 32")
    row.visualize(32)
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    pictures.loss_curve(history, out / "loss.png")
    pictures.mask_picture(np.asarray(row.get_or_compute_attention_mask())[0, 0], out / "mask.png")
    print(f"\npictures: {out / 'loss.png'}, {out / 'mask.png'}")
    return 0
