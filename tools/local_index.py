"""A package index on the loopback device, for rehearsing what users will install.

It serves the "simple" pages of one folder of distributions, with the SHA-256 of every file. The
folder may change while it is served.
"""

from __future__ import annotations

import contextlib
import html
import re
import threading
from collections.abc import Generator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from distribution_files import sha256

DISTRIBUTION = re.compile(r"(?P<name>.+?)-\d.*\.(whl|tar\.gz)$")


def by_project(folder: Path) -> dict[str, list[Path]]:
    """Returns the distributions by their projects' normalized names."""
    projects_by_name: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := DISTRIBUTION.match(path.name):
            name = re.sub(r"[-_.]+", "-", match["name"]).lower()
            projects_by_name.setdefault(name, []).append(path)
    return projects_by_name


def page(links: dict[str, str]) -> bytes:
    """Returns a page of links: text by address."""
    lines = (f'<a href="{html.escape(a)}">{html.escape(t)}</a><br>' for a, t in links.items())
    return "\n".join(("<!DOCTYPE html><html><body>", *lines, "</body></html>")).encode()


class Handler(BaseHTTPRequestHandler):
    """Answers for ``/simple/``, ``/simple/PROJECT/`` and ``/files/NAME``."""

    def __init__(self, folder: Path, *args, **options) -> None:
        self.folder = folder
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        where, _, name = self.path.strip("/").partition("/")
        projects = by_project(self.folder)
        files = {path.name: path for paths in projects.values() for path in paths}
        if where == "simple" and not name:
            self.answer(page({f"/simple/{project}/": project for project in projects}))
        elif where == "simple" and name in projects:
            links = {f"/files/{p.name}#sha256={sha256(p)}": p.name for p in projects[name]}
            self.answer(page(links))
        elif where == "files" and name in files:
            self.answer(files[name].read_bytes(), "application/octet-stream")
        else:
            self.send_error(404)

    def answer(self, body: bytes, kind: str = "text/html") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")  # the folder changes
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: installers ask for every project that they know."""


@contextlib.contextmanager
def serve(folder: Path) -> Generator[str]:
    """Within the block, the folder is an index; gives the address of its simple pages."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, folder))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
