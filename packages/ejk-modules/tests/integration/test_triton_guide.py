"""The Triton kernel of docs/writing-a-kernel.md, as the page shows it."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

import ejkernel.kernels.triton as triton_kernels
import ejkernel.kernels.xla as xla_kernels
from ejkernel.modules import MeanPooling, MeanPoolingConfig
from ejkernel.ops import ConfigSelectorChain, Executor, KernelRegistry, interpret_mode

PAGE = Path(__file__).parents[4] / "docs" / "writing-a-kernel.md"


@pytest.fixture
def trial(tmp_path, monkeypatch):
    """Writes the package's files, and returns the page's code that tries them."""
    section = PAGE.read_text().partition("## A kernel in Triton\n")[2].partition("\n## ")[0]
    kernel, package, trial, *_ = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    folder = tmp_path / "short_means"
    folder.mkdir()
    (folder / "kernel.py").write_text(kernel)
    (folder / "__init__.py").write_text(package)
    monkeypatch.syspath_prepend(tmp_path)
    yield trial
    for name in ("short_means", "short_means.kernel"):
        sys.modules.pop(name, None)


def test_the_page_tries_its_kernel(trial):
    exec(compile(trial, str(PAGE), "exec"), {"jax": jax, "jnp": jnp, "np": np})


def test_the_kernel_takes_the_place_of_the_librarys(trial):
    registry = KernelRegistry()
    for package in (xla_kernels, triton_kernels, importlib.import_module("short_means")):
        package.register(registry)
    kernel = MeanPooling(registry=registry)
    executor = Executor(ConfigSelectorChain(autotune=False))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 40, 20)), jnp.float32)
    cfg = MeanPoolingConfig(platform="triton", token_tile=16, channel_tile=32)
    with interpret_mode():
        np.testing.assert_allclose(executor(kernel, x, cfg=cfg), x.mean(1), atol=1e-6)
        with pytest.raises(NotImplementedError, match="chunk_size: not supported"):
            executor(kernel, x, platform="triton", chunk_size=5)
    assert "short_means.kernel" in sys.modules
