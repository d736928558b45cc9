"""A picture of one run: each contender's share of the bound, case by case.

python -m bench.plot RESULTS.json ...      writes RESULTS.svg beside each
"""

from __future__ import annotations

import json
import pathlib
import re
import sys

from ejkernel.modules.bench.record import rates_text
from ejkernel.modules.cli import page, svg
from ejkernel.modules.cli.sections import bound_dots

HEAD = 52  # above the dots: what they are, and whose


def picture(result: dict) -> str:
    """The dots of ``ejk report`` as a file of its own, in the colours of its light page."""
    dots, colours = bound_dots([r for r in result["rows"] if r.get("ms") is not None])
    height = HEAD + int(dots.partition('height="')[2].partition('"')[0])
    made = f"{result['device']}, {result['date']}; {rates_text(result.get('limits', {}))}"
    style = page.style()
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {svg.WIDTH} {height}" '
        f'width="{svg.WIDTH}" height="{height}" font-family="sans-serif">',
        "<style>", *re.findall(r"svg [^{]*\{[^}]*\}", style), "</style>",
        '<rect width="100%" height="100%" fill="var(--card)"/>',
        svg.text(4, 16, f"{result['op']}: percent of the bound measured in the same run", "panel"),
        svg.text(4, 34, made, "tick"),
    ]  # fmt: skip
    x = svg.WIDTH - 12.0
    for name, colour in reversed(colours.items()):
        parts.append(svg.text(x, 16, name, anchor="end"))
        x -= 16 + 6.6 * len(name)
        parts.append(f'<circle cx="{x:g}" cy="12" r="5" fill="{colour}"/>')
        x -= 16
    parts += [dots.replace("<svg", f'<svg y="{HEAD}"', 1), "</svg>\n"]
    light = dict(re.findall(r"(--\w+):(#\w+)", style.partition("@media")[0]))
    return re.sub(r"var\((--\w+)\)", lambda found: light[found[1]], "\n".join(parts))


def write(path: pathlib.Path) -> pathlib.Path:
    """The picture of a JSON result, beside it."""
    result = path.with_suffix(".svg")
    result.write_text(picture(json.loads(path.read_text())), encoding="utf-8")
    return result


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(write(pathlib.Path(name)))
