"""What this package registers: one line per algorithm, as text, so that nothing is imported."""

from __future__ import annotations

from dataclasses import dataclass

PACKAGE = "ejkernel.kernels.xla"


@dataclass(frozen=True)
class Registration:
    """An algorithm's name in the registry, its public function and where both live.

    ``reads`` names the config fields that it reads. ``module``, ``heuristic`` and
    ``sample_inputs`` are paths inside this package ("folder.module", "folder.module:function").
    """

    algorithm: str
    function: str
    module: str
    heuristic: str | None = None
    sample_inputs: str | None = None
    reads: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        return f"{PACKAGE}.{self.module}:{self.function}"

    @property
    def hooks(self) -> dict[str, str]:
        """Keyword arguments of ``register_lazy``. No candidates: one config, never timed."""
        paths = {"heuristic": self.heuristic, "sample_inputs": self.sample_inputs}
        return {name: f"{PACKAGE}.{path}" for name, path in paths.items() if path}


# blocks of queries and keys, forward and backward
BLOCKS = tuple(
    f"{half}.{size}"
    for half in ("fwd_params", "bwd_params")
    for size in ("q_blocksize", "kv_blocksize")
)
SPLITS = ("num_splits", "pages_per_block")
RAGGED = ("num_kv_pages_per_block", "num_queries_per_block")


def _plain(name: str, heuristic: str | None = None, reads: tuple[str, ...] = ()) -> Registration:
    return Registration(name, name, f"{name}.interface", heuristic, reads=reads)


def _cached(name: str, *reads: str) -> Registration:
    module = f"{name}.interface"
    return Registration(name, name, module, f"{module}:heuristic", f"{module}:sample_inputs", reads)


def _recurrent(algorithm: str, function: str) -> Registration:
    module = f"{algorithm}.interface"
    return Registration(
        algorithm, function, module, "_linear.tiles:heuristic", None, ("time_tile",)
    )


REGISTRATIONS = (
    Registration(
        "flash_attention",
        "flash_attention",
        "flash_attention.interface",
        "flash_attention.tiles:heuristic",
        "flash_attention.tiles:sample_inputs",
        BLOCKS,
    ),
    _plain("attention"),
    _plain("scaled_dot_product_attention"),
    _plain("ring_attention", "flash_attention.tiles:heuristic", BLOCKS),
    _plain("blocksparse_attention", reads=BLOCKS),
    _cached("page_attention", *SPLITS),
    _cached("ragged_page_attention", *RAGGED),
    _cached("ragged_page_attention_v3", *RAGGED),
    _cached("ragged_decode_attention", "fwd_params.blocksize_keys", "fwd_params.kv_blocksize"),
    _cached("mla_attention", *BLOCKS),
    _cached("mla_decode", *SPLITS),
    _cached("native_sparse_attention", "q_tile"),
    _recurrent("gla", "gla_attention"),
    _recurrent("recurrent", "recurrent_attention"),
    _recurrent("lightning_attn", "lightning_attention"),
    _plain("mean_pooling", "mean_pooling.interface:heuristic", ("token_tile",)),
    Registration(
        "grouped_matmul",
        "grouped_matmul",
        "grouped_matmul.interface",
        "grouped_matmul.tiles:heuristic",
        "grouped_matmul.tiles:sample_inputs",
        ("block_m",),
    ),
)
