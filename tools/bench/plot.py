"""Chart of one run: each contender's percent of the bound, case by case.

python -m bench.plot RESULTS.json ...      writes RESULTS.svg next to each
"""

from __future__ import annotations

import json
import pathlib
import sys

from ejkernel.modules.bench.record import rates_text
from ejkernel.modules.cli.charts import bound_chart


def write_chart(path: pathlib.Path) -> pathlib.Path:
    """Draws the result in a JSON file and returns the path of the SVG."""
    result = json.loads(path.read_text())
    title = (
        f"{result['op']}: percent of the bound measured in the same run\n"
        f"{result['device']}, {result['date']}; {rates_text(result.get('limits', {}))}"
    )
    drawing = path.with_suffix(".svg")
    timed = [r for r in result["rows"] if r.get("ms") is not None]
    drawing.write_text(bound_chart(timed, title), encoding="utf-8")
    return drawing


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(write_chart(pathlib.Path(name)))
