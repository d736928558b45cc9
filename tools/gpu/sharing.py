"""Compile attention over a sequence on two H100, and see which communication kernels hide.

python tools/gpu/sharing.py                     # no GPU; JAX 0.11 and its CUDA plugin
python tools/gpu/sharing.py --forms ring ring_packed --tokens 131072

The compiler starts a transfer and waits for it at two places of a program. A transfer is hidden
where a kernel, or a loop or branch that holds one, runs between the two. Each form is compiled as
XLA schedules it by default, with several transfers under way at once, and with permutes joined.
This reads programs and times nothing. The plugin is JAX's extra ``cuda13`` or ``cuda12``, or of
these the wheels of the plugin, of its PJRT client and of ``nvcc`` alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checkout

checkout.use()

FORMS = (
    ("ring", "zigzag"), ("ring_packed", "zigzag"), ("ring", "contiguous"), ("all_gather", "zigzag"),
    ("ulysses", "contiguous"),
)  # fmt: skip
OVERLAP = "xla_gpu_experimental_parallel_collective_overlap_limit"
COMBINE = "xla_gpu_collective_permute_combine_threshold_bytes"
SETTINGS: dict[str, dict[str, int]] = {
    "default": {}, "overlap 4": {OVERLAP: 4}, "combined": {COMBINE: 2**31},
}  # fmt: skip

# what XLA asks of a device while it compiles, of an H100 with 80 GB
H100: dict[str, Any] = {
    "threads_per_warp": 32,
    "threads_per_block_limit": 1024,
    "threads_per_core_limit": 2048,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "core_count": 132,
    "fpus_per_core": 128,
    "clock_rate_ghz": 1.98,
    "registers_per_core_limit": 2**16,
    "registers_per_block_limit": 2**16,
    "shared_memory_per_core": 228 * 1024,
    "shared_memory_per_block": 48 * 1024,
    "shared_memory_per_block_optin": 227 * 1024,
    "l2_cache_size": 50 * 2**20,
    "memory_bandwidth": 3352 * 10**9,
    "device_memory_size": 79 * 2**30,
}


def target_config() -> str:
    """Returns the description of the GPU that XLA compiles for, in protobuf's text form."""
    fields = " ".join(f"{name}: {value}" for name, value in H100.items())
    return (
        f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: 9 }} }}\n"
        'platform_name: "CUDA"\ndnn_version_info { major: 9 }\n'
        'device_description_str: "NVIDIA H100 80GB HBM3"\n'
    )


def prepare_environment() -> None:
    """Lets XLA find the compiler of the plugin's wheels; before JAX is imported."""
    packages = importlib.util.find_spec("nvidia")
    folders = (packages and packages.submodule_search_locations) or ()
    compilers = [
        path
        for folder in folders
        for name in ("cu13", "cuda_nvcc")
        if (path := Path(folder) / name).is_dir()
    ]
    if not compilers or importlib.util.find_spec("jax_plugins") is None:
        raise SystemExit("needs the wheels of JAX's CUDA plugin: pip install 'jax[cuda13]'")
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_cuda_data_dir={compilers[0]}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"


def devices(count: int) -> Any:
    """Returns descriptions of GPUs of one host, which need not be here."""
    from jax.experimental import topologies

    shape = {"target_config": target_config(), "topology": f"1x1x{count}"}
    return topologies.get_topology_desc("", "cuda", **shape).devices


def compile_on(
    gpus: Any, form: tuple[str, str], tokens: int, *, backward: bool, options: Mapping[str, int]
) -> Any:
    """Returns the compiled program of one form of ring attention, causal, by Hopper's kernels."""
    from ejkernel.kernels.pallas import ring_attention
    from ejktest.device import described
    from ejktest.transfers import trace_shared

    cores, shape = H100["core_count"], (1, tokens, 16, 128)
    with described("NVIDIA H100 80GB HBM3", "gpu", cores):
        traced = trace_shared(ring_attention, gpus, form, shape, backward=backward)
        lowered = traced.lower(lowering_platforms=("cuda",))
        return lowered.compile(compiler_options=dict(options) or None)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    strategies = list(dict.fromkeys(strategy for strategy, _ in FORMS))
    p.add_argument("--forms", nargs="+", default=strategies, choices=strategies)
    p.add_argument("--tokens", type=int, default=65536)
    p.add_argument("--devices", type=int, default=2)
    args = p.parse_args(argv)
    prepare_environment()
    from ejktest.transfers import transfers

    gpus = devices(args.devices)
    for form in (form for form in FORMS if form[0] in args.forms):
        for backward in (False, True):
            for setting, options in SETTINGS.items():
                program = compile_on(gpus, form, args.tokens, backward=backward, options=options)
                sent = list(transfers(program.as_text()))
                total = sum(transfer.size for transfer in sent)
                hidden = sum(transfer.size for transfer in sent if transfer.kernels)
                label = f"{' '.join(form):<20} {'both' if backward else 'forward':<8} {setting:<10}"
                memory = program.memory_analysis().temp_size_in_bytes / 2**20
                print(
                    f"{label} {len(sent):3} transfers, a kernel runs during {hidden / total:4.0%} "
                    f"of {total / 2**20:.0f} MiB; {memory:.0f} MiB of temporaries",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
