"""States and layers of the recurrent operations."""

from __future__ import annotations

from typing import Any

from ejkernel.types.calls.settle.errors import invalid, out_of_range

Arguments = dict[str, Any]


def states(a: Arguments) -> None:
    """One initial state per batch row, or per packed sequence."""
    state, cu = a["initial_state"], a["cu_seqlens"]
    if state is None:
        return
    n = a["query"].shape[0] if cu is None else cu.shape[0] - 1
    if state.shape[0] != n:
        what = "batch row" if cu is None else "sequence of cu_seqlens"
        raise invalid("initial_state", f"float[{n}, heads, key_dim, v_dim], one per {what}", state)


def layer(a: Arguments) -> None:
    """``0 <= layer_idx < num_layers``."""
    layers, index = a["num_layers"], a["layer_idx"]
    if layers < 1:
        raise out_of_range("num_layers", "an integer >= 1", layers)
    if not 0 <= index < layers:
        raise out_of_range("layer_idx", f"0 <= layer_idx < num_layers = {layers}", index)
