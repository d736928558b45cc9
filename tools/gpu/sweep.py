"""Time tiles of one kernel on this device: what ships, and what may be faster.

    python tools/gpu/sweep.py flash_attention --cases 'sweep-d128-s4096-*' --platform triton
    python tools/gpu/sweep.py grouped_matmul --cases qwen3-moe --pass bwd
    python tools/gpu/sweep.py flash_attention --cases option-4k-bias \\
        --set fwd.block_kv=32,64 --set fwd.num_stages=2,3,4
    python tools/gpu/sweep.py flash_attention --cases 'sweep-d64-*' --platform pallas --pass bwd \\
        --bits --try bwd.pipelined=1 --try bwd.pipelined=1,bwd.dq_stages=2

Cases are listed by ``ejk shapes OPERATION``. Candidates are the ``neighbours`` that the kernel
proposes, else its fields halved and doubled, or all combinations of the values that ``--set``
names: any field of its tiles, whether or not a config has it; or the combinations that ``--try``
gives, one each. Each must give the same values as what ships, with ``--bits`` in two runs the same
bits; candidates that do are timed alternately, the slower half leaving after each round, by
the clock of the autotuner (the kernels' own time where they are short); then the fastest and what
ships once more. ``--pass bwd`` times forward and backward together, and changes the tiles of the
backward pass alone. The last table has the best of each case next to what ships. Exit status 1: a
candidate gave other values, or what ships did not run; 2: nothing to sweep.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checkout

checkout.use()

import jax  # noqa: E402
import numpy as np  # noqa: E402

from ejkernel.modules.bench.case import case_of  # noqa: E402
from ejkernel.modules.bench.runner import compile_ahead  # noqa: E402
from ejkernel.modules.bench.timing import Program  # noqa: E402
from ejkernel.modules.workloads import Call  # noqa: E402
from ejkernel.modules.workloads.find import calls_here, operation_name  # noqa: E402
from ejkernel.ops.call_kernel import CallKernel  # noqa: E402
from ejkernel.ops.execution.timing import compare_programs  # noqa: E402
from ejkernel.ops.execution.trials import GRADIENT_FACTOR, disagreement, unusable  # noqa: E402
from ejkernel.ops.platforms import Platform, parse_platform  # noqa: E402

MODES = {"fwd": "fwd", "bwd": "fwd+bwd"}
SHOWN = 12  # rows of a case


# ---- tiles as fields by path -------------------------------------------------------------------


def flat(tiles: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the fields of nested dataclasses by path, as "fwd.block_q"."""
    if not dataclasses.is_dataclass(tiles):
        return {prefix[:-1]: tiles} if prefix else {}
    fields: dict[str, Any] = {}
    for f in dataclasses.fields(tiles):
        fields |= flat(getattr(tiles, f.name), f"{prefix}{f.name}.")
    return fields


def changed(tiles: Any, values: Mapping[str, Any]) -> Any:
    """Returns ``tiles`` with other values at some paths."""
    for path, value in values.items():
        name, _, inner = path.partition(".")
        value = changed(getattr(tiles, name), {inner: value}) if inner else value
        tiles = dataclasses.replace(tiles, **{name: value})
    return tiles


def of_pass(fields: Mapping[str, Any], pass_name: str) -> dict[str, Any]:
    """Returns the fields of a pass: group "fwd" of the forward, other groups of the backward.

    Without that group all belong to both, as do fields outside groups.
    """
    groups = {path.partition(".")[0] for path in fields if "." in path}
    used = groups if "fwd" not in groups else {"fwd"} if pass_name == "fwd" else groups - {"fwd"}
    return {p: x for p, x in fields.items() if "." not in p or p.partition(".")[0] in used}


