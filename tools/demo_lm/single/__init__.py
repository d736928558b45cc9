"""One operation at a time, on a small piece of real text, beside its float64 oracle."""

from __future__ import annotations

import importlib

# operation -> module that shows it
SHOWN = {
    "flash_attention": "dense",
    "attention": "dense",
    "scaled_dot_product_attention": "dense",
    "ring_attention": "dense",
    "blocksparse_attention": "dense",
    "mla_attention": "dense",
    "page_attention": "cached",
    "ragged_page_attention": "cached",
    "ragged_page_attention_v3": "cached",
    "ragged_decode_attention": "cached",
    "mla_decode": "cached",
    "native_sparse_attention": "sparse",
    "gla_attention": "linear",
    "recurrent_attention": "linear",
    "lightning_attention": "linear",
    "mean_pooling": "rows",
    "grouped_matmul": "rows",
}


def show(name: str) -> None:
    """Print the case, its mask or state as text, which kernel ran, and the error."""
    module = importlib.import_module(f"demo_lm.single.{SHOWN[name]}")
    getattr(module, name)()
