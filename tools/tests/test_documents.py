"""What the documents say about the code, held against the code."""

import pkgutil
import re
from pathlib import Path

import pytest

import dev
import release
import tables

ROOT = Path(release.__file__).resolve().parent.parent


def test_every_operation_has_a_row():
    from ejkernel import modules
    from ejkernel.modules import operations

    listed = {function for function, *_ in tables.operations()}
    assert listed == {m.name for m in pkgutil.iter_modules(operations.__path__)}
    assert all(callable(getattr(modules, name)) for name in listed)


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *ROOT.glob("packages/*/README.md")], ids=lambda p: p.parent.name
)
def test_tables_say_what_is_registered(path):
    text = path.read_text()
    assert tables.render(text) == text, "out of date: run tools/tables.py --write"


def test_every_operation_runs_on_xla():
    assert all("xla" in found for found in tables.platforms().values()), tables.platforms()


def test_a_package_without_kernels_says_so(monkeypatch):
    monkeypatch.setattr(tables, "platforms", lambda: {"flash_attention": ["xla", "triton"]})
    assert "There are no kernels yet" in tables.kernels_of("pallas")
    assert tables.kernels_of("triton") == "Kernels:\n\n- `flash_attention`"
    assert "(docs/operations/flash_attention.md) |" in tables.operations_table()
    assert "| XLA, Triton |" in tables.operations_table()


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_commands_and_paths_in_the_documents_exist(document):
    text = (ROOT / document).read_text()
    for command in re.findall(r"tools/dev\.py ([a-z]+)", text):
        assert command in (*dev.COMMANDS, "help"), command
    for path in re.findall(r"`((?:tools|packages|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / document).parent / path).exists(), path


@pytest.mark.parametrize(
    "folder",
    sorted(p.parent for p in ROOT.glob("packages/*/pyproject.toml")),
    ids=lambda p: p.name,
)
def test_every_package_warns_of_the_other_project(folder):
    text = " ".join((folder / "README.md").read_text().split())
    assert "The distribution named `ejkernel` is another project" in text
    assert "do not install it beside these" in text


def test_the_files_of_an_operation_are_those_that_the_page_lists():
    """docs/writing-a-kernel.md counts what mean_pooling takes: the sources that name it are there."""
    text = (ROOT / "docs/writing-a-kernel.md").read_text()
    rows = re.findall(r"^\| `([\w./-]+)` \|.*\| (\d+) \|$", text, re.MULTILINE)
    listed = {path: int(lines) for path, lines in rows}
    for path, lines in listed.items():
        have = len((ROOT / path).read_text().splitlines())
        whole = "pooling" in path and "README" not in path
        assert abs(have - lines) <= 0.15 * lines + 2 if whole else have >= lines, (path, have)
    packages = ("types", "kernels-xla", "kernels-triton", "modules")
    naming = {
        str(path.relative_to(ROOT))
        for package in packages
        for path in (ROOT / f"packages/ejk-{package}/src").rglob("*.py")
        if re.search(r"mean_pooling|MeanPooling", path.read_text())
        and not {"workloads", "bench"} & set(path.parts)
    }
    assert naming <= listed.keys(), sorted(naming - listed.keys())
