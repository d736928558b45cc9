"""What soft cap, dropout and a bias cost each kernel of flash attention, in several variants.

    python tools/gpu/flash_variants.py               # all options, some 90 s
    python tools/gpu/flash_variants.py cap dropout   # these

Causal, bfloat16, batch 4, 4096 rows, 16 heads of 128, but for plain attention of narrow heads, of
grouped heads and of short rows ("d64", "gqa", "short"). A row is a kernel with an option: tiles
(queries, keys, warps, stages), constants that differ from what ships, time, and speed against the
plain kernel as shipped.
The first row of a kernel is what ships. The last lines add up the shipped and the fastest rows of
an option.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

sys.path.insert(0, __file__.rsplit("/", 3)[0])

from tools.gpu.common import base_of, jax, jnp, milliseconds, precompile

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.common.dropout_rows import row_words
from ejkernel.kernels.triton.flash_attention import flash_attention, plans, tiles
from ejkernel.kernels.triton.targets import current_target
from ejkernel.types.problem import Problem
from ejkernel.types.structure import Band, Rules
from ejktest.attention_at_size import BF, F32, draw

B, S, H = 4, 4096, 16
DEFAULT = (B, S, H, H, 128)  # batch, rows, heads, key heads, dim
SIZES = {
    "d64": (8, 2048, 32, 32, 64),
    "gqa": (2, 8192, 32, 8, 128),
    "short": (32, 512, 16, 16, 128),
}
KINDS = {"fwd": plans.ForwardPlan, "dq": plans.DqPlan, "dkv": plans.DkvPlan}
TYPES = {"base": F32, "delta": F32, "words": jnp.uint32}
POINTERS = {"BIAS_TMA": False}
LATE, EARLY = {"DP_LATE": True}, {"DP_LATE": False}

# option: fields of the problem, shape of the bias, and (kernel, tiles, constants) to try beside
# what ships
OPTIONS: dict[str, tuple[dict[str, Any], Any, list[tuple[str, Any, dict[str, Any]]]]] = {
    "plain": ({}, None, [("dkv", None, LATE)]),
    "d64": ({}, None, [("dkv", None, LATE), ("dkv", (64, 64, 4, 3), {})]),
    "gqa": ({}, None, [("dkv", None, LATE)]),
    "short": (
        {},
        None,
        [
            ("fwd", (64, 64, 4, 2), {}), ("fwd", (64, 128, 4, 2), {}), ("fwd", (64, 32, 4, 4), {}),
            ("fwd", (128, 64, 8, 2), {}), ("fwd", (128, 64, 8, 3), {}),
            ("fwd", (128, 128, 8, 2), {}),
        ],
    ),
    "cap": (
        dict(soft_cap=30.0),
        None,
        [
            ("fwd", None, {"FIXED": False}), ("fwd", (128, 64, 8, 2), {}),
            ("dq", (64, 32, 4, 3), {}), ("dkv", None, LATE), ("dkv", (32, 64, 4, 2), {}),
        ],
    ),
    "dropout": (
        dict(dropout=0.1),
        None,
        [
            ("fwd", (64, 64, 4, 2), {}), ("fwd", (128, 64, 8, 2), {}),
            ("dq", (128, 64, 8, 2), {}), ("dq", (64, 32, 4, 3), {}),
            ("dkv", None, EARLY), ("dkv", (32, 64, 4, 2), {}), ("dkv", (32, 64, 4, 3), {}),
        ],
    ),
    "bias b,h": (
        dict(biased=True),
        (B, H),
        [
            ("fwd", None, POINTERS), ("fwd", (128, 64, 8, 2), {}), ("fwd", (64, 32, 4, 4), {}),
            ("fwd", (64, 64, 4, 2), {}),
            ("dq", None, POINTERS), ("dkv", None, POINTERS), ("dkv", None, LATE),
            ("dkv", (32, 64, 4, 3), {}),
        ],
    ),
    "bias 1,h": (
        dict(biased=True),
        (1, H),
        [
            ("fwd", None, POINTERS), ("fwd", (128, 64, 8, 2), {}), ("fwd", None, {"ORDER": 0}),
            ("fwd", (64, 32, 4, 4), {}), ("fwd", (64, 64, 4, 2), {}),
            ("dq", None, POINTERS), ("dkv", None, LATE), ("dkv", None, {"ORDER": 0}),
        ],
    ),
    "bias 1,1": (
        dict(biased=True),
        (1, 1),
        [
            ("fwd", None, POINTERS), ("fwd", None, {"ORDER": 0}), ("fwd", None, {"ORDER": 2}),
            ("fwd", (64, 32, 4, 4), {}), ("dkv", None, {"ORDER": 0}), ("dkv", None, LATE),
        ],
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Changed:
    """A plan with other constants."""

    plan: Any
    constants: tuple[tuple[str, Any], ...]

    def outputs(self):
        return self.plan.outputs()

    def launch(self, target):
        launch, new = self.plan.launch(target), dict(self.constants)
        arguments = dict(launch.arguments)
        if new.get("BIAS_TMA") is False:
            arguments["bias"] = self.plan.operand("bias")
        return dataclasses.replace(
            launch, arguments=arguments, constants={**launch.constants, **new}
        )


def variant_sizes(option: str) -> tuple[int, ...]:
    return SIZES.get(option, DEFAULT)


def variant(kind: str, option: str, tile: Any, constants: dict[str, Any]):
    """(plan, operand types)"""
    fields, bias, _ = OPTIONS[option]
    b, s, h, hk, d = variant_sizes(option)
    problem = Problem(b, s, s, h, hk, d, d, "bfloat16", d**-0.5, seed_batches=b, **fields)
    target = current_target()
    shapes: dict[str, tuple[int, ...]] = {"q": (b, s, h, d), "k": (b, s, hk, d), "v": (b, s, hk, d)}
    if kind != "fwd":
        shapes |= {"do": (b, s, h, d), "base": (b, h, s), "delta": (b, h, s)}
    if bias:
        shapes["bias"] = (*bias, s, s)
    if problem.dropout:
        shapes["words"] = (b, h, 2, s)
    if tile is None:
        dq, dkv = tiles.backward_tiles(problem, target)
        shipped = {"fwd": tiles.forward_tiles(problem, target), "dq": dq, "dkv": dkv}[kind]
    else:
        shipped = tiles.Tiles(*tile)
    plan = KINDS[kind](problem, Rules(Band(None, 0)), shipped, tuple(shapes.items()))
    avals = [jax.ShapeDtypeStruct(x, TYPES.get(n, BF)) for n, x in shapes.items()]
    return (Changed(plan, tuple(constants.items())) if constants else plan), avals


def inputs(b: int, s: int, h: int, hk: int, d: int) -> dict[str, jax.Array]:
    q, k, v, do = draw(2, b, s, s, h, hk, d, d, BF)
    o, lse = jax.jit(lambda q, k, v: flash_attention(q, k, v, causal=True, return_lse=True))(
        q, k, v
    )
    delta = jnp.einsum("bqhd,bqhd->bhq", do.astype(F32), o.astype(F32))
    words = row_words(jnp.asarray([[3, 0, 0]], jnp.int32), b, h, s)
    return dict(q=q, k=k, v=v, do=do, lse=lse.swapaxes(1, 2), delta=delta, words=words)


def operands(plan, arrays: dict[str, jax.Array]) -> list[jax.Array]:
    inner = getattr(plan, "plan", plan)
    arrays = dict(arrays)
    arrays["base"] = base_of(inner.problem, arrays["lse"])
    arrays["delta"] = arrays["delta"] / inner.problem.keep_scale
    return [arrays[name] for name in inner.names]


def base(option: str) -> str:
    """What an option is compared with: plain attention of the same sizes."""
    return option if option in SIZES else "plain"


def main() -> None:
    start = time.time()
    print(jax.devices()[0], current_target(), jax.__version__, flush=True)
    options = [o for o in OPTIONS if o == "plain" or not sys.argv[1:] or o in sys.argv[1:]]
    rows = [
        (option, kind, tile, constants)
        for option in options
        for kind, tile, constants in [
            x
            for kernel in KINDS
            for x in [(kernel, None, {}), *(y for y in OPTIONS[option][2] if y[0] == kernel)]
        ]
    ]
    made = [variant(kind, option, tile, constants) for option, kind, tile, constants in rows]
    errors = precompile([(plan, avals, current_target()) for plan, avals in made])
    print(f"compiled {len(rows)} in {time.time() - start:.0f}s", flush=True)
    arrays, at, sizes = {}, None, None
    shipped: dict[tuple[str, str], float] = {}
    best: dict[tuple[str, str], float] = {}
    failed = 0
    for (option, kind, tile, constants), (plan, _), error in zip(rows, made, errors, strict=True):
        inner = getattr(plan, "plan", plan)
        t = inner.tiles
        name = f"{t.block_q}x{t.block_kv} w{t.num_warps} s{t.num_stages}"
        name += "".join(f" {k}={v}" for k, v in constants.items())
        name = f"{option:9s} {kind:4s} {name:30s}"
        if variant_sizes(option) != sizes:
            sizes = variant_sizes(option)
            arrays = inputs(*sizes)
        if option != at:
            arrays.pop("bias", None)
            if OPTIONS[option][1]:
                arrays["bias"] = jnp.zeros((*OPTIONS[option][1], S, S), BF)
            at = option
        try:
            if error:
                raise RuntimeError(error)
            run = jax.jit(lambda *x, plan=plan: call(plan, *x))
            ms = milliseconds(run, *operands(plan, arrays), seconds=0.06)
        except Exception as problem:
            failed += tile is None and not constants
            print(f"{name} {type(problem).__name__}: {str(problem)[:110]}", flush=True)
            continue
        shipped.setdefault((option, kind), ms)
        best[option, kind] = min(ms, best.get((option, kind), ms))
        ratio = shipped.get((base(option), kind), ms) / ms
        print(f"{name} {ms:7.3f} ms {ratio:5.2f}x", flush=True)
    for option in options:
        for label, table in (("shipped", shipped), ("fastest", best)):
            parts = [table.get((option, kind), float("nan")) for kind in KINDS]
            plain = [shipped.get((base(option), kind), float("nan")) for kind in KINDS]
            print(
                f"{option:9s} {label}: fwd {parts[0]:.3f} ms {plain[0] / parts[0]:.2f}x, "
                f"fwd+dq+dkv {sum(parts):.3f} ms {sum(plain) / sum(parts):.2f}x"
            )
    print(f"{time.time() - start:.0f}s in all")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
