import warnings
from types import SimpleNamespace

import pytest

from ejkernel.ops import (
    Backend,
    Implementation,
    KernelNotFound,
    KernelNotSupported,
    KernelRegistry,
    KernelSpec,
    Platform,
    interpret_mode,
    kernel_registry,
)
from ejktest.device import H200, described, on


def mi300():
    return described("AMD Instinct MI300X", "gpu", 304)


def v5e():
    return described("TPU v5 lite", "tpu", 1)


def add(registry, platform, backend, priority=0, algorithm="op", **options):
    @registry.register(algorithm, platform, backend, priority, **options)
    def op(q, k, bias=None, *, causal=False, cfg=None):
        return platform

    return op


def test_register_returns_the_function_and_get_finds_it(registry):
    op = add(registry, "xla", "any", algorithm="Op")
    assert registry.get("OP") is registry.get("op", "XLA") is registry.get("op", "auto") is op
    assert registry.get("op", Platform.XLA, Backend.ANY) is op
    (record,) = registry.list_implementations("oP")
    assert isinstance(record, Implementation) and KernelSpec is Implementation
    assert (record.algorithm, record.platform, record.backend) == ("op", "xla", "any")
    assert record.fn is op and record.differentiable and record.version == 1
    with pytest.raises(AttributeError):
        record.priority = 3


def test_auto_takes_what_the_hardware_can_run(registry):
    xla = add(registry, "xla", "any")
    triton = add(registry, "triton", "gpu", 100)
    tpu = add(registry, "pallas", "tpu", 100)
    mosaic = add(registry, "pallas", "gpu", 50)
    cuda = add(registry, "cuda", "gpu", 120)
    assert registry.get("op") is xla
    with on(H200):
        assert registry.get("op") is cuda
        assert registry.get("op", "triton") is triton
        assert registry.get("op", "pallas") is mosaic
        assert registry.get("op", "xla") is xla
    with mi300():
        assert registry.get("op") is triton
        with pytest.raises(KernelNotSupported, match="NVIDIA"):
            registry.get("op", "cuda")
    with v5e():
        assert registry.get("op") is tpu is registry.get("op", "pallas")


def test_ties_go_to_the_native_platform_then_to_the_first(registry):
    add(registry, "cuda", "gpu", 50)
    add(registry, "pallas", "gpu", 50)
    with on(H200):
        assert registry.get("op")(0, 0) == "cuda"
        add(registry, "triton", "gpu", 50)
        assert registry.get("op")(0, 0) == "triton"
    first = add(registry, "xla", "any")
    add(registry, "xla", "cpu")  # of the same priority: naming the device makes no difference
    assert registry.get("op") is first


def test_backend_filters(registry):
    xla = add(registry, "xla", "any")
    special = add(registry, "xla", "cpu", 10)
    assert registry.get("op") is special
    assert registry.get("op", backend="cpu") is special
    assert registry.get("op", backend="gpu") is xla
    with on(H200):
        assert registry.get("op") is xla


def test_supports_is_asked_for_the_call(registry):
    add(registry, "xla", "any", supports=lambda inv: None)
    add(registry, "xla", "cpu", 10, supports=lambda inv: "no bias" if inv == "bias" else None)
    assert registry.resolve("op", inv="bias").backend == "any"
    assert registry.resolve("op", inv="plain").backend == "cpu"
    assert registry.resolve("op").backend == "cpu"
    survey = registry.survey("op", inv="bias")
    assert [(i.backend.value, reason) for i, reason in survey.refused] == [("cpu", "no bias")]


def test_auto_with_nobody_supporting_gives_every_reason(registry):
    add(registry, "xla", "any", supports=lambda inv: "bias must be rank 4")
    add(registry, "triton", "gpu", 100)
    with pytest.raises(KernelNotSupported) as caught:
        registry.get("op", inv=object())
    assert "bias must be rank 4" in str(caught.value) and "needs a gpu" in str(caught.value)
    assert caught.value.algorithm == "op" and caught.value.platform is None


def test_forced_platform_never_falls_through(registry):
    add(registry, "xla", "any")
    add(registry, "triton", "gpu", 100, supports=lambda inv: "no gradient of a dense bias")
    with on(H200), pytest.raises(KernelNotSupported) as caught:
        registry.get("op", "triton", inv=object())
    error = caught.value
    assert (error.algorithm, error.platform, error.argument) == ("op", "triton", "bias")
    assert (error.reason, error.nearest) == ("no gradient of a dense bias", "xla")


