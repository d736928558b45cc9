"""Tests that need a GPU in several processes: here tests that need none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "gpu" / "run_tests.py"
TESTS = """
import os, time
import pytest

@pytest.mark.parametrize("number", range(6))
def test_passes(number): pass

def test_is_skipped(): pytest.skip("no reason")

@pytest.fixture
def broken():
    yield
    raise RuntimeError("torn down")

def test_fails(broken): assert 1 + 1 == 3

def test_loses_the_context(): raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

def test_ends_the_process(): os._exit(3)

def test_passes_at_last(): pass
"""


def run_script(
    tmp_path: Path, body: str, *options: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "test_of_a_gpu.py"
    file.write_text(body)
    command = [sys.executable, str(SCRIPT), "-m", "not gpu", "--processes", "2"]
    return subprocess.run([*command, *options, str(file)], capture_output=True, text=True, env=env)


def test_every_test_has_an_outcome(tmp_path):
    """One that ends its process or loses the GPU fails, and those after it run."""
    done = run_script(tmp_path, TESTS)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1].split()[1:5] == ["7", "3", "1", "0"]
    for test, reason in (
        ("fails", "assert (1 + 1) == 3"),
        ("loses_the_context", "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("ends_the_process", "process ended with 3"),
    ):
        assert any(
            line.startswith("FAILED") and f"test_{test} " in line and reason in line
            for line in done.stdout.splitlines()
        ), done.stdout


def test_a_file_that_cannot_be_imported_fails_and_others_run(tmp_path):
    (tmp_path / "test_other.py").write_text("def test_passes(): pass\n")
    done = run_script(tmp_path, "import no_such_module\n", str(tmp_path / "test_other.py"))
    assert done.returncode == 1 and "No module named 'no_such_module'" in done.stdout
    assert done.stdout.splitlines()[-1].split() == ["test_other.py", "1", "0", "0", "0", "0"]


def test_each_process_has_one_gpu_of_several(tmp_path):
    body = "import os, pytest\n\n"
    body += "@pytest.mark.parametrize('number', range(6))\n"
    body += "def test_sees_one(number): assert os.environ['CUDA_VISIBLE_DEVICES'] in ('5', '7')\n"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "5,7,9"}
    assert run_script(tmp_path, body, "--devices", "2", env=env).returncode == 0


def test_no_test_starts_after_the_limit(tmp_path):
    done = run_script(tmp_path, TESTS, "--seconds", "0.001")
    assert done.stdout.splitlines()[-1].split()[1:5] == ["0", "0", "0", "11"]
    assert done.returncode == 2


@pytest.mark.parametrize("body", ["import no_such_module", ""])
def test_nothing_to_run_is_a_failure(tmp_path, body):
    assert run_script(tmp_path, body).returncode == 1
