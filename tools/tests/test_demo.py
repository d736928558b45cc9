"""The demo's pieces: packing, and every operation shown beside its oracle."""

from __future__ import annotations

import re

import numpy as np
import pytest

from demo_lm.single import SHOWN, show
from demo_lm.text import documents, pack


def test_packing_keeps_every_byte_once():
    pieces = documents(512)
    data = pack(pieces, 512)
    assert (data.segment_ids >= 0).sum() == sum(map(len, pieces))
    row = data.segment_ids[0]
    for d in range(row.max() + 1):
        inside = data.positions[0][row == d]
        assert np.array_equal(inside, np.arange(len(inside)))


@pytest.mark.parametrize("op", ["page_attention", "mean_pooling", "grouped_matmul"])
def test_an_operation_is_shown_with_its_error(op, capsys):
    show(op)
    text = capsys.readouterr().out
    assert float(re.search(r"rms ratio (\S+) against", text)[1]) < 1e-5
    assert "/xla/any" in text


@pytest.mark.slow
@pytest.mark.parametrize("op", SHOWN)
def test_every_operation(op, capsys):
    show(op)
    assert float(re.search(r"rms ratio (\S+) against", capsys.readouterr().out)[1]) < 1e-5
