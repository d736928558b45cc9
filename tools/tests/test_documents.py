"""What the documents say about the code, held against the code."""

import pkgutil
import re
from pathlib import Path

import pytest

import dev
import release

ROOT = Path(release.__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def section(title):
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def listed():
    rows = [line.split("|")[1] for line in section("Operations").splitlines() if "|" in line]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_the_readme_lists_every_operation():
    from ejkernel import modules
    from ejkernel.modules import operations

    assert listed() == {m.name for m in pkgutil.iter_modules(operations.__path__)}
    assert all(callable(getattr(modules, name)) for name in listed())


@pytest.mark.parametrize("platform", ["triton", "pallas"])
def test_the_readme_does_not_hide_or_invent_kernels(platform):
    from ejkernel.ops import kernel_registry as registry

    has_kernels = any(
        implementation.platform.value == platform
        for algorithm in registry.list_algorithms()
        for implementation in registry.list_implementations(algorithm)
    )
    text = (ROOT / f"packages/ejk-kernels-{platform}/README.md").read_text()
    assert ("There are no kernels yet" in text) != has_kernels


def test_every_operation_runs_on_xla():
    from ejkernel.ops import kernel_registry as registry

    for algorithm in registry.list_algorithms():
        platforms = {i.platform.value for i in registry.list_implementations(algorithm)}
        assert "xla" in platforms, algorithm


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_commands_and_paths_in_the_documents_exist(document):
    text = (ROOT / document).read_text()
    for command in re.findall(r"tools/dev\.py ([a-z]+)", text):
        assert command in (*dev.COMMANDS, "help"), command
    for path in re.findall(r"`((?:tools|packages|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / document).parent / path).exists(), path


@pytest.mark.parametrize("folder", sorted(ROOT.glob("packages/*")), ids=lambda p: p.name)
def test_every_package_warns_of_a_foreign_namespace(folder):
    assert "regular package named" in (folder / "README.md").read_text().replace("\n", " ")
