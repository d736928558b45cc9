"""Checks of the built site: links inside it lead somewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Links of a page and the places that links may name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.links.append(value)
            elif name == "id" and value:
                self.anchors.add(value)


def broken_links(site: Path) -> list[tuple[str, str]]:
    """Returns page and target of each link inside the site that leads nowhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    return sorted({(str(p.relative_to(site)), link) for p, link in _broken(site, pages)})


def _broken(site: Path, pages: dict[Path, Page]) -> Iterator[tuple[Path, str]]:
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path
            if parts.path:
                target = Path(os.path.normpath(path.parent / unquote(parts.path)))
            if target in pages:
                is_known = unquote(parts.fragment) in pages[target].anchors
            else:
                is_known = target.is_relative_to(site) and target.is_file()
            if not is_known:
                yield path, link