def test_forced_platform_without_its_hardware_names_the_device(registry):
    add(registry, "xla", "any")
    add(registry, "triton", "gpu", 100)
    with pytest.raises(KernelNotSupported, match=r"needs a gpu.*cpu") as caught:
        registry.get("op", "triton")
    assert (caught.value.argument, caught.value.nearest) == ("platform", "xla")


def test_a_forced_platform_names_the_reason_of_the_call_before_the_hardware(registry):
    add(registry, "xla", "any")
    add(registry, "triton", "gpu", 100, supports=lambda inv: f"bias: {inv.why}")
    inv = SimpleNamespace(arguments={"q": 0, "bias": 1}, why="no gradient of a dense one")
    with pytest.raises(KernelNotSupported) as caught:
        registry.get("op", "triton", inv=inv)
    reason, hardware = caught.value.reason.split("; besides, ")
    assert reason == "bias: no gradient of a dense one" and hardware.startswith("it needs a gpu")
    assert (caught.value.argument, caught.value.nearest) == ("bias", "xla")


@pytest.mark.parametrize("answer", ["no such device", ZeroDivisionError], ids=str)
def test_the_hardware_a_forced_platform_needs_is_named_once(registry, answer):
    def supports(inv):
        if isinstance(answer, str):
            return answer
        raise answer

    add(registry, "triton", "gpu", 100, supports=supports)
    with warnings.catch_warnings(), pytest.raises(KernelNotSupported) as caught:
        warnings.simplefilter("error")
        registry.get("op", "triton", inv=SimpleNamespace(arguments={"q": 0}))
    assert caught.value.reason.startswith("it needs a gpu") and caught.value.argument == "platform"


def test_advice_for_two_kernels_of_a_platform_stands_once_at_the_end(registry):
    add(registry, "pallas", "gpu")
    add(registry, "pallas", "tpu")
    with pytest.raises(KernelNotSupported) as caught:
        registry.get("op", "pallas")
    reason = caught.value.reason
    assert "needs a gpu" in reason and "needs a tpu" in reason
    assert reason.count("EJKERNEL_INTERPRET=1") == 1
    assert reason.endswith("; EJKERNEL_INTERPRET=1 runs it in an interpreter")
    assert caught.value.argument == "platform"


def test_interpretation_serves_forced_platforms_only(registry, monkeypatch):
    xla = add(registry, "xla", "any")
    mosaic = add(registry, "pallas", "gpu", 50)
    tpu = add(registry, "pallas", "tpu", 50)
    triton = add(registry, "triton", "gpu", 100)
    add(registry, "cuda", "gpu", 100)
    with interpret_mode():
        assert registry.get("op") is xla
        assert registry.get("op", "pallas") is tpu
        assert registry.get("op", "triton") is triton
        with pytest.raises(KernelNotSupported):
            registry.get("op", "cuda")
    monkeypatch.setenv("EJKERNEL_INTERPRET", "1")
    assert registry.get("op", "pallas") is tpu
    with on(H200):
        assert registry.get("op", "pallas") is mosaic


def test_a_priority_by_call_counts_among_what_runs_here_only(registry):
    calls = []

    def by_call(inv):
        calls.append(inv)
        return {"long": 110, "short": 90}[inv]

    mosaic = add(registry, "pallas", "gpu", 110, priority_for=by_call)
    add(registry, "pallas", "tpu", 100)
    triton = add(registry, "triton", "gpu", 100)
    xla = add(registry, "xla", "any", supports=lambda inv: None)
    picky = dict(supports=lambda inv: "not this one", priority_for=lambda inv: 1 / 0)
    add(registry, "cuda", "gpu", 50, **picky)
    with on(H200), interpret_mode():
        assert registry.get("op", inv="long") is mosaic
        assert registry.get("op", inv="short") is triton
        assert registry.get("op") is mosaic
        for call in ("long", "short", None):  # forced: the interpreted one never goes first
            assert registry.get("op", "pallas", inv=call) is mosaic
    calls.clear()
    assert registry.get("op", inv="short") is xla and not calls  # nobody asks what cannot run here


def test_unknown_algorithm_and_unregistered_platform(registry):
    add(registry, "xla", "any")
    with pytest.raises(KernelNotFound, match=r"'flesh' is unknown: registered are op;.*pip"):
        registry.get("flesh")
    with on(H200):
        with pytest.raises(KernelNotFound, match=r"op/xla/any.*pip install ejk-kernels-triton"):
            registry.get("op", "triton")
    # neither registered nor runnable here: both errors at once
    with pytest.raises(KernelNotFound):
        registry.get("op", "triton")
    with pytest.raises(KernelNotSupported, match="needs a gpu"):
        registry.get("op", "triton")
    with pytest.raises(ValueError, match="auto, triton, pallas, xla, cuda"):
        registry.get("op", "cudnn")