def doublings(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields each integer halved and doubled; of stages one less and one more."""
    for path, n in fields.items():
        if type(n) is int and n > 0:
            near = (n - 1, n + 1) if "stages" in path else (n // 2, n * 2)
            yield from ({path: value} for value in near if value > 0)


# ---- candidates --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Subject:
    """One call of one implementation.

    Attributes:
        name: of the implementation.
        ships: the tiles that run now, None where there are none.
        near: tiles that the implementation proposes.
        function: returns a function of the call's arrays that runs with some tiles.
        may_guess: whether tiles may be tried that the kernel does not propose; a Pallas kernel can
            wait forever for a copy that its tiles never start.
    """

    name: str
    ships: Any
    near: tuple[Any, ...]
    function: Callable[[Any], Callable[..., Any]]
    may_guess: bool = True

    def candidates(
        self,
        pass_name: str,
        choices: Mapping[str, list[Any]],
        limit: int,
        combinations: Iterable[Mapping[str, Any]] = (),
    ) -> dict[str, Callable[..., Any]]:
        """Returns functions by the fields that differ; what ships is the first, with all fields.

        ``choices``: values of fields, in all combinations; ``combinations``: given as they are.

        Raises:
            LookupError: a field is named that these tiles lack.
        """
        shipped = of_pass(flat(self.ships), pass_name)
        combinations = [dict(values) for values in combinations]
        unknown = {*choices, *itertools.chain(*combinations)} - shipped.keys()
        if unknown:
            fields = ", ".join(shipped) or "none"
            names = ", ".join(sorted(unknown))
            raise LookupError(f"--set or --try {names}: {self.name} has {fields}")
        others: Iterable[dict[str, Any]]
        if choices or combinations:
            values = itertools.product(*choices.values()) if choices else ()
            others = [*(dict(zip(choices, x, strict=True)) for x in values), *combinations]
        else:
            others = [_difference(flat(tiles), shipped) for tiles in self.near]
            others = others if any(others) or not self.may_guess else doublings(shipped)
        functions: dict[str, Callable[..., Any]] = {_text(shipped): self.function(self.ships)}
        for values in others:
            label = _text(_difference(values, shipped))
            if label and label not in functions and len(functions) <= limit:
                functions[label] = self.function(changed(self.ships, values))
        return functions


def _difference(fields: Mapping[str, Any], shipped: Mapping[str, Any]) -> dict[str, Any]:
    return {path: v for path, v in fields.items() if path in shipped and v != shipped[path]}


def _text(fields: Mapping[str, Any]) -> str:
    return " ".join(f"{path}={value}" for path, value in fields.items())


def with_choice(kernel: Any, choose: Callable[[Any, Any], Any]) -> Any:
    """Returns a kernel like ``kernel`` whose tiles ``choose(problem, target)`` returns."""
    fixed: Any = object.__new__(type(kernel))  # copy.copy gives the kernel itself
    fixed.__dict__.update(kernel.__dict__)
    fixed.choose = choose
    return fixed


def subject_of(call: Call, platform: str | None) -> Subject:
    """Returns the implementation of a call on a platform, None = the one of automatic choice.

    Raises:
        LookupError: nothing can do the call here; says why.
    """
    choice = call.explanation(platform)
    if choice.error is not None:
        raise LookupError(f"{call.name}: {choice.error}")
    bound = call.invocation().bound
    impl = bound.kernel.implementation(bound, parse_platform(choice.platform)).impl
    if impl is None or not isinstance(impl.fn, CallKernel):
        raise LookupError(f"{choice.implementation} has no tiles: it is a function, no CallKernel")
    kernel: Any = impl.fn
    problem, target = kernel.problem_of(bound), kernel.target()
    chosen = kernel.choose(problem, target)
    near = (chosen, *kernel.neighbours(problem, target, chosen))

    def function(tiles: Any) -> Callable[..., Any]:
        fixed = with_choice(kernel, lambda problem, target: tiles)
        names, options = call.names, dict(call.options)
        return lambda *arrays: fixed(**dict(zip(names, arrays, strict=True)), **options)

    ships = kernel.apply_config(chosen, choice.cfg, problem, target)
    return Subject(impl.name, ships, near, function, impl.platform is not Platform.PALLAS)


# ---- one sweep ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The rows ``(candidate, ms, spread)`` of a case, fastest first, and what did not run."""

    ships: str
    rows: list[tuple[str, float, float]]
    failed: dict[str, str]
    wrong: dict[str, str]

    @property
    def ships_ms(self) -> float | None:
        return next((ms for label, ms, _ in self.rows if label == self.ships), None)


def sweep_case(
    call: Call,
    candidates: Mapping[str, Callable[..., Any]],
    mode: str,
    rounds: int,
    bits: bool = False,
) -> Outcome:
    """Compiles candidates side by side, compares them with the first, times them alternately.

    ``bits``: each runs twice and must repeat its bits.
    """
    case = dataclasses.replace(
        case_of(call, platforms=False, peers=False), contenders=dict(candidates)
    )
    (programs,) = compile_ahead([(case, mode)])
    arrays = case.inputs()
    failed, wrong, valid, reference = {}, {}, {}, None
    factor = GRADIENT_FACTOR if mode == "fwd+bwd" else 1.0
    for label, made in programs.items():
        if isinstance(made, str):
            failed[label] = made
            continue
        try:
            value = jax.block_until_ready(made[0](*arrays))
            first = reference is None
            why = unusable(value) if first else disagreement(value, reference, factor=factor)
            if why is None and bits and not repeats(value, made[0](*arrays)):
                why = "two runs gave different bits"
        except Exception as error:
            failed[label] = f"{type(error).__name__}: {str(error)[:120]}"
            continue
        if why is None:
            reference = value if first else reference
            valid[label] = Program(made[0], arrays)
        else:
            wrong[label] = why
    ships, times = next(iter(candidates)), time_programs(valid, rounds)
    if ships in valid and len(valid) > 2:  # dropped programs have few samples
        pair = {label: valid[label] for label in (ships, min(times, key=lambda x: times[x][0]))}
        times |= time_programs(pair, rounds)
    rows = [(label, *times[label]) for label in sorted(times, key=lambda x: times[x][0])]
    return Outcome(ships, rows, failed, wrong)


def repeats(value: Any, again: Any) -> bool:
    """Returns whether two results are the same, bit by bit."""
    pairs = zip(jax.tree.leaves(value), jax.tree.leaves(again), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def time_programs(programs: Mapping[str, Program], rounds: int) -> dict[str, tuple[float, float]]:
    """Returns milliseconds and their relative spread."""
    device = jax.devices()[0]
    times = compare_programs(list(programs.values()), num_warmup=3, num_iters=rounds, device=device)
    return {x: (t.ms, t.spread) for x, t in zip(programs, times, strict=True) if t is not None}


def outcome_text(name: str, outcome: Outcome) -> str:
    text = [f"{name}: {len(outcome.rows)} timed, {len(outcome.failed)} did not run"]
    for i, (label, ms, spread) in enumerate(outcome.rows):
        mark = "ships:" if label == outcome.ships else ""
        if i < SHOWN or mark:
            text.append(f"  {ms:9.4f} ms +-{spread:5.1%}  {mark:6} {label}")
    text += [f"  did not run: {label}: {why}" for label, why in outcome.failed.items()]
    text += [f"  WRONG: {label}: {why}" for label, why in outcome.wrong.items()]
    return "\n".join(text)


def summary(outcomes: Mapping[str, Outcome]) -> str:
    width = max(map(len, outcomes))
    text = [f"{'case':{width}} {'ships ms':>9} {'best ms':>9} {'ratio':>6}  best"]
    for name, x in outcomes.items():
        if x.ships_ms is None:
            text.append(f"{name:{width}} what ships did not run")
            continue
        label, ms, _ = x.rows[0]
        best = "what ships" if label == x.ships else label
        text.append(f"{name:{width}} {x.ships_ms:9.4f} {ms:9.4f} {x.ships_ms / ms:6.3f}  {best}")
    return "\n".join(text)


def field_values(text: str) -> dict[str, int]:
    """Returns fields of tiles by path, as "fwd.block_q=64,fwd.stages=3" names them."""
    pairs = [pair.split("=") for pair in text.split(",")]
    return {path: int(value) for path, value in pairs}


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="sweep", description=(__doc__ or "").splitlines()[0])
    p.add_argument("operation", type=operation_name)
    p.add_argument("--cases", default="*", help="comma-separated globs on case names")
    p.add_argument("--platform", help="default: the one that automatic choice takes")
    p.add_argument("--pass", dest="which", choices=MODES, default="fwd")
    p.add_argument("--set", action="append", default=[], metavar="FIELD=N,N", dest="choices")
    p.add_argument(
        "--try", action="append", default=[], metavar="FIELD=N,FIELD=N", dest="combinations"
    )
    p.add_argument("--bits", action="store_true", help="two runs must give the same bits")
    p.add_argument("--limit", type=int, default=40, help="candidates besides what ships")
    p.add_argument("--rounds", type=int, default=20, help="samples of a finalist")
    args = p.parse_args(argv)
    try:
        pairs = [text.split("=") for text in args.choices]
        args.choices = {path: [int(n) for n in values.split(",")] for path, values in pairs}
    except ValueError:
        p.error("--set: expected FIELD=NUMBER,NUMBER as fwd.block_q=64,128")
    try:
        args.combinations = [field_values(text) for text in args.combinations]
    except ValueError:
        p.error("--try: expected FIELD=NUMBER,FIELD=NUMBER as fwd.block_q=64,fwd.stages=3")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    checkout.register()
    outcomes: dict[str, Outcome] = {}
    for call in calls_here(args.operation, args.cases):
        if args.which == "bwd" and not call.gradients:
            continue
        try:
            subject = subject_of(call, args.platform)
            candidates = subject.candidates(args.which, args.choices, args.limit, args.combinations)
        except LookupError as error:
            print(error, file=sys.stderr)
            continue
        outcome = sweep_case(call, candidates, MODES[args.which], args.rounds, args.bits)
        outcomes[call.name] = outcome
        print(outcome_text(f"{call.name} {args.which}, {subject.name}", outcome), flush=True)
    if not outcomes:
        names = ", ".join(call.name for call in calls_here(args.operation, "*"))
        print(f"nothing to sweep: {args.operation} has the cases {names}")
        return 2
    print("\n" + summary(outcomes))
    return int(any(x.wrong or x.ships_ms is None for x in outcomes.values()))


if __name__ == "__main__":
    raise SystemExit(main())
