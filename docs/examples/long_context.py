"""One long sequence over eight virtual devices: what each way of sharing it sends and needs.

    python docs/examples/long_context.py                  # 20 s on two cores
    python docs/examples/long_context.py --length 16384 --devices 4

Queries, keys and values are sharded along their sequence, and ``flash_attention`` is called as on
one device, under plain ``jax.jit``. It runs context-parallel: ``ring`` sends keys and values from
device to device while others are used (Liu et al. 2023, arXiv 2310.01889), ``all_gather`` gathers
them, ``ulysses`` exchanges heads for sequence (Jacobs et al. 2023, arXiv 2309.14509).
``FlashAttentionConfig(context_parallel=...)`` names one; ``explain`` says which a call would take
by itself, and why.

For each, outputs and gradients are compared with those of one device, collectives are counted in
the compiled program, and memory is what XLA plans for a device. The devices are made of the cores
of this machine (``jax_num_cpu_devices``, set below for this process alone, before JAX starts), so
memory and collectives are as on real ones, and times are not: they are printed to show that it
runs. matplotlib, if it is there, draws the memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import re
import sys
import time
from collections import Counter
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.modules import (
    FlashAttention,
    FlashAttentionConfig,
    flash_attention,
    get_default_executor,
)

STRATEGIES = ("ring", "all_gather", "ulysses")
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


class Report(NamedTuple):
    """A program of one strategy.

    collectives: how often each is in the compiled program.
    held, temporary: bytes of a device for arguments and results, and while it runs.
    error: largest difference of the output and the gradients from those of one device, as a part
    of the largest entry.
    """

    collectives: Counter[str]
    held: int
    temporary: int
    error: float


def training(q, k, v, do, cfg=None):
    """Causal attention, and the gradients of queries, keys and values for ``do``."""
    out, back = jax.vjp(lambda q, k, v: flash_attention(q, k, v, causal=True, cfg=cfg), q, k, v)
    return out, *back(do)


def make(length: int, heads: int, kv_heads: int, dim: int) -> list[np.ndarray]:
    """Random queries, keys, values and gradients of the output ``[1, length, heads, dim]``."""
    rng = np.random.default_rng(0)
    shapes = [(1, length, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def measure(arrays, sharding, strategy: str | None, expected=None) -> tuple[Report, list, float]:
    """Compiles and runs ``training``: its report, its results and its seconds."""
    cfg = None if strategy is None else FlashAttentionConfig(context_parallel=strategy)
    arrays = [jax.device_put(x, sharding) for x in arrays]
    program = jax.jit(partial(training, cfg=cfg)).lower(*arrays).compile()
    found = re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", program.as_text())
    memory = program.memory_analysis()
    began = time.perf_counter()
    results = jax.block_until_ready(program(*arrays))
    seconds = time.perf_counter() - began
    if strategy is not None:
        for x, y in zip(results, arrays[-1:] + arrays[:3], strict=True):
            assert x.sharding.is_equivalent_to(y.sharding, 4)  # nothing was gathered
    results = [np.asarray(x) for x in results]
    error = max(
        abs(a - b).max() / abs(b).max() for a, b in zip(results, expected or results, strict=True)
    )
    argument_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes
    report = Report(Counter(found), argument_bytes, memory.temp_size_in_bytes, float(error))
    return report, results, seconds


def draw(reports: dict[str, Report], length: int, path: str) -> None:
    """Memory of one device, by strategy."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    held, temporary = (
        np.array([getattr(report, name) / 2**20 for report in reports.values()])
        for name in ("held", "temporary")
    )
    axes.bar(list(reports), held, label="arguments and results")
    axes.bar(list(reports), temporary, bottom=held, label="temporaries")
    axes.set(ylabel="MiB of a device", title=f"Training step of attention over {length} tokens")
    axes.legend()
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


def main(
    length: int = 4096,
    devices: int = 8,
    heads: int = 8,
    kv_heads: int = 4,
    dim: int = 32,
    picture: str = "long_context.png",
) -> dict[str, Report]:
    """Runs every strategy; returns their reports, and that of one device."""
    if devices > len(jax.devices()):
        raise ValueError(f"--devices: given {devices}, there are {len(jax.devices())}")
    if length % devices or heads % devices:
        raise ValueError(
            f"--length and heads: given {length} and {heads}, expected multiples of {devices} "
            "devices"
        )
    mesh = jax.make_mesh((devices,), ("context",), axis_types=(AxisType.Auto,))
    along = NamedSharding(mesh, P(None, "context"))
    arrays = make(length, heads, kv_heads, dim)

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=along) for x in arrays[:3]]
    answer = get_default_executor().explanation(FlashAttention(), *shapes, causal=True)
    print(f"attention: {answer.implementation}, {answer.tier}, on {answer.device}")
    for note in answer.notes:
        print(f"  {note}")

    report, expected, seconds = measure(arrays, jax.devices()[0], None)
    reports = {"one device": report}
    times = [seconds]
    for strategy in STRATEGIES:
        reports[strategy], _, seconds = measure(arrays, along, strategy, expected)
        times.append(seconds)
    print(f"{length} tokens, forward and backward; of each device:")
    for (name, report), seconds in zip(reports.items(), times, strict=True):
        collectives = ", ".join(f"{n} {c}" for c, n in sorted(report.collectives.items()))
        print(
            f"  {name:10}  arrays {report.held / 2**20:6.1f} MiB  temporaries "
            f"{report.temporary / 2**20:6.1f} MiB  {seconds:5.1f} s  {collectives or 'alone'}"
            + (f"  error {report.error:.1e}" if name in STRATEGIES else "")
        )
    draw(reports, length, picture)
    return reports


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
    parser.add_argument("--length", type=positive, default=4096, help="tokens of the sequence")
    parser.add_argument("--devices", type=positive, default=8, help="virtual devices")
    parser.add_argument("--picture", type=png, default="long_context.png", help="file to draw to")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)
    try:
        main(**vars(options))
    except KeyboardInterrupt:
        print("long_context.py: stopped", file=sys.stderr)
        sys.exit(130)
    except ValueError as error:
        sys.exit(f"long_context.py: {error}")
