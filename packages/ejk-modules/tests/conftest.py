"""Fixtures of several test files."""

import pytest

from ejkernel.modules.cli.report import LIBRARIES


@pytest.fixture(scope="session")
def report_libraries():
    """Skips tests of pages where ``ejk report`` lacks a library.

    A session's fixture runs first: at its first import matplotlib asks another program for fonts,
    which some tests forbid.
    """
    for name in LIBRARIES:
        pytest.importorskip(name)
    pytest.importorskip("matplotlib.font_manager")
