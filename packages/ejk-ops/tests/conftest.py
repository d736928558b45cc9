"""Each test starts without variables of ours and without remembered warnings."""

import pytest

from ejkernel.ops import env
from ejkernel.ops.errors import reset_warnings


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch, tmp_path):
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "default_cache"))
    reset_warnings()
    yield
    reset_warnings()
