"""Build the site from docs/ and the docstrings into .venv/site, and fail on any warning.

    site_build.py            build everything
    site_build.py --serve    build, then serve it on this machine until interrupted

The build needs no network. With EJKERNEL_DOCS_INVENTORIES=1 names of JAX, Flax and Equinox link to
their sites, whose inventories are then downloaded.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import os
import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import build_main

import site_check

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / ".venv" / "site"
DOCTREES = ROOT / ".venv" / "site-doctrees"


def build_site() -> int:
    """Builds the site; returns 0 if there was no warning."""
    for folder in (SITE, DOCTREES):
        shutil.rmtree(folder, ignore_errors=True)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    options = ["-b", "html", "-d", str(DOCTREES), "-W", "--keep-going", "-q", "-j", "auto"]
    status = build_main([*options, str(ROOT / "docs"), str(SITE)])
    if status:
        return status
    broken = site_check.broken_links(SITE)
    for page, link in broken:
        print(f"{page}: {link}: there is no such file or place", file=sys.stderr)
    pages = sum(1 for _ in SITE.rglob("*.html"))
    index = SITE.relative_to(ROOT) / "index.html"
    print(f"{pages} pages, no warnings, {len(broken)} broken links: {index}")
    return int(bool(broken))


def serve_site(port: int) -> None:
    """Serves the built site to this machine alone."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", action="store_true", help="serve the site after the build")
    parser.add_argument("--port", type=int, default=8000, help="of --serve (default 8000)")
    options = parser.parse_args(argv)
    status = build_site()
    if status == 0 and options.serve:
        serve_site(options.port)
    return status


if __name__ == "__main__":
    sys.exit(main())
