"""Names in scripts for a GPU exist, and parts that need no GPU work."""

from __future__ import annotations

import importlib
import itertools
import json
import multiprocessing
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkout
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.modules.workloads import call_of
from ejktest import ahead, at_size
from ejktest.cases import attention, grouped, latent, paged, ragged, sparse
from gpu import compare, compare_code, latency, machine_code, named, ratios, sweep


@pytest.fixture
def memory(monkeypatch):
    """``check_memory``, whose launches give zeros."""
    kinds = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "uint32")
    torch = SimpleNamespace(**dict.fromkeys(kinds), empty=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    names = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "XLA_PYTHON_CLIENT_PREALLOCATE", "JAX_PLATFORMS")
    for name in names:
        monkeypatch.setenv(name, "")  # which the script sets
    script = importlib.import_module("gpu.check_memory")
    yield script
    del sys.modules["gpu.check_memory"]


def test_memory_checkers_are_given_cases_that_exist(memory):
    lists = {
        memory.flash: attention.AT_SIZE,
        memory.sparse: attention.SPARSE,
        memory.paged: paged.CASES,
        memory.latent: latent.CASES,
        memory.ragged: ragged.CASES,
        memory.grouped: [case[:2] for case in grouped.CASES],
        memory.stored: grouped.STORED,
        memory.varied: memory.VARIANTS,
        memory.lists: sparse.CASES,
        memory.contiguous: [()],
        memory.branches: sparse.CASES,
        memory.full_chunks: [(False,), (True,)],
        memory.delta_rule: list(itertools.product((4, 200), (False, True))),
        memory.hopper_flash: attention.AT_SIZE,
        memory.hopper_sparse: attention.SPARSE,
        memory.hopper_grouped: list(itertools.product(grouped.SIZES, grouped.ALIGNED)),
        memory.hopper_ragged: ragged.HOPPER,
        memory.hopper_latent: latent.CASES,
    }
    for run, *case in memory.CALLS:
        cases = lists[run]
        named = isinstance(cases, dict) and cases is not memory.VARIANTS
        assert (case[0] if named else tuple(case[:2])) in cases, (run, case)


def test_calls_are_chosen_by_kind_or_by_name(memory):
    labels = [named.label(x) for x in named.chosen(memory.CALLS, ["contiguous", "latent e4m3"])]
    assert labels == ["latent e4m3", "contiguous"]
    assert named.chosen(memory.CALLS, []) == list(memory.CALLS)
    with pytest.raises(SystemExit, match="no such calls: latent e9; kinds are flash, sparse"):
        named.chosen(memory.CALLS, ["latent e9", "paged"])


@pytest.fixture
def launched(memory, monkeypatch):
    """The launches of calls outside of jit; every launch gives zeros."""
    launches = []

    def triton(*arrays, launch):
        launches.append(type(launch).__name__)
        return [jnp.zeros(o.shape, o.dtype) for o in launch.result_types()]

    def mosaic(*arrays, **params):
        launches.append(call := memory.alone.mosaic_call(arrays, params))
        return [jnp.zeros(call.results[i].shape, call.results[i].dtype) for i in call.returned]

    monkeypatch.setattr(memory.alone.bridge._primitive, "impl", triton)
    monkeypatch.setattr(memory.alone.mpmd.mpmd_map_p, "impl", mosaic)
    with compile_for(cuda_target(90, 132)), jax.disable_jit():
        yield launches


def test_calls_launch_outside_of_jit(memory, launched):
    """Under ``disable_jit`` every launch passes by where the script puts its own."""
    memory.grouped("some of eight", "bfloat16", True)
    assert len(launched) == 3
    memory.varied("mean_pooling", "whole")
    assert len(launched) == 5


def test_kernels_for_hopper_are_taken_out_of_their_programs(memory, launched):
    """With operands, scratch and what is written in place as XLA would hand them over."""
    memory.hopper_flash("one tile d128")
    forward, backward = launched
    assert forward.name == "flash_attention_forward" and forward.module[:4] == b"ML\xefR"
    assert [x.shape for x in forward.operands[:3]] == [(1, 128, 1, 128)] * 3
    assert (forward.aliases, forward.returned) == ({}, [0, 1, 2])
    counts = len(backward.operands) - 1  # of programs that have added to dq
    assert backward.aliases == {counts: 3} and backward.returned == [0, 1, 2]
    assert not backward.operands[counts].any()


