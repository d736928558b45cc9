"""Sphinx extension: links of the pages to files of the repository outside docs/.

The pages link to other files by relative paths, so that they can be read in a checkout. On the site
such a link leads to the page that shows the file; any other file becomes a download, and a folder
becomes its name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1`*$", re.MULTILINE | re.DOTALL)


def rewrite_link(match: re.Match[str], page: Path, docs: Path) -> str:
    """Returns a Markdown link as the site can have it."""
    text, target, anchor = match[1], match[2], match[3] or ""
    path = Path(os.path.normpath(page.parent / target))
    if ":" in target or (path.is_relative_to(docs) and not path.is_dir()):
        return match[0]
    if path.is_dir():
        index = path / "README.md"
        if path.is_relative_to(docs) and index.is_file():
            return f"[{text}]({os.path.relpath(index, page.parent)}{anchor})"
        return text
    if path.is_relative_to(ROOT) and str(path.relative_to(ROOT)) in PAGES:
        shown = docs / PAGES[str(path.relative_to(ROOT))]
        return f"[{text}]({os.path.relpath(shown, page.parent)}{anchor})"
    if path.is_file():
        return "{download}`" + text.replace("`", "") + f" <{target}>`"
    return match[0]  # the builder says that there is no such file


def rewrite_links(text: str, page: Path, docs: Path) -> str:
    """Returns a page with its links rewritten, blocks of code left as they are."""
    pieces, end = [], 0
    for fence in _FENCE.finditer(text):
        pieces += [(text[end : fence.start()], True), (fence[0], False)]
        end = fence.end()
    pieces.append((text[end:], True))
    return "".join(
        _LINK.sub(lambda m: rewrite_link(m, page, docs), piece) if prose else piece
        for piece, prose in pieces
    )


def read_source(app: Sphinx, docname: str, content: list[str]) -> None:
    """Rewrites the links of a page that Sphinx has read."""
    page = Path(app.env.doc2path(docname))
    if page.suffix == ".md":
        content[0] = rewrite_links(content[0], page, Path(app.srcdir))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", read_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