@pytest.mark.parametrize(
    ("platform", "backend"),
    [
        ("triton", "any"),
        ("cuda", "any"),
        ("pallas", "any"),
        ("triton", "tpu"),
        ("cuda", "cpu"),
        ("pallas", "cpu"),
        ("auto", "any"),
        (None, "any"),
        ("xla", None),
        ("xla", "npu"),
    ],
)
def test_illegal_registrations(registry, platform, backend):
    with pytest.raises(ValueError, match=r"platform|backend"):
        add(registry, platform, backend)


def test_twice_needs_replace(registry):
    add(registry, "xla", "any")
    with pytest.raises(ValueError, match="op/xla/any is registered already"):
        add(registry, "xla", "any", algorithm="OP")
    newer = add(registry, "xla", "any", replace=True)
    assert registry.get("op") is newer
    assert len(registry.list_implementations("op")) == 1


def test_signatures_must_agree_when_registering(registry):
    add(registry, "xla", "any")

    def register(fn):
        with pytest.raises(ValueError, match="op/xla/cpu") as caught:
            registry.register("op", "xla", "cpu")(fn)
        return str(caught.value)

    assert "lacks parameter 'causal'" in register(lambda q, k, bias=None, *, cfg: 0)
    assert "unknown parameter 'mask'" in register(
        lambda q, k, bias=None, *, causal=False, mask=None, cfg: 0
    )
    assert "order" in register(lambda k, q, bias=None, *, causal=False, cfg: 0)
    assert "'causal' is positional or keyword" in register(
        lambda q, k, bias=None, causal=False, *, cfg: 0
    )
    assert "needs a keyword parameter 'cfg'" in register(lambda q, k, bias=None, *, causal=False: 0)
    assert "needs a keyword parameter 'cfg'" in register(
        lambda q, k, bias=None, *, causal=False, **cfg: 0
    )
    assert "positional-only" in register(lambda q, /, k, bias=None, *, causal=False, cfg=None: 0)
    registry.register("op", "xla", "cpu")(lambda q, k, bias=None, cfg=None, *, causal=False: 0)


def test_validate_signatures_lists_defaults_and_annotations(registry):
    @registry.register("op", "xla", "any")
    def first(q, k: int, scale: float = 1.0, *, cfg=None):
        return q

    assert registry.validate_signatures() == []

    @registry.register("op", "xla", "cpu")
    def second(q, k: str, scale: float = 2.0, *, cfg):
        return q

    lines = registry.validate_signatures("OP")
    assert len(lines) == 2 and all("op/xla/cpu differs from op/xla/any" in line for line in lines)
    assert "'k' is annotated str, expected int" in lines[0]
    assert "'scale' has default 2.0, expected default 1.0" in lines[1]


def test_describe_and_listing(registry):
    assert registry.describe() == "nothing registered" and registry.list_algorithms() == []
    add(registry, "xla", "any", algorithm="b", version=3)
    add(registry, "triton", "gpu", 100, algorithm="a", differentiable=False)
    add(registry, "pallas", "gpu", 9, algorithm="a", priority_for=lambda inv: 110)
    assert registry.list_algorithms() == ["a", "b"]
    assert registry.list_implementations("c") == []
    lines = registry.describe().splitlines()
    assert lines[0].split() == "algorithm platform backend priority gradients version".split()
    assert lines[1].split() == ["a", "triton", "gpu", "100", "no", "1"]
    assert lines[2].split() == ["a", "pallas", "gpu", "9,", "by", "call", "yes", "1"]
    assert lines[3].split() == ["b", "xla", "any", "0", "yes", "3"]
    assert "'z'" in registry.describe("z")


def test_config_tables(registry, tmp_path):
    registry.add_config_table(str(tmp_path / "a.json"))
    registry.add_config_table(tmp_path / "a.json")
    assert registry.config_tables == (tmp_path / "a.json",)


def test_the_shared_registry_is_exported():
    import ejkernel.ops
    from ejkernel.ops.kernel_registry import kernel_registry as same

    assert kernel_registry is same is ejkernel.ops.kernel_registry
    assert isinstance(kernel_registry, KernelRegistry)