@pytest.mark.parametrize("worker", [None, "gw3"])
def test_cases_begin_ahead_but_in_one_of_many_workers(monkeypatch, worker):
    """Each of a dozen workers would compute the cases of all of them."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if worker is not None:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    done = []
    callspecs = (SimpleNamespace(params={"name": name}) for name in "abc")
    items = [SimpleNamespace(path="here", callspec=x) for x in callspecs]
    request = SimpleNamespace(path="here", session=SimpleNamespace(items=items))
    with at_size.ahead(request, lambda name: done.append(name) or name * 2, 2) as case:
        assert case("b") == "bb"
    assert sorted(done) == (["a", "b", "c"] if worker is None else ["b"])


def test_a_worker_answers_each_case_it_is_asked(monkeypatch, capsys):
    cases = [("cpu-g8", "fwd"), ("no-such-case", "fwd")]
    monkeypatch.setattr(compare, "milliseconds", lambda program, arrays: program(*arrays).shape[1])
    ours, theirs = multiprocessing.Pipe()
    work = threading.Thread(
        target=compare.serve_times, args=(theirs, checkout.ROOT, "grouped_matmul", "xla", cases)
    )
    work.start()
    assert compare.answer(ours) == "ready"
    assert [compare.answer(ours, *question) for question in cases] == [1024, None]
    ours.close()
    work.join(30)
    assert not work.is_alive() and "no-such-case fwd: KeyError" in capsys.readouterr().err


@pytest.fixture
def table(monkeypatch, tmp_path):
    """``aot_table`` with two calls, and what compiling the ``n``-th of them finds."""
    script = importlib.import_module("gpu.aot_table")
    row = {"forward": {"registers": 100, "spills": 0}}
    path = tmp_path / "table.json"
    monkeypatch.setattr(script, "TABLE", path)
    monkeypatch.setattr(script.triton_calls, "cases", lambda: [("d64", "sm_90"), ("d128", "sm_80")])
    script.write(path, {"d64 @ sm_90": row, "d128 @ sm_80": row, "gone @ sm_80": row})

    def run(results: dict[int, object], *arguments: str) -> dict:
        def finished(jobs, workers):
            assert len(list(jobs)) == len(results)
            return iter(results.items())

        monkeypatch.setattr(script, "as_finished", finished)
        monkeypatch.setattr(sys, "argv", ["aot_table.py", *arguments])
        try:
            script.main()
        finally:
            rows = json.loads(path.read_text())["rows"]
        return rows

    return SimpleNamespace(run=run, row=row, path=path)


def test_table_ahead_of_time_tells_what_differs(table, capsys):
    changed = {"forward": {"registers": 120, "spills": 8}, "dq": {"registers": 90, "spills": 0}}
    rows = table.run({1: changed, 0: table.row})
    assert rows == {"d64 @ sm_90": table.row, "d128 @ sm_80": changed}
    told = capsys.readouterr().out
    assert "2 kernels differ" in told and "d64 @ sm_90 forward" not in told
    assert "d128 @ sm_80 forward: registers 100 -> 120, spills 0 -> 8" in told
    assert "d128 @ sm_80 dq: registers - -> 90, spills - -> 0" in told


def test_table_ahead_of_time_keeps_what_was_compiled(table):
    """A call that fails, or a run that ends early, takes nothing from the table."""
    changed = {"forward": {"registers": 120, "spills": 8}}
    with pytest.raises(SystemExit, match=r"1 calls failed, their rows stay: .*OutOfMemory"):
        table.run({0: "OutOfMemory: no", 1: changed})
    assert json.loads(table.path.read_text())["rows"] == {
        "d64 @ sm_90": table.row,
        "d128 @ sm_80": changed,
    }


def test_table_ahead_of_time_compiles_what_is_asked(table):
    changed = {"forward": {"registers": 120, "spills": 8}}
    assert table.run({0: changed}, "--targets", "sm_90")["d64 @ sm_90"] == changed
    before, out = table.path.read_text(), table.path.with_name("other.json")
    table.run({0: changed}, "d128", "--out", str(out))
    assert table.path.read_text() == before
    assert json.loads(out.read_text())["rows"]["d128 @ sm_80"] == changed
    with pytest.raises(SystemExit):
        table.run({}, "no such call")


def test_a_job_that_fails_gives_its_error():
    assert ahead.in_parallel([(divmod, 1, 0), (pow, 2, 3)]) == [
        "ZeroDivisionError: integer division or modulo by zero",
        8,
    ]


PTX = """
//
.version 8.7
.extern .shared .align 16 .b8 global_smem[];
.visible .entry {name}(.param .u64 .ptr .global .align 1 {name}_param_0)
{{
\t.loc\t1 {line} 5 // {name}.py:{line}
$L__tmp1:
\tld.param.b64 \t%rd1, [{name}_param_0]; // a comment
\tadd.s32 \t%r1, %r2, {added};
}}
\t.file\t1 "/somewhere/{name}.py"
\t.section\t.debug_abbrev
\t{{
.b8 {line}
\t}}
"""


def test_code_is_compared_without_names_and_places():
    def text(name, line, added):
        return compare_code.normalized_ptx(PTX.format(name=name, line=line, added=added))

    assert text("one", 3, 1) == text("another", 44, 1)
    assert text("one", 3, 1) != text("one", 3, 2)
    assert "one" not in text("one", 3, 1)
    assert ".debug" not in text("one", 3, 1)


def test_code_comparison_tells_which_launches_changed():
    def launches(name, code, *parameters):
        return [{"kernel": name, "code": code, "grid": [4], "parameters": list(parameters)}]

    before = launches("walk", "a1", "i32 5", "i32 7")
    assert list(compare_code.differences(before, launches("loop", "a1", "i32 5", "i32 7"))) == []
    (swapped,) = compare_code.differences(before, launches("walk", "a1", "i32 7", "i32 5"))
    assert "parameters" in swapped
    (changed,) = compare_code.differences(before, launches("walk", "b2", "i32 5", "i32 7"))
    assert changed.endswith("code")
    assert "1 launches, now 2" in next(compare_code.differences(before, before + before))


def test_a_dump_holds_every_launch(tmp_path):
    pytest.importorskip("triton")
    launches, texts = compare_code.triton_case("pooling", "sm_90")
    assert [launch["kernel"] for launch in launches] == ["pool_groups", "pool_backward"]
    assert len({launch["code"] for launch in launches}) == len(texts) == 2
    assert launches[0]["parameters"][0] == "operand bfloat16[8, 8192, 2048] *bf16"


def test_short_calls_are_timed_in_chains(monkeypatch, capsys):
    """Labels choose rows by words; a form that does not run has its error."""
    small = {
        "CALLS": 2,
        "ROUNDS": 1,
        "ROUND_S": 0.0,
        "LATENT_HEADS": 2,
        "LATENT_CASES": ((1, 128),),
        "CASES": ((2, 32),),
        "FORMS": {"mla": ("triton tiles=2",), "page": ()},
    }
    for name, value in small.items():
        monkeypatch.setattr(latency, name, value)
    assert latency.main(["mla", "default"]) == 0
    assert latency.main(["2 x 32", "contiguous"]) == 0
    assert latency.main(["2 x 32", "v3,v4"]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("mla 1 x 128 default") and " us, 0.15 MB" in first
    assert second.startswith("contiguous 2 x 32 ") and " us, 0.26 MB" in second
    assert third.startswith("v3 2 x 32 ") and " us, 0.26 MB" in third
    assert latency.main(["mla 1 x 128", "--form", "cuda"]) == 1
    timed, unknown, absent = capsys.readouterr().out.splitlines()
    assert " us, " in timed and "TypeError" in unknown and "tiles" in unknown
    assert "mla 1 x 128 cuda" in absent and "KeyError" in absent
    assert latency.main(["ml"]) == 2


def test_calls_are_timed_next_to_what_they_should_cost(monkeypatch, capsys):
    """Parts choose rows; one that does not run has its error."""
    small = {"SEQUENCES": 2, "CONTEXT": 64, "HEADS": 2, "KV_HEADS": 1, "DIM": 16, "ROUNDS": 1}
    for name, value in {**small, "ROUND_S": 0.0, "CONTINUATIONS": 3, "LONGEST": 8}.items():
        monkeypatch.setattr(ratios, name, value)
    assert ratios.named_call("gated_delta_rule", "delta-packed-64k").shape.sequences == 32
    monkeypatch.setattr(ratios, "named_call", lambda *_: {}["no-such-shape"])
    assert ratios.main(["tree of 8", "prefix"]) == 0
    tree, prefix = capsys.readouterr().out.splitlines()
    assert tree.startswith("tree of 8 ") and tree.endswith("aim 1.0  (host)")
    assert prefix.startswith("shared prefix ") and len(prefix.split()) == 6
    assert ratios.main(["delta step"]) == 1
    assert "KeyError: 'no-such-shape'" in capsys.readouterr().out
    assert ratios.main(["no such row"]) == 2


def test_ratios_of_flash_attention_compute_the_same(monkeypatch):
    """Rows of padded heads, of 8 bits and of pages give what is timed next to them."""
    sizes = {"batch": 1, "q_len": 64, "heads": 2, "kv_heads": 1}
    few = {"decodes": 1, "prefills": 1, "chunk": 32, "context": 48, "heads": 2, "kv_heads": 1}
    named_call = ratios.named_call

    def small(operation, name):
        shape = named_call(operation, name).shape
        return call_of(replace(shape, **(sizes if hasattr(shape, "q_len") else few)), operation)

    monkeypatch.setattr(ratios, "named_call", small)
    monkeypatch.setattr(ratios, "OPTIONS_PLATFORM", "xla")
    for row in ratios.FLASH:
        pair = row.make()
        out, plain = (jax.eval_shape(function, *arrays) for function, arrays in pair)
        assert jax.tree.structure(out) == jax.tree.structure(plain), row.name
        if "over" in row.name:  # the same function, with zeros
            out, plain = (jax.tree.leaves(function(*arrays)) for function, arrays in pair)
            for x, y in zip(out, plain, strict=True):
                np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (x, y)), atol=0.02)
        if "e4m3" in row.name:
            stored, plain = (arrays[1].dtype for _, arrays in pair)
            assert stored == "float8_e4m3fn" and plain == "bfloat16"
        if "bits" in row.name:
            assert pair[0][1][0].dtype == "float8_e4m3fn"
    assert len({row.name for row in ratios.ROWS}) == len(ratios.ROWS)


def test_forms_of_decoding_have_fields_of_tiles():
    from ejkernel.kernels.pallas import compat

    if (reason := compat.mosaic_gpu_problem()) is not None:
        pytest.skip(reason)
    from ejkernel.kernels.pallas.gpu.common.chip import Chip
    from ejkernel.types.serving.layout import KVLayout
    from ejkernel.types.serving.problem import LatentProblem

    p = LatentProblem(
        1, 128, 1, 576, 512, 64, 64, 64, *["bfloat16"] * 3, 576**-0.5, KVLayout.latent(576)
    )
    targets = {"pallas": Chip(), "triton": cuda_target(90)}
    for form in latency.FORMS["mla"]:
        platform, *pairs = form.split()
        tiles = latency.with_form("mla_decode", form).choose(p, targets[platform])
        assert {f"{name}={value}" for name, value in sweep.flat(tiles).items()} >= set(pairs)


# ---- machine code ------------------------------------------------------------------------------


def test_order_of_instructions_in_the_mainloop():
    """The inner of nested loops, without jumps back from behind it."""
    program = """
.L_x_1:
        /*0000*/                   MOV R1, R2 ;
.L_x_2:
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0020*/              @!P0 MUFU.EX2 R3, R3 ;
.L_x_3:
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
        /*0040*/              @!P0 BRA `(.L_x_4) ;
        /*0050*/               @P1 BRA `(.L_x_2) ;
        /*0060*/               @P2 BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
.L_x_4:
        /*0080*/                   BRA `(.L_x_3) ;
"""
    assert list(machine_code.loops(program)) == ["HESBB"]
