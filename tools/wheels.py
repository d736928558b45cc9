"""Build every wheel and try ejk-modules and a plug-in as users install them.

Run inside the hatch environment, whose uv it uses: ``python3 tools/dev.py wheels``. In a clean
environment: install the wheels, ``pip check``, import every portion from outside the repository and
make one call, so that discovery through entry points is tried as installed. The example of a kernel
package (docs/examples/short_decode) is then installed next to them, and tested there; and another
project's distribution called ejkernel. ``rehearse.py`` tries every package alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import release

INSTALLED = ("ejk-types", "ejk-ops", "ejk-kernels-xla", "ejk-kernels-pallas", "ejk-modules")

SMOKE = """
import importlib, sys
import ejkernel
assert len(list(ejkernel.__path__)) == 1, list(ejkernel.__path__)
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    print(f"  {name} {module.__version__}")
import jax, jax.numpy as jnp
from ejkernel.modules import flash_attention
x = jax.random.normal(jax.random.key(0), (1, 16, 2, 32))
out = flash_attention(x, x, x, causal=True)
assert out.shape == x.shape and bool(jnp.isfinite(out).all())
assert jnp.allclose(out[:, 0], x[:, 0], atol=1e-5)
print(f"  flash_attention on {jax.default_backend()}, JAX {jax.__version__}")
"""


PLUG_IN = release.ROOT / "docs" / "examples" / "short_decode"


def run_checked(*command: str | Path, cwd: Path) -> None:
    """Run or raise."""
    subprocess.run(list(map(str, command)), cwd=cwd, env=clean_environment(), check=True)


def install(python: Path, *packages: str | Path) -> None:
    uv = os.environ.get("HATCH_UV", "uv")
    run_checked(uv, "pip", "install", "--quiet", "--python", python, *packages, cwd=python.parent)


def build_wheel(source: Path) -> Path:
    """The wheel of a package outside the workspace, by the hatchling of this environment."""
    run_checked(sys.executable, "-m", "hatchling", "build", "-t", "wheel", cwd=source)
    (wheel,) = (source / "dist").glob("*.whl")
    return wheel


def new_environment(folder: Path, wheels: list[Path]) -> Path:
    """The interpreter of a clean environment with these wheels."""
    uv, python = os.environ.get("HATCH_UV", "uv"), folder / "bin" / "python"
    command = (uv, "venv", "--quiet", "--seed", "--python", sys.executable, folder)
    run_checked(*command, cwd=folder.parent)
    install(python, *wheels)
    return python


def try_set(members: list[release.Package], wheels: dict[str, Path], folder: Path) -> Path:
    """The interpreter of the environment that the set was tried in."""
    python = new_environment(folder, [wheels[package.name] for package in members])
    run_checked(python, "-m", "pip", "check", cwd=folder.parent)
    portions = [package.portion.replace("/", ".") for package in members]
    run_checked(python, "-I", "-c", SMOKE, *portions, cwd=folder.parent)
    return python


def try_plug_in(python: Path, scratch: Path) -> None:
    """Installs the example of a kernel package: its tests pass, and a call chooses its kernel."""
    source = scratch / PLUG_IN.name
    ignored = shutil.ignore_patterns("dist", "__pycache__")
    shutil.copytree(PLUG_IN, source, ignore=ignored)
    install(python, f"{build_wheel(source)}[test]")
    run_checked(python, "-I", "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=source)
    words = ("ragged_decode_attention", "--shape", "cpu-b4-2k", "c=512", "--json")
    command = [str(python.parent / "ejk"), "explain", *words]
    env = clean_environment() | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, check=True)
    chosen = json.loads(done.stdout)["implementation"]
    assert chosen == "ragged_decode_attention/xla/cpu", chosen
    print(f"  {PLUG_IN.name}: {chosen}", flush=True)


STRANGER = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "ejkernel"
version = "9.9"
[tool.hatch.build.targets.wheel]
packages = ["ejkernel"]
"""


def try_with_other_project(wheels: dict[str, Path], folder: Path) -> None:
    """Another distribution called ejkernel, before and after ours: doctor's line repairs it."""
    source = folder.parent / "stranger"
    for name in ("", "modules", "types"):
        (source / "ejkernel" / name).mkdir(parents=True, exist_ok=True)
        (source / "ejkernel" / name / "__init__.py").write_text("")
    (source / "pyproject.toml").write_text(STRANGER)
    other = build_wheel(source)
    chosen = [wheels[name] for name in INSTALLED]
    python = new_environment(folder, chosen)
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps")
    for last in ([other], chosen):
        run_checked(*pip, other, cwd=folder.parent)
        run_checked(*pip, "--force-reinstall", *last, cwd=folder.parent)
        command = [str(folder / "bin" / "ejk"), "doctor"]
        done = subprocess.run(command, capture_output=True, text=True, env=clean_environment())
        assert done.returncode == 1, done.stdout
        repair = done.stdout.splitlines()[-1].strip()
        print(f"  {repair[:60]} ...", flush=True)
        run_checked("sh", "-c", repair, cwd=folder.parent)
        run_checked(*command, "--no-run", cwd=folder.parent)


def clean_environment() -> dict[str, str]:
    """Nothing of this environment's Python leaks into the clean one."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}


def main() -> int:
    workspace = release.read_workspace(release.ROOT)
    with tempfile.TemporaryDirectory(prefix="ejkernel-wheels-") as scratch:
        root = Path(scratch)
        wheels = {}
        for name, package in workspace.items():
            _, wheels[name] = release.build_checked(package, root / "dist")
        print("ejk-modules:", flush=True)
        try:
            python = try_set([workspace[name] for name in INSTALLED], wheels, root / "clean")
            print("an example of a kernel package:", flush=True)
            try_plug_in(python, root)
        except subprocess.CalledProcessError as error:
            print(f"failed: {' '.join(error.cmd[:4])} ...", file=sys.stderr)
            return 1
        print("beside another distribution called ejkernel:", flush=True)
        try_with_other_project(wheels, root / "beside")
    return 0


if __name__ == "__main__":
    sys.exit(main())
