"""Checks of every distribution of the namespace: its version, its typing, a silent import.

The import is watched in a fresh interpreter, because the one running the tests has long imported
everything.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

PROBE = """
import importlib, json, os, sys
name, blocked = sys.argv[1], sys.argv[2:]
sys.modules.update(dict.fromkeys(blocked))
import jax
environment, config = dict(os.environ), dict(jax.config.values)
module = importlib.import_module(name)
registered = []
class Registry:
    def register(self, algorithm, platform, backend, *args, **kwargs):
        registered.append(f"{algorithm}/{getattr(platform, 'value', platform)}")
        return lambda function: function
    def register_lazy(self, algorithm, platform, backend, *args, **kwargs):
        self.register(algorithm, platform, backend)
    def add_config_table(self, path):
        pass
if hasattr(module, "register"):
    module.register(Registry())
print(json.dumps({
    "environment": sorted(k for k in set(environment) | set(os.environ)
                          if environment.get(k) != os.environ.get(k)),
    "config": sorted(k for k, v in jax.config.values.items() if config.get(k) != v),
    "triton": [m for m in ("triton", "jax_triton") if sys.modules.get(m) is not None],
    "device": sys.modules["jax._src.xla_bridge"].backends_are_initialized(),
    "siblings": sorted(m for m in sys.modules if m.startswith("ejkernel.")),
    "registered": registered,
}))
"""


def import_report(name: str, home: Path, *blocked: str) -> dict:
    """Import ``name`` alone in a new interpreter whose home and working folder are ``home``.

    ``blocked`` modules cannot be imported there. A kernel package's ``register`` is called too.
    """
    env = os.environ | {"HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, name, *blocked],
        cwd=home,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"files": [p.name for p in home.iterdir()]}


def check_portion(name: str, distribution: str) -> None:
    """The installed portion has a version that agrees with its metadata, and is typed."""
    module = importlib.import_module(name)
    assert module.__version__ == importlib.metadata.version(distribution)
    assert module.__doc__
    assert module.__file__ is not None
    folder = Path(module.__file__).parent
    assert (folder / "py.typed").is_file()
    parent = folder.parent
    while parent.name in ("kernels", "ejkernel"):
        assert not (parent / "__init__.py").exists(), f"{parent} must stay a namespace"
        assert not (parent / "py.typed").exists()
        parent = parent.parent


def check_silent_import(name: str, home: Path, *blocked: str, may_import: tuple[str, ...]) -> dict:
    """Importing changes nothing and starts nothing; of the siblings only ``may_import`` load."""
    report = import_report(name, home, *blocked)
    names = ("environment", "config", "triton", "files", "device")
    changed = {kind: report[kind] for kind in names}
    assert not any(changed.values()), changed
    allowed = (name, *may_import)
    strangers = [
        m for m in report["siblings"] if not any(m == a or m.startswith(a + ".") for a in allowed)
    ]
    assert [m for m in strangers if m != "ejkernel.kernels"] == []
    return report
