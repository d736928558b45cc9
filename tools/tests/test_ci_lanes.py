"""The steps of ``.ci/run``: logs stay whole, a failure fails the run, an interrupt ends all."""

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest

LANES = Path(__file__).parents[2] / ".ci" / "lanes.sh"


def script(tmp_path, *lines):
    path = tmp_path / "run"
    path.write_text("\n".join(["set -uo pipefail", f". {LANES}", *lines]))
    return ["bash", str(path)]


def test_logs_are_whole_and_in_order(tmp_path):
    lines = [
        "a() { step 'a 1' echo first; step 'a 2' sleep 0.3; step 'a 3' echo third; }",
        "b() { step 'b' echo beside; }",
        "lanes a b",
        "lanes b",
        "summary 'a row'",
    ]
    done = subprocess.run(script(tmp_path, *lines), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = [line for line in done.stdout.splitlines() if line in ("first", "third", "beside")]
    assert shown == ["first", "third", "beside", "beside"]
    _, summary = done.stdout.split("=== summary\n")
    steps = [line.partition(" s  ")[2] for line in summary.splitlines() if line.startswith("ok")]
    assert steps == ["a 1", "a 2", "a 3", "b", "b"] and "\na row\n" in summary
    assert "all 5 steps passed" in summary


def test_a_lane_that_is_free_claims_the_next(tmp_path):
    lines = [
        'work() { for n in 1 2 3 4; do claim "$n" && step "$1 $n" sleep "$2"; done; }',
        "a() { work a 1.5; }",
        "b() { work b 0; }",
        "lanes a b",
        "summary",
    ]
    done = subprocess.run(script(tmp_path, *lines), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _, summary = done.stdout.split("=== summary\n")
    steps = [line.partition(" s  ")[2] for line in summary.splitlines() if line.startswith("ok")]
    assert sorted(step[2:] for step in steps) == ["1", "2", "3", "4"]
    assert [step[0] for step in steps] == ["a", "b", "b", "b"]


def test_failed_steps_and_lanes_that_died_fail_the_run(tmp_path):
    lines = [
        "a() { step 'a 1' sh -c 'exit 3'; step 'a 2' true; }",
        "b() { step 'b 1' true; kill -9 $BASHPID; }",
        "lanes a b",
        "have_passed || echo known",
        "summary",
    ]
    done = subprocess.run(script(tmp_path, *lines), capture_output=True, text=True)
    assert done.returncode == 1 and "\nknown\n" in done.stdout
    assert done.stdout.endswith("in: a 1 (status 3), lane b (status 137)\n")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_every_lane(tmp_path, sent):
    read_end, write_end = os.pipe()  # held open by all that the script starts
    lines = [
        f"a() {{ step a bash -c 'echo >&{write_end}; exec sleep 60'; step 'a 2' echo unreached; }}",
        # one that only a kill ends
        f"b() {{ step b bash -c 'trap \"\" INT; echo >&{write_end}; exec sleep 60'; }}",
        "grace=1",
        "lanes a b",
        "echo unreached",
    ]
    process = subprocess.Popen(
        script(tmp_path, *lines),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        pass_fds=[write_end],
    )
    os.close(write_end)
    assert os.read(read_end, 1) + os.read(read_end, 1) == b"\n\n"
    process.send_signal(sent)
    shown, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + sent and "unreached" not in shown
    assert "interrupted after" in shown
    assert select.select([read_end], [], [], 10)[0] and os.read(read_end, 1) == b""
    os.close(read_end)
