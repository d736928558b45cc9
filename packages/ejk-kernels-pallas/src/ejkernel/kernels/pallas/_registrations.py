"""What this package registers: one line per algorithm and device, as text: nothing is imported."""

from __future__ import annotations

from dataclasses import dataclass

PACKAGE = "ejkernel.kernels.pallas"
# Kernels that run on every GPU have priority 100; one made for this GPU goes before them, or
# between them and libraries for calls that they do faster.
AHEAD, BEHIND = 110, 90


@dataclass(frozen=True)
class Registration:
    """An algorithm's name in the registry, its public function and the modules that know it.

    ``backend`` is "tpu" or "gpu". ``module`` holds the function; ``support`` holds ``supports``,
    ``heuristic`` and the others named in ``hooks``. Paths are inside this
    package. ``reads`` names the config fields that it reads.
    """

    algorithm: str
    function: str
    backend: str
    module: str
    support: str
    priority: int = 100
    hooks: tuple[str, ...] = ("supports", "heuristic", "candidates")
    reads: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        return f"{PACKAGE}.{self.module}:{self.function}"

    @property
    def hook_targets(self) -> dict[str, str]:
        """Keyword arguments of ``register_lazy``."""
        return {hook: f"{PACKAGE}.{self.support}:{hook}" for hook in self.hooks}


REGISTRATIONS = (
    Registration(
        "flash_attention",
        "flash_attention",
        "gpu",
        "gpu.flash_attention.interface",
        "gpu.flash_attention.support",
        priority=AHEAD,
        hooks=("supports", "heuristic", "candidates", "priority_for"),
        reads=(
            "fwd_params.q_blocksize",
            "fwd_params.kv_blocksize",
            "fwd_params.num_stages",
            "bwd_params.q_blocksize",
            "bwd_params.kv_blocksize",
            "bwd_params.num_stages",
        ),
    ),
    Registration(
        "flash_attention",
        "flash_attention",
        "tpu",
        "tpu.flash_attention.interface",
        "tpu.flash_attention.support",
        reads=(
            "fwd_params.q_blocksize",
            "fwd_params.kv_blocksize",
            "bwd_params.q_blocksize",
            "bwd_params.kv_blocksize",
            "bwd_params.blocksize_m",
            "bwd_params.blocksize_n",
        ),
    ),
)
