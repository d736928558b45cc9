"""The insides of JAX's interpreter of Mosaic GPU kernels, as JAX 0.11.2 has them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

PALLAS = "jax._src.pallas"
INTERPRET = f"{PALLAS}.mosaic_gpu.interpret"

callbacks: Any = import_module(f"{INTERPRET}.gpu_callbacks")
jaxprs: Any = import_module(f"{INTERPRET}.jaxpr_interpret")
memory: Any = import_module(f"{INTERPRET}.shared_memory")
threads: Any = import_module(f"{PALLAS}.mosaic.interpret.thread_map")
utils: Any = import_module(f"{PALLAS}.mosaic.interpret.utils")
pallas: Any = import_module(f"{PALLAS}.primitives")
mosaic: Any = import_module(f"{PALLAS}.mosaic_gpu.primitives")
indexing: Any = import_module("jax._src.state.indexing")
sources: Any = import_module("jax._src.source_info_util")
io_callback: Any = import_module("jax._src.callback").io_callback
gpu: Any = import_module("jax.experimental.pallas.mosaic_gpu")
