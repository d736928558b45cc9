"""Records of benchmarks and tuning: one JSON file per run, with its device and versions.

``{"kind": "bench" | "tune", "op": ..., "date": ..., "device": ..., "versions": {...}, ...}``, in
``records`` of the cache directory by default. ``ejk report`` reads them.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ejkernel.ops.utils.files import parse_json, read_text, replace_text
from ejkernel.ops.utils.serialization import to_json

PEER_NAMES = {"cudnn": "cuDNN", "fa3": "FlashAttention-3"}
"""What people call peers that have a short name in records."""


def versions() -> dict[str, str]:
    """Returns the versions of everything that decides how fast a call is."""
    from ejkernel.modules._version import __version__
    from ejkernel.ops.config.versions import versions as of_kernels

    return {**of_kernels(), "ejk-modules": __version__}


def config_fields(cfg: Any) -> Any:
    """Returns a config as JSON values, without the fields that are None."""
    if cfg is None:
        return None
    plain = cfg if isinstance(cfg, Mapping) else json.loads(to_json(cfg))
    if not isinstance(plain, Mapping):
        return plain
    return {
        name: config_fields(value) if isinstance(value, Mapping) else value
        for name, value in plain.items()
        if value is not None
    }


_SHORT = {
    "q_blocksize": "q",
    "kv_blocksize": "kv",
    "blocksize_m": "m",
    "blocksize_n": "n",
    "blocksize_k": "k",
    "blocksize_heads": "heads",
    "blocksize_keys": "keys",
    "num_key_splits": "splits",
    "num_splits": "splits",
    "num_warps": "warps",
    "num_stages": "stages",
}


def rates_text(limits: Mapping[str, Any]) -> str:
    """Returns measured limits, a record's or ``asdict`` of Limits, as a line."""
    rates = [f"{k} product {v / 1e12:.3g} TFLOP/s" for k, v in limits.get("flops", {}).items()]
    if "bytes_per_s" in limits:
        rates.append(f"copy {limits['bytes_per_s'] / 1e9:.4g} GB/s")
    return "; ".join(rates)


def config_text(cfg: Any) -> str:
    """Returns a config in one line, e.g. "triton fwd(q=128 kv=64 warps=8)"."""
    plain = config_fields(cfg)
    if not isinstance(plain, Mapping):
        return "" if plain is None else str(plain)
    words = []
    for name, value in plain.items():
        if name in ("platform", "backend"):
            words += [] if value in ("auto", "any") else [str(value)]
        elif isinstance(value, Mapping):
            inside = " ".join(f"{_SHORT.get(k, k)}={v}" for k, v in value.items())
            words.append(f"{name.removesuffix('_params')}({inside})")
        else:
            words.append(f"{_SHORT.get(name, name)}={value}")
    return " ".join(words)


def environment() -> dict[str, Any]:
    """Returns date, device and versions of this process. Starts the device."""
    import jax

    return {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "versions": versions(),
    }


def folder() -> Path:
    """Returns the default folder of records."""
    from ejkernel.ops import env

    return env.cache_dir() / "records"


def write(kind: str, name: str, content: Mapping[str, Any], into: Path | None = None) -> Path:
    """Writes ``content`` with device and versions of this process to a new file."""
    into = folder() if into is None else into
    into.mkdir(parents=True, exist_ok=True)
    process = environment()
    device = re.sub(r"[^A-Za-z0-9]+", "-", process["device"]).strip("-").lower()
    now = datetime.datetime.now()
    stem = f"{kind}-{device}-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}"
    path = into / f"{stem}-{now:%Y%m%d-%H%M%S}-{os.getpid()}.json"
    complete = {"kind": kind, **process, "time": now.isoformat(), **content}
    replace_text(path, json.dumps(complete, indent=1) + "\n")
    return path


def read(path: Path) -> dict[str, Any]:
    """Reads one record; older results, which do not name their kind, are benchmarks.

    Raises:
        OSError: unreadable.
        ValueError: not a record.
    """
    content = parse_json(read_text(path))
    if not isinstance(content, dict) or not ({"rows", "trials"} & set(content)):
        raise ValueError(f"{path} holds neither rows nor trials")
    content.setdefault("kind", "bench" if "rows" in content else "tune")
    if content["kind"] not in ("bench", "tune"):
        raise ValueError(f"a record of kind {content['kind']!r:.40}, expected 'bench' or 'tune'")
    content["path"] = str(path)
    return content
