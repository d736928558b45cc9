"""Rehearse a release: everything that users will install, from an index on the loopback device.

    rehearse.py              all steps, two minutes once the dependencies are in uv's cache
    rehearse.py --extras     also resolve the extras for every platform; nothing more is downloaded

Run inside the hatch environment, whose uv it uses: ``python3 tools/dev.py rehearse``. It builds and
checks the packages of this folder, then installs them from the index: all in the order of
their dependencies, each alone, one upgraded alone. A breaking version must be refused,
with the packages whose ranges exclude it. Nothing is uploaded and no tag is made.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

import release
from distribution_files import read_metadata, requirements
from local_index import serve
from wheels import clean_environment, run_checked

CALLS = {
    "ejk-types": """
from ejkernel.types import MaskInfo
mask = MaskInfo.from_segments(jnp.array([[1, 1, 2]])).apply_causal()
assert int(mask.get_or_compute_attention_mask().sum()) == 4
""",
    "ejk-ops": """
from ejkernel.ops import ConfigSelectorChain, Executor, Kernel
class Sum(Kernel):
    def __init__(self):
        super().__init__(name="rehearsed_sum")
    def run(self, x, *, cfg):
        return x.sum()
assert float(Executor(ConfigSelectorChain(autotune=False))(Sum(), x)) == 128
""",
    "ejk-kernels-xla": """
from ejkernel.kernels.xla import mean_pooling
assert float(mean_pooling(x).sum()) == 8
""",
    "ejk-kernels-triton": """
from ejkernel.kernels.triton import mean_pooling
from ejkernel.ops import interpret_mode
with interpret_mode():
    assert float(mean_pooling(x).sum()) == 8
""",
    "ejk-kernels-pallas": """
from ejkernel.kernels.pallas import mean_pooling
from ejkernel.ops import interpret_mode
with interpret_mode():
    assert float(mean_pooling(x).sum()) == 8
""",
    "ejk-modules": """
