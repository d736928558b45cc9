"""What all programs in docs/examples share, their notebook, and a sequence over devices."""

import ast
import contextlib
import importlib
import io
import json
import pathlib
import runpy
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from ejktest.examples import FOLDER, is_png, load_example

PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py"))
FRAMEWORKS = {"flax", "optax", "equinox", "sklearn"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_need_public_names_alone(name):
    """A program that is copied elsewhere finds what it imports."""
    allowed = sys.stdlib_module_names | FRAMEWORKS | {"jax", "numpy", "matplotlib"}
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            assert all(alias.name.split(".")[0] in allowed for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("ejkernel."):
            exported = importlib.import_module(node.module).__all__
            assert node.module.count(".") == 1
            assert {alias.name for alias in node.names} <= set(exported)
        elif isinstance(node, ast.ImportFrom):
            assert node.module.split(".")[0] in allowed


def test_every_program_is_listed():
    text = (FOLDER / "README.md").read_text()
    assert all(f"[{path.name}]({path.name})" in text for path in FOLDER.glob("*.*py*"))


def run_as_program(monkeypatch, name, *words):
    """Returns the status or the sentence with which a program leaves, and what it prints."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as left:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return left.value.code, errors.getvalue()


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "package", "owner", "attribute"),
    [
        ("gpt_flax", "flax", np.random, "default_rng"),
        ("vit_equinox", "equinox", np.random, "default_rng"),
        ("embeddings", "json", pathlib.Path, "is_file"),
    ],
)
def test_wrong_words_and_interrupts_end_in_a_sentence(
    monkeypatch, name, package, owner, attribute, tmp_path
):
    pytest.importorskip(package)
    option = "--sentences" if name == "embeddings" else "--steps"
    status, printed = run_as_program(monkeypatch, name, option, "0")
    assert status == 2 and printed.endswith(f"{option}: given 0, expected a number >= 1\n")
    status, printed = run_as_program(monkeypatch, name, "--picture", str(tmp_path / "no" / "a.png"))
    assert status == 2 and printed.endswith("no/a.png, expected a .png in a folder that exists\n")
    monkeypatch.setattr(owner, attribute, interrupt)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", SimpleNamespace(load_digits=interrupt))
    words = ["--weights", str(tmp_path)] if name == "embeddings" else []
    assert run_as_program(monkeypatch, name, *words) == (130, f"{name}.py: stopped\n")


@pytest.mark.parametrize(
    ("name", "module", "install"),
    [("gpt_flax", "flax", "flax"), ("vit_equinox", "equinox", "equinox")],
)
def test_a_framework_that_is_missing_is_named(monkeypatch, name, module, install):
    monkeypatch.setitem(sys.modules, module, None)
    said, _ = run_as_program(monkeypatch, name)
    assert said == f"{name}.py needs {module}: pip install {install}"


def test_one_sequence_over_devices(tmp_path, capsys):
    example = load_example("long_context")
    picture = tmp_path / "long.png"
    reports = example.main(256, 4, heads=4, kv_heads=2, dim=8, picture=str(picture))
    expected = {
        "ring": {"collective-permute"},
        "all_gather": {"all-gather", "reduce-scatter"},
        "ulysses": {"all-to-all"},
    }
    one = reports["one device"]
    assert not one.collectives and one.error == 0
    for strategy, collectives in expected.items():
        report = reports[strategy]
        assert set(report.collectives) == collectives, strategy
        assert 0 <= report.error < 1e-5 and report.temporary < one.temporary / 2
        assert abs(report.held - one.held / 4) < 64  # addresses of the results
    said = capsys.readouterr().out
    assert "auto is ulysses" in said and "collective-permute" in said
    assert is_png(picture)
    with pytest.raises(ValueError, match="given 100 and 8, expected multiples of 8"):
        example.main(100)
    with pytest.raises(ValueError, match="--devices: given 1000, there are 8"):
        example.main(1000, 1000)


def test_the_long_context_makes_its_devices(tmp_path):
    copy = tmp_path / "program.py"
    copy.write_text((FOLDER / "long_context.py").read_text())
    command = [sys.executable, str(copy), "--devices", "2", "--length"]
    runs = [
        subprocess.Popen(
            [*command, length],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for length in ("64", "65")
    ]
    (said, errors), (_, failed) = (run.communicate() for run in runs)
    assert runs[0].returncode == 0, errors
    assert "64 tokens, forward and backward; of each device" in said
    assert is_png(tmp_path / "long_context.png")
    assert runs[1].returncode == 1
    assert (
        failed.startswith("long_context.py: --length and heads: given 65")
        and failed.count("\n") == 1
    )


@pytest.mark.promotes
def test_the_notebook_runs(capsys):
    """Without its outputs in the repository; what it claims, its cells assert."""
    notebook = json.loads((FOLDER / "first_notebook.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) == 4
    namespace: dict = {}
    for cell in cells:
        assert cell["outputs"] == [] and cell["execution_count"] is None
        exec("".join(cell["source"]), namespace)
    said = capsys.readouterr().out
    assert (
        said.count("tokens: differ by") == 3 and "implementation  flash_attention/xla/any" in said
    )
