"""The loss curve and the packed attention mask, as PNG files."""

from __future__ import annotations

import pathlib

import numpy as np
from matplotlib.figure import Figure


def loss_curve(history: list[float], path: pathlib.Path) -> None:
    fig = Figure(figsize=(6, 3.5), layout="constrained")
    ax = fig.subplots()
    ax.plot(history, lw=1.2)
    ax.set(xlabel="step", ylabel="bits per byte", title="Training on Python's help texts")
    ax.grid(alpha=0.3)
    fig.savefig(path, dpi=120)


def mask_picture(visible: np.ndarray, path: pathlib.Path) -> None:
    fig = Figure(figsize=(4.5, 4.5), layout="constrained")
    ax = fig.subplots()
    ax.imshow(visible, cmap="Blues", interpolation="nearest", vmin=0, vmax=1.3)
    ax.set(xlabel="key", ylabel="query", title="One packed row: causal inside each document")
    fig.savefig(path, dpi=120)
