"""What this package registers: one line per algorithm, as text, so that nothing is imported."""

from __future__ import annotations

from dataclasses import dataclass

PACKAGE = "ejkernel.kernels.xla"


@dataclass(frozen=True)
class Registration:
    """An algorithm's name in the registry, its public function and where both live.

    ``module``, ``heuristic`` and ``sample_inputs`` are paths inside this package
    ("folder.module", "folder.module:function").
    """

    algorithm: str
    function: str
    module: str
    heuristic: str | None = None
    sample_inputs: str | None = None

    @property
    def target(self) -> str:
        return f"{PACKAGE}.{self.module}:{self.function}"

    @property
    def hooks(self) -> dict[str, str]:
        """Keyword arguments of ``register_lazy``. No candidates: one config, never timed."""
        paths = {"heuristic": self.heuristic, "sample_inputs": self.sample_inputs}
        return {name: f"{PACKAGE}.{path}" for name, path in paths.items() if path}


def _plain(name: str, heuristic: str | None = None) -> Registration:
    return Registration(name, name, f"{name}.interface", heuristic)


def _cached(name: str) -> Registration:
    module = f"{name}.interface"
    return Registration(name, name, module, f"{module}:heuristic", f"{module}:sample_inputs")


def _recurrent(algorithm: str, function: str) -> Registration:
    return Registration(algorithm, function, f"{algorithm}.interface", "_linear.tiles:heuristic")


REGISTRATIONS = (
    Registration(
        "flash_attention",
        "flash_attention",
        "flash_attention.interface",
        "flash_attention.tiles:heuristic",
        "flash_attention.tiles:sample_inputs",
    ),
    _plain("attention"),
    _plain("scaled_dot_product_attention"),
    _plain("ring_attention", "flash_attention.tiles:heuristic"),
    _plain("blocksparse_attention"),
    _cached("page_attention"),
    _cached("ragged_page_attention"),
    _cached("ragged_page_attention_v3"),
    _cached("ragged_decode_attention"),
    _cached("mla_attention"),
    _cached("mla_decode"),
    _cached("native_sparse_attention"),
    _recurrent("gla", "gla_attention"),
    _recurrent("recurrent", "recurrent_attention"),
    _recurrent("lightning_attn", "lightning_attention"),
    _plain("mean_pooling", "mean_pooling.interface:heuristic"),
    Registration(
        "grouped_matmul",
        "grouped_matmul",
        "grouped_matmul.interface",
        "grouped_matmul.tiles:heuristic",
        "grouped_matmul.tiles:sample_inputs",
    ),
)
