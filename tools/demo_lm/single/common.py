"""Text as features, and how results are reported."""

from __future__ import annotations

from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np

from demo_lm.why import which, why
from ejkernel import modules
from ejkernel.modules import get_default_executor
from ejkernel.modules._table import operation_class
from ejktest.tolerance import measure

SHADES = " .:-=+*#%@"


def text(length: int) -> bytes:
    """The start of Python's help on assignments, below its title."""
    body = topics.topics["assignment"].split("\n\n", 1)[1]
    return body.encode("ascii", "replace")[:length]


def features(data: bytes, heads: int, dim: int, seed: int) -> jax.Array:
    """float32 ``[1, len(data), heads, dim]``: a fixed random vector a byte, plus its position."""
    rng = np.random.default_rng(seed)
    table = rng.standard_normal((256, heads, dim))
    place = rng.standard_normal((len(data), 1, dim)) * 0.5
    x = table[np.frombuffer(data, np.uint8)] + place
    return jnp.asarray(x[None], jnp.float32)


def report(name: str, reference, *args, **options):
    """Run an operation: which kernel ran, why, and how far it is from the oracle; its result."""
    out = getattr(modules, name)(*args, **options)
    kernel = operation_class(name).shared()
    e = get_default_executor().explanation(kernel, *args, **options)
    print(f"ran       {which(e)}\nwhy       {why(e)}")
    first = out[0] if isinstance(out, tuple) else out
    print(f"error     {measure(first, reference)} against float64")
    return out


def bars(values) -> str:
    """One character a value, darker is larger."""
    values = np.asarray(values, np.float64)
    top = values.max() if values.size and values.max() > 0 else 1.0
    return "".join(SHADES[int(v / top * (len(SHADES) - 1))] for v in values)


def grid(visible, labels: bytes | None = None) -> None:
    """A boolean or non-negative ``[rows, columns]`` array as characters."""
    visible = np.asarray(visible, np.float64)
    top = max(float(visible.max(initial=0)), 1e-30)
    for i, row in enumerate(visible):
        head = f"{chr(labels[i])!r:>5} " if labels is not None else "  "
        print(head + "".join("·" if v == 0 else SHADES[1 + int(v / top * 8)] for v in row))
