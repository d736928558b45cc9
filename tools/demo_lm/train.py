"""Training on packed rows, with a progress bar."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import optax
from tqdm import tqdm

from demo_lm.model import Size, loss
from demo_lm.text import Packed


def train(params, data: Packed, size: Size, *, steps: int, batch: int, seed: int):
    """Returns (params, bits per byte at every step)."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, min(20, steps // 4 + 1), steps + 1)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    state = optimiser.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, tokens, ids, positions):
        value, grads = jax.value_and_grad(loss)(params, tokens, ids, positions, size)
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    rng = np.random.default_rng(seed)
    history = []
    with tqdm(range(steps), desc="training", unit="step", dynamic_ncols=True) as bar:
        for _ in bar:
            rows = rng.choice(len(data.tokens), batch, replace=False)
            params, state, value = train_step(
                params, state, data.tokens[rows], data.segment_ids[rows], data.positions[rows]
            )
            history.append(float(value))
            bar.set_postfix_str(f"{history[-1]:.3f} bits per byte")
    return params, history
