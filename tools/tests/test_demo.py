"""The demo: packing, and a short run."""

from __future__ import annotations

import re

import numpy as np
import pytest

from demo import main
from demo_lm.text import documents, pack


def test_packing_keeps_every_byte_once():
    pieces = documents(512)
    data = pack(pieces, 512)
    assert (data.segment_ids >= 0).sum() == sum(map(len, pieces))
    row = data.segment_ids[0]
    for d in range(row.max() + 1):
        inside = data.positions[0][row == d]
        assert np.array_equal(inside, np.arange(len(inside)))


@pytest.mark.promotes
def test_a_run_of_one_step(tmp_path, capsys):
    words = ["--steps", "1", "--tokens", "2", "--prompt", "a", "--out", str(tmp_path)]
    assert main(words) == 0
    out = capsys.readouterr().out
    for step, name in (("training", "flash_attention"), ("decoding", "page_attention")):
        ran = rf"^  {step}  {name}/xla/any, .* from heuristics"
        assert re.search(rf"{ran}\n +not .*triton/gpu.*: it needs a gpu", out, re.MULTILINE), out
    assert (tmp_path / "loss.png").exists()


def test_numbers_of_steps_that_cannot_be(capsys):
    with pytest.raises(SystemExit):
        main(["--steps", "0"])
    assert "--steps: given 0, expected a number >= 1" in capsys.readouterr().err
