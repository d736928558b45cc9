"""Every operation has a page, and the example on it runs."""

import re
from pathlib import Path

import jax
import pytest

from ejkernel.modules._table import OPERATIONS

PAGES = Path(__file__).parents[4] / "docs" / "operations"

pytestmark = pytest.mark.skipif(not PAGES.is_dir(), reason="the pages are in the repository only")


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_page(operation):
    text = (PAGES / f"{operation}.md").read_text()
    assert text.startswith(f"# {operation}\n")
    assert f"[{operation}]({operation}.md)" in (PAGES / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    with jax.default_matmul_precision("highest"):
        exec(compile(code, f"{operation}.md", "exec"), {"__name__": operation})
