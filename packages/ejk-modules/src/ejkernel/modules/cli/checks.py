"""The checks of ``ejk doctor``: each gives a status, a finding, and the line that fixes it.

The checks here look at the installation; ``trials`` runs calls.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ejk_command
from ejkernel.modules.cli import installed
from ejkernel.modules.cli.output import counted, first_line, no_device


@dataclass(frozen=True)
class Check:
    """One finding. ``status``: "ok", "info", "warn" (works, but) or "fail" (does not work)."""

    group: str
    what: str
    status: str
    found: str
    fix: str = ""


def make_check(group: str, what: str, bad: str, found: str, fix: str) -> Check:
    """Returns a finding that is "ok" unless it is ``bad``: only then has it a fix."""
    return Check(group, what, bad or "ok", found, fix if bad else "")


def machine() -> Iterator[Check]:
    memory = installed.memory_gib()
    text = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    yield Check("machine", "host", "info", text + (f", {memory:.0f} GiB" if memory else ""))
    seen = installed.hardware()
    for kind, evidence in seen.items():
        yield Check("machine", f"{kind} hardware", "info", evidence)
    if not seen:
        yield Check("machine", "accelerators", "info", "none: the XLA implementations run on CPU")


def python() -> Iterator[Check]:
    low, high = installed.PYTHON_RANGE
    bad = "" if low <= sys.version_info[:2] < high else "fail"
    fix = "use Python 3.11, 3.12 or 3.13: uv venv --python 3.12"
    yield make_check("installation", "Python", bad, platform.python_version(), fix)


def namespace() -> Iterator[Check]:
    hidden = [init.parent for init in ejk_command.regular(os.getcwd())]
    for path in hidden:
        fix = ejk_command.repair()
        if path.parent == Path.cwd():
            fix = f"cd elsewhere, or rename {path}"
        yield Check(
            "installation", "namespace", "fail",
            f"{path} is a regular package and hides ejkernel.*", fix,
        )  # fmt: skip
    needed = [name for name in ejk_command.OURS if name != "ejk-kernels-triton"]
    missing = [name for name in needed if installed.version(name) is None]
    if missing:
        yield Check(
            "installation", "packages", "fail", f"missing: {', '.join(missing)}",
            f"python -m pip install {' '.join(missing)}",
        )  # fmt: skip
    elif not hidden:
        yield Check("installation", "namespace", "ok", "complete, nothing hides it")


def packages() -> Iterator[Check]:
    versions = {name: installed.version(name) for name in ejk_command.OURS}
    text = ", ".join(f"{name} {v}" for name, v in versions.items() if v)
    mixed = "warn" if len({installed.numbers(v)[:2] for v in versions.values() if v}) > 1 else ""
    fix = "python -m pip install --upgrade ejk-modules"
    yield make_check("installation", "ejkernel", mixed, text, fix)


def jax_versions() -> Iterator[Check]:
    jax, jaxlib = installed.version("jax"), installed.version("jaxlib")
    low, high = installed.JAX_RANGE
    upgrade = f'python -m pip install --upgrade "jax>={low[0]}.{low[1]},<{high[0]}.{high[1]}"'
    if jax is None or jaxlib is None:
        yield Check("installation", "JAX", "fail", "not installed", upgrade)
        return
    bad = "" if low <= installed.numbers(jax)[:2] < high else "warn"
    yield make_check("installation", "JAX", bad, f"jax {jax}, jaxlib {jaxlib}", upgrade)
    if installed.numbers(jaxlib)[:2] != installed.numbers(jax)[:2]:
        yield Check(
            "installation", "jaxlib", "fail", f"jaxlib {jaxlib} does not belong to jax {jax}",
            f'python -m pip install "jaxlib=={jax}"',
        )  # fmt: skip


def plugins() -> Iterator[Check]:
    jax = installed.version("jax")
    versions = {d: installed.version(d) for d in installed.PLUGINS}
    for name, version in versions.items():
        if version is None:
            continue
        same = name == "libtpu" or installed.numbers(version)[:3] == installed.numbers(jax)[:3]
        fix = f'python -m pip install "{name}=={jax}" (to match jax {jax})'
        yield make_check(
            "installation", "JAX plugin", "" if same else "fail", f"{name} {version}", fix
        )
    served = {installed.PLUGINS[d] for d, v in versions.items() if v}
    seen = installed.hardware()
    extras = {"nvidia": ("gpu", "cuda13"), "amd": ("gpu", "rocm"), "tpu": ("tpu", "tpu")}
    for kind in seen:
        serves, extra = extras[kind]
        if serves not in served:
            yield Check(
                "installation", "JAX plugin", "warn",
                f"{kind} hardware is there, but JAX has no plugin for it",
                f'python -m pip install "ejk-modules[{extra}]"',
            )  # fmt: skip


def triton() -> Iterator[Check]:
    """Checks versions only; whether kernels run is another check."""
    versions = {d: installed.version(d) for d in ("ejk-kernels-triton", "triton", "jax-triton")}
    has_gpu = "nvidia" in installed.hardware() or "amd" in installed.hardware()
    text = ", ".join(f"{name} {v or 'not installed'}" for name, v in versions.items())
    if all(versions.values()):
        miscompiles = (3, 4) <= installed.numbers(versions["triton"]) < (3, 7, 1)
        fix = "python -m pip install 'triton>=3.7.1' (3.4.0 to 3.7.0 miscompile on Hopper)"
        yield make_check(
            "installation", "Triton", "warn" if miscompiles and has_gpu else "", text, fix
        )
        return
    missing = has_gpu and sys.platform == "linux"
    yield Check(
        "installation", "Triton", "warn" if missing else "info",
        text if has_gpu else f"{text}; only GPUs need it",
        'python -m pip install "ejk-modules[triton]"' if missing else "",
    )  # fmt: skip


def environment() -> Iterator[Check]:
    from ejkernel.ops import env

    values = {name: os.environ[name] for name in env.VARIABLES if name in os.environ}
    try:
        env.check_values()
    except ValueError as error:
        name = str(error).split("=", 1)[0].rsplit(" ", 1)[-1]
        yield Check("settings", "environment", "fail", str(error), f"unset {name}")
    else:
        text = " ".join(f"{name}={value}" for name, value in values.items())
        yield Check("settings", "environment", "ok", text or "all variables at their defaults")
    forced = os.environ.get("JAX_PLATFORMS", "")
    if forced and "nvidia" in installed.hardware() and not {"cuda", "gpu"} & set(forced.split(",")):
        yield Check(
            "settings", "JAX_PLATFORMS", "warn", f"{forced!r} keeps JAX off the GPU",
            "unset JAX_PLATFORMS",
        )  # fmt: skip
    typos = [n for n in os.environ if n.startswith("EJKERNEL_") and n not in env.VARIABLES]
    for name in typos:
        yield Check(
            "settings", name, "warn", "no such variable, it has no effect",
            f"unset {name} (there are: {', '.join(env.VARIABLES)})",
        )  # fmt: skip


def cache() -> Iterator[Check]:
    from ejkernel.modules.cli.stored import scan
    from ejkernel.ops import env

    try:
        root = env.cache_dir()
    except env.NoHome as error:
        fix = "export EJKERNEL_CACHE_DIR=/somewhere/writable"
        yield Check("settings", "cache", "warn", f"{error}: configs last for the process", fix)
        return
    parent = next((p for p in (root, *root.parents) if p.exists()), root)
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        yield Check(
            "settings", "cache", "warn", f"{root} cannot be written: configs last for the process",
            "export EJKERNEL_CACHE_DIR=/somewhere/writable",
        )  # fmt: skip
    files = scan()
    count = sum(len(f.entries) for f in files if f.status == "ok")
    valid = sum(f.status == "ok" for f in files)
    text = f"{root}: {counted(count, 'tuned config')} in {counted(valid, 'file')}"
    yield Check("settings", "cache", "ok" if files else "info", text)
    for f in files:
        if f.status != "ok":
            yield Check(
                "settings", "cache file", "warn", f"{f.path}: {f.problem}",
                "" if f.status == "foreign" else f"rm {f.path}",
            )  # fmt: skip


def devices() -> tuple[list[Check], dict[str, Any]]:
    """Starts JAX's backend and returns checks of its devices."""
    complaints: list[str] = []
    with _overhearing(complaints):
        problem = no_device()
    if problem:
        fix = "JAX_PLATFORMS=cpu ejk doctor   # shows whether the rest works"
        return [Check("device", "JAX devices", "fail", problem, fix)], {}
    import jax

    from ejkernel.ops import target_device

    every = jax.devices()
    target = target_device()
    kinds = Counter(device.device_kind for device in every)
    text = ", ".join(f"{n} x {kind}" for kind, n in kinds.items())
    stats = _memory(every[0])
    checks = [Check("device", "JAX devices", "ok", f"{text} ({jax.default_backend()}){stats}")]
    checks.append(Check("device", "fingerprint", "info", target.fingerprint))
    if target.kind.value == "cpu":
        checks += _without_accelerator(complaints)
    described = {"kind": target.kind.value, "name": target.name, "fingerprint": target.fingerprint}
    return checks, {**described, "count": len(every)}