from ejkernel.modules import flash_attention, mean_pooling
assert float(mean_pooling(x).sum()) == 8
q = jax.random.normal(jax.random.key(0), (1, 16, 2, 32))
assert jnp.allclose(flash_attention(q, q, q, causal=True)[:, 0], q[:, 0], atol=1e-5)
""",
}
"""One call of every package, on ones ``x`` of shape ``[1, 16, 8]``."""

START = """
import importlib, os, sys
import jax, jax.numpy as jnp
x = jnp.ones((1, 16, 8))
module = importlib.import_module(sys.argv[1])
assert module.__version__ == sys.argv[2], f"its version is {module.__version__}"
"""

EXTRAS = ("", "cli", "report", "triton", "cuda", "cuda13", "rocm", "tpu")
# libtpu's wheels need glibc 2.31
PLATFORMS = ("x86_64-manylinux_2_31", "aarch64-manylinux_2_31", "aarch64-apple-darwin")
RESOLVED_FOR = "3.12"
WITHOUT_WHEELS = {("rocm", PLATFORMS[1]), ("tpu", PLATFORMS[1])}
"""Extras and platforms for which their vendor has no wheels."""


@dataclass(frozen=True)
class Rehearsal:
    """An index of distributions, and a folder for environments."""

    root: Path
    index: str
    workspace: dict[str, release.Package]

    @property
    def uv(self) -> str:
        return os.environ.get("HATCH_UV", "uv")

    def indexes(self) -> list[str]:
        """The local index ahead of those that this machine is configured for."""
        addresses = (self.index, *os.environ.get("UV_INDEX", "").split())
        return [word for address in addresses for word in ("--index", address)]

    def environment(self, name: str) -> Path:
        """Makes an empty environment and returns its interpreter."""
        folder = self.root / name
        command = (self.uv, "venv", "--quiet", "--python", sys.executable, folder)
        run_checked(*command, cwd=self.root)
        return folder / "bin" / "python"

    def install(self, python: Path, *words: str) -> str:
        """Installs from the indexes; returns what the resolver says against it."""
        command = [self.uv, "pip", "install", "--python", str(python), *self.indexes()]
        command += words
        done = subprocess.run(
            command, cwd=self.root, env=clean_environment(), capture_output=True, text=True
        )
        return done.stderr.strip() if done.returncode else ""

    def call(self, python: Path, package: release.Package, version: str) -> None:
        """Imports a package outside the repository and makes its call."""
        portion = package.portion.replace("/", ".")
        code = START + CALLS[package.name]
        env = clean_environment() | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [str(python), "-I", "-c", code, portion, version],
            cwd=self.root,
            env=env,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise release.ReleaseError(f"{package.name} {version}: {done.stderr.strip()}")


def in_order(workspace: dict[str, release.Package]) -> list[release.Package]:
    """Returns the packages so that each comes after those that it requires, extras included."""
    ordered: dict[str, release.Package] = {}
    while len(ordered) < len(workspace):
        ready = [
            package
            for name, package in workspace.items()
            if name not in ordered
            and {need.name for need in package.requirements} & set(workspace) <= {*ordered, name}
        ]
        if not ready:
            raise release.ReleaseError("the packages require each other in a circle")
        ordered |= {package.name: package for package in ready}
    return list(ordered.values())


def bumped(package: release.Package, version: str, scratch: Path) -> release.Package:
    """Returns a copy of a package with another version."""
    folder = scratch / f"{package.name}-{version}" / "packages" / package.folder.name
    shutil.copytree(package.folder, folder, ignore=shutil.ignore_patterns("__pycache__", "dist"))
    copy = release.read_package(folder)
    copy.version_file.write_text(f'__version__ = "{version}"\n')
    return copy


def next_versions(version: str) -> tuple[str, str]:
    """Returns the next compatible version and the next breaking one, before 1.0 as after it."""
    major, minor, patch = Version(version).release
    breaking = f"0.{minor + 1}.0" if major == 0 else f"{major + 1}.0.0"
    return f"{major}.{minor}.{patch + 1}", breaking


def needed_by(name: str, needs: Mapping[str, Sequence[Requirement]]) -> set[str]:
    """Returns the packages of ``needs`` that installing one of them brings, without extras."""
    names = {name}
    for need in needs[name]:
        if need.name in needs and need.name not in names:
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                names |= needed_by(need.name, needs)
    return names


def installed(python: Path) -> set[str]:
    """Returns the packages of the workspace in an environment, from their metadata."""
    (site,) = python.parent.parent.glob("lib/python*/site-packages")
    infos = (path.name.partition("-")[0] for path in site.glob("ejk_*.dist-info"))
    return {name.replace("_", "-") for name in infos}


def install_in_order(r: Rehearsal) -> None:
    """One environment, the packages one after the other, as they will be uploaded."""
    python = r.environment("in-order")
    for package in in_order(r.workspace):
        _must(r.install(python, f"{package.name}=={package.version}"))
    for package in r.workspace.values():
        r.call(python, package, package.version)
    run_checked(r.uv, "pip", "check", "--quiet", "--python", python, cwd=r.root)


def install_alone(r: Rehearsal, dist: Path) -> None:
    """Every package in an environment of its own, with what it requires and nothing else."""
    built = (read_metadata(wheel) for wheel in dist.glob("*.whl"))
    needs = {metadata["Name"]: requirements(metadata) for metadata in built}
    for package in r.workspace.values():
        python = r.environment(f"alone-{package.name}")
        _must(r.install(python, package.name))
        have, needed = installed(python), needed_by(package.name, needs)
        if have != needed:
            raise release.ReleaseError(f"{package.name} brings {have}, expected {needed}")
        r.call(python, package, package.version)


def upgrade_alone(r: Rehearsal, dist: Path) -> None:
    """A compatible version of ejk-ops, and of nothing else, in the environment of all packages."""
    package = r.workspace["ejk-ops"]
    version, _ = next_versions(package.version)
    release.build_checked(bumped(package, version, r.root), dist)
    python = r.root / "in-order" / "bin" / "python"
    _must(r.install(python, "--upgrade-package", "ejk-ops", "ejk-ops", "ejk-modules"))
    r.call(python, package, version)
    modules = r.workspace["ejk-modules"]
    r.call(python, modules, modules.version)


def refuse_breaking(r: Rehearsal, dist: Path) -> None:
    """A breaking version of ejk-ops: the resolver and ``release.py`` both refuse it."""
    package = r.workspace["ejk-ops"]
    _, version = next_versions(package.version)
    copy = bumped(package, version, r.root)
    release.build_checked(copy, dist)
    python = r.root / "in-order" / "bin" / "python"
    complaint = r.install(python, f"ejk-ops=={version}", "ejk-modules")
    if "No solution found" not in complaint:
        raise release.ReleaseError(f"ejk-ops {version} is not refused: {complaint}")
    problems = release.range_problems(copy, {**r.workspace, "ejk-ops": copy})
    dependents = {
        name for name, p in r.workspace.items() if any(n.name == "ejk-ops" for n in p.requirements)
    }
    if {line.split()[0] for line in problems} != dependents:
        raise release.ReleaseError(f"ejk-ops {version} is refused for {problems} only")
    print(f"  ejk-ops {version} is excluded by {', '.join(sorted(dependents))}")


def resolve_extras(r: Rehearsal) -> None:
    """Every extra of ejk-modules for every platform: which versions would be installed."""
    failed = []
    for platform in PLATFORMS:
        for extra in EXTRAS:
            requirement = f"ejk-modules[{extra}]" if extra else "ejk-modules"
            command = [r.uv, "pip", "compile", "-", "--quiet", "--no-header"]
            command += ["--no-annotate", "--python-platform", platform]
            command += ["--python-version", RESOLVED_FOR, *r.indexes()]
            done = subprocess.run(
                command, input=requirement, cwd=r.root, env=clean_environment(),
                capture_output=True, text=True,
            )  # fmt: skip
            versions = re.findall(r"^(jax|triton|libtpu)==(\S+)", done.stdout, re.MULTILINE)
            count = len(re.findall("==", done.stdout))
            outcome = ", ".join(f"{name} {version}" for name, version in versions)
            if done.returncode:
                outcome = "no wheels for this platform"
                if (extra, platform) not in WITHOUT_WHEELS:
                    failed.append(f"{requirement} for {platform}: {done.stderr.strip()}")
                    outcome = "does not resolve"
            print(f"  {platform:23} {requirement:20} {count:3} packages  {outcome}", flush=True)
    release.refuse(failed)


def _must(complaint: str) -> None:
    if complaint:
        raise release.ReleaseError(complaint)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--extras", action="store_true", help="resolve the extras as well")
    options = parser.parse_args(argv)
    workspace = release.read_workspace(release.ROOT)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ejkernel-rehearsal-") as scratch:
        dist = Path(scratch) / "dist"
        dist.mkdir()
        with serve(dist) as address:
            r = Rehearsal(Path(scratch), address, workspace)
            steps = {
                "versions, changelogs, ranges": lambda: release.refuse(
                    release.problems_of(workspace.values(), workspace)
                ),
                "build, check and import": lambda: [
                    release.release(package, dist) for package in in_order(workspace)
                ],
                "install in order": lambda: install_in_order(r),
                "install each alone": lambda: install_alone(r, dist),
                "upgrade one alone": lambda: upgrade_alone(r, dist),
                "refuse a breaking one": lambda: refuse_breaking(r, dist),
            }
            if options.extras:
                steps["resolve the extras"] = lambda: resolve_extras(r)
            for title, step in steps.items():
                begun = time.monotonic()
                try:
                    step()
                except (release.ReleaseError, subprocess.CalledProcessError) as error:
                    print(f"failed: {title}: {error}", file=sys.stderr)
                    return 1
                print(f"ok  {time.monotonic() - begun:5.1f} s  {title}", flush=True)
    print("order of uploads:", *(package.name for package in in_order(workspace)))
    print(f"rehearsed in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
