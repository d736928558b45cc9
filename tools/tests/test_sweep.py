"""The sweep times what it says, compares values, and knows the tiles of every kind of kernel."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

from ejkernel.kernels.xla.grouped_matmul.implementation import GroupedMatmul
from ejkernel.modules.workloads import call_of
from ejkernel.modules.workloads.families import AttentionShape, GroupedShape
from ejktest.device import described
from ejktest.triton_calls import traced_launches
from gpu import sweep

TINY = GroupedShape("tiny", 256, 16, 16, 4, "float32", device="cpu")
WORDS = ["grouped_matmul", "--platform", "xla", "--rounds", "2"]


@pytest.fixture(autouse=True)
def one_case(monkeypatch):
    monkeypatch.setattr(sweep, "calls_here", lambda *_: [call_of(TINY)])


def test_candidates_are_timed_with_the_shipped_config(capsys):
    assert sweep.main([*WORDS, "--limit", "2"]) == 0
    first, *rows, _, _, last = capsys.readouterr().out.splitlines()
    assert first == "tiny fwd, grouped_matmul/xla/any: 3 timed, 0 did not run"
    assert sorted(row.split("  ")[-1].strip() for row in rows) == [
        "block_m=128",
        "block_m=32",
        "ships: block_m=64",
    ]
    assert last.startswith("tiny ") and float(last.split()[3]) >= 1.0


def test_wrong_values_and_what_does_not_run_are_told(capsys, monkeypatch):
    plain = GroupedMatmul.forward

    def spoiled(self, work, arrays):
        if work.tiles.block_m == 48:
            raise ValueError("no such tile")
        (out,), saved = plain(self, work, arrays)
        return (out * (1.1 if work.tiles.block_m == 32 else 1.0),), saved

    monkeypatch.setattr(GroupedMatmul, "forward", spoiled)
    assert sweep.main([*WORDS, "--set", "block_m=48,32,128"]) == 1
    told = capsys.readouterr().out
    assert "2 timed, 1 did not run" in told and "did not run: block_m=48: ValueError" in told
    assert "WRONG: block_m=32: output has other values" in told
    assert sweep.main([*WORDS, "--set", "block_k=8"]) == 2
    assert "grouped_matmul/xla/any has block_m" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sweep.main([*WORDS, "--set", "block_m"])


def test_given_combinations_and_bits_that_differ(capsys, monkeypatch):
    assert sweep.main([*WORDS, "--bits", "--try", "block_m=32"]) == 0
    assert "tiny fwd, grouped_matmul/xla/any: 2 timed" in capsys.readouterr().out
    monkeypatch.setattr(sweep, "repeats", lambda *_: False)
    assert sweep.main([*WORDS, "--bits", "--try", "block_m=32"]) == 1
    assert "WRONG: block_m=64: two runs gave different bits" in capsys.readouterr().out
    assert sweep.main([*WORDS, "--try", "block_m=32,block_k=8"]) == 2
    assert "--set or --try block_k: grouped" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sweep.main([*WORDS, "--try", "block_m"])


def test_any_field_of_a_kernels_tiles():
    """Also those that no config can say, in the pass that is swept alone."""
    call = call_of(AttentionShape("s", 1, 1024, 2, 2, 64), "flash_attention")
    with described("NVIDIA H200", "gpu", 132):
        subject = sweep.subject_of(call, "triton")
        assert subject.name == "flash_attention/triton/gpu"
        for pass_name, groups in (("fwd", {"fwd"}), ("bwd", {"dq", "dkv"})):
            labels = list(subject.candidates(pass_name, {}, 40))[1:]
            assert len(labels) > 2
            assert {x.partition(".")[0] for label in labels for x in label.split()} == groups
        candidates = subject.candidates("bwd", {"dkv.registers": [96, 128], "dq.block_q": [32]}, 40)
        assert list(candidates)[1:] == [f"dkv.registers={n} dq.block_q=32" for n in (96, 128)]
        function = list(candidates.values())[-1]
        arrays = [call.abstract()[name] for name in call.names]
        program = jax.make_jaxpr(lambda *x: jax.vjp(function, *x)[1](x[0]))(*arrays)
        hopper = sweep.subject_of(call, "pallas")
        assert len(hopper.candidates("fwd", {}, 40)) > 2
        assert len(hopper.candidates("bwd", {}, 40)) == 1  # none that nobody vouches for
        requested = {"bwd.pipelined": not hopper.ships.bwd.pipelined, "bwd.dq_stages": 7}
        _, label = hopper.candidates("bwd", {}, 40, [requested])
        assert label == " ".join(f"{path}={value}" for path, value in requested.items())
    launches = {type(launch).__name__: launch.tiles for launch, _ in traced_launches(program.jaxpr)}
    assert launches["DkvLaunch"] == replace(subject.ships.dkv, registers=128)
    assert launches["DqLaunch"] == replace(subject.ships.dq, block_q=32)
    assert launches["ForwardLaunch"] == subject.ships.fwd
