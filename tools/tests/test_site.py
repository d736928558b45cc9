"""Links and entries of the site."""

import importlib
import re
from pathlib import Path

import pytest

import site_check
import site_links

DOCS = site_links.ROOT / "docs"


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("masks.md", "[a](sharding.md#serving)", "[a](sharding.md#serving)"),
        ("masks.md", "[a](../CONTRIBUTING.md#tests)", "[a](contributing.md#tests)"),
        ("operations/README.md", "[a](../../README.md)", "[a](../index.md)"),
        ("masks.md", "[a](examples)", "[a](examples/README.md)"),
        ("install.md", "[a](../packages/ejk-ops)", "a"),
        ("masks.md", "[`a`](../tools/dev.py)", "{download}`a <../tools/dev.py>`"),
        ("masks.md", "[a](https://b.c)", "[a](https://b.c)"),
        ("masks.md", "![a](../LICENSE) [a](../no.md)", "![a](../LICENSE) [a](../no.md)"),
        ("masks.md", "```\n[a](../LICENSE)\n```\n", "```\n[a](../LICENSE)\n```\n"),
    ],
)
def test_links_that_leave_the_docs(page, text, expected):
    assert site_links.rewrite_links(text, DOCS / page, DOCS) == expected


def test_broken_links_are_found(tmp_path: Path):
    (tmp_path / "a.html").write_text(
        '<p id="x"><a href="#x"></a><a href="#y"></a><a href="b.html#z"></a><a href="c.html"></a>'
        '<a href="b.html?q=1#%7A"></a><a href="https://b.c/d"></a><img src="d.svg"></p>'
    )
    (tmp_path / "b.html").write_text('<p id="z"><a href="../e.html"></a></p>')
    assert site_check.broken_links(tmp_path) == [
        ("a.html", "#y"),
        ("a.html", "c.html"),
        ("a.html", "d.svg"),
        ("b.html", "../e.html"),
    ]


def test_every_public_name_has_one_entry():
    """The blocks of the pages name all that the packages export, and nothing else."""
    listed: dict[str, list[str]] = {}
    for page in DOCS.rglob("*.md"):
        blocks = re.findall(r"^\.\. api:: (\S+)\n\n((?: +.*\n)+)", page.read_text(), re.M)
        for module, names in blocks:
            listed.setdefault(module, []).extend(names.split())
    folders = sorted(site_links.ROOT.glob("packages/*/src/ejkernel/**/_version.py"))
    packages = [".".join(f.parent.parts[f.parts.index("src") + 1 :]) for f in folders]
    assert len(packages) == 6
    exported = {name: sorted(importlib.import_module(name).__all__) for name in packages}
    pages = {module: sorted(names) for module, names in listed.items()}
    assert pages == exported, "list the name in an `api` block of its page or of docs/reference"


def test_pages_with_arguments_do_not_repeat_them():
    for page in (DOCS / "operations").glob("*.md"):
        text = page.read_text()
        assert ".. api::" in text or page.name == "README.md"
        assert "| argument | form" not in text and "| option | default" not in text, page.name
