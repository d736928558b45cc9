"""Every operation has a page, and the examples on it run, one after the other."""

import re
from pathlib import Path

import jax
import pytest

from ejkernel.modules._table import OPERATIONS

PAGES = Path(__file__).parents[4] / "docs" / "operations"

pytestmark = pytest.mark.skipif(not PAGES.is_dir(), reason="the pages are in the repository only")


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_page_has_its_title_and_entry(operation):
    text = (PAGES / f"{operation}.md").read_text()
    assert text.startswith(f"# {operation}\n")
    assert f"[{operation}]({operation}.md)" in (PAGES / "README.md").read_text()
    entry = rf"\.\. api:: ejkernel\.modules\n\n +{operation}\b"
    assert re.search(entry, text), "arguments come from the docstring"
    code = re.findall(r"```python\n(.*?)```", text, re.S)
    assert code
    with jax.default_matmul_precision("highest"):
        exec(compile("\n".join(code), f"{operation}.md", "exec"), {"__name__": operation})