def _without_accelerator(complaints: list[str]) -> Iterator[Check]:
    """Yields why JAX runs on the CPU although a plugin for other hardware is installed."""
    seen = installed.hardware()
    for text in complaints:
        yield Check(
            "device", "JAX plugin", "warn" if seen else "info", text,
            'python -m pip install --upgrade "ejk-modules[cuda13]"' if "nvidia" in seen else "",
        )  # fmt: skip
    served = {kind for name, kind in installed.PLUGINS.items() if installed.version(name)}
    platforms = {{"tpu": "tpu"}.get(kind, "gpu") for kind in seen}
    if platforms & served and not complaints:
        yield Check(
            "device", "accelerator", "warn", f"{', '.join(seen)} hardware, but JAX is on the CPU",
            "JAX_PLATFORMS=cuda python -c 'import jax; jax.devices()'   # says why",
        )  # fmt: skip


class _LogCollector(logging.Handler):
    """Collects the causes of errors that are only logged."""

    def __init__(self, heard: list[str]):
        super().__init__(logging.WARNING)
        self.heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        text = record.getMessage() if cause is None else first_line(cause)
        if text not in self.heard:
            self.heard.append(text)


@contextlib.contextmanager
def _overhearing(heard: list[str]) -> Generator[None]:
    """Collects errors of plugins, which JAX only logs, with tracebacks."""
    logger = logging.getLogger("jax._src.xla_bridge")
    collector, before = _LogCollector(heard), logger.propagate
    logger.addHandler(collector)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(collector)
        logger.propagate = before


def _memory(device: Any) -> str:
    try:
        limit = (device.memory_stats() or {}).get("bytes_limit")
    except Exception:
        return ""
    return f", {limit / 2**30:.0f} GiB each for JAX" if limit else ""


INSTALLATION = (machine, python, namespace, packages, jax_versions, plugins, triton)
SETTINGS = (environment, cache)
