"""score_mod and mask_mod in Triton: device functions made of the equations of a mod.

    score(score, b, h, q, k, arrays, batch) -> score
    slope(score, b, h, q, k, arrays, batch) -> (score, its derivative by the score; None: it is 1)
    mask(b, h, q, k, arrays, batch) -> visible

The arguments broadcast: the score is a tile, q and k a column and a row of it, b and h scalars, so
that a term of the query alone is computed once a row. ``arrays`` are pointers to the captured
arrays, then the origin of a sharded call. ``batch``: the rows of a call, of which ``vmap`` makes
several.

``mod_equations`` makes assignments of the equations; those that the result does not need are left
out.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.triton.common.softmax import tanh_from_exp2  # noqa: F401 (generated code)
from ejkernel.kernels.triton.flash_attention.mod_equations import TYPES, Lowering, Scalar, View
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.types.attention.problem import Problem
from ejkernel.types.masks.structure import Unsupported
from ejkernel.types.mods import INDICES, MODS, SCORE, ModForm, Program

MOST_ARRAYS = 16
"""Captured arrays of a function that a launch takes."""

OPERANDS = tuple(
    f"{name}_{part}"
    for name in MODS
    for part in (*(f"{i:03}" for i in range(MOST_ARRAYS)), "origin")
)
"""Names of the operands of a launch: captured arrays, and where a sharded call begins."""


def _equations(program: Program, slope: bool) -> Any:
    """Returns the jaxpr of a program; with ``slope`` also of its derivative by the score."""
    if not slope:
        return program.jaxpr

    def with_slope(*inputs: Any) -> tuple[Any, Any]:
        n = program.captured
        arrays, score, indices = inputs[:n], inputs[n], inputs[n + 1 :]
        value, pull = jax.vjp(lambda s: program(arrays, s, *indices), score)
        return value, pull(jnp.ones_like(value))[0]

    types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.jaxpr.invars]
    closed = jax.make_jaxpr(with_slope)(*types)
    jaxpr = closed.jaxpr
    if closed.consts:
        raise Unsupported(f"{program.name}: its derivative has constant arrays")
    return jaxpr


@lru_cache(maxsize=256)
def source(form: ModForm, slope: bool = False) -> str:
    """Returns the source of the device function of a mod.

    Raises:
        Unsupported: an equation that cannot be computed in a tile; the message begins with the name
            of the argument.
    """
    program = form.program
    lowering, scored = Lowering(program.name), program.name == SCORE
    if program.captured > MOST_ARRAYS:
        raise lowering.refuse(f"captures more than {MOST_ARRAYS} arrays")
    jaxpr = _equations(program, slope)
    inputs: list[Any] = []
    for n, v in enumerate(jaxpr.invars[: program.captured]):
        shape = v.aval.shape
        if v.aval.dtype.name not in TYPES:
            raise lowering.refuse(f"captures an array of {v.aval.dtype.name}")
        axes = tuple(range(len(shape)))
        inputs.append(View(n, shape, (0,) * len(shape), shape, axes))
    if scored:
        inputs.append(Scalar("score"))
    inputs += [Scalar(name, 0) for name in INDICES]
    outputs = [lowering.scalar(x) for x in lowering.convert_jaxpr(jaxpr, inputs)]
    texts = [lowering.text(x) for x in outputs]
    needed = {x.name for x in outputs if isinstance(x, Scalar)}
    body = []
    for name, text, names in reversed(lowering.lines):
        if name in needed:
            needed.update(names)
            body.append(f"    {name} = {text}")
    origin = program.captured
    head = []
    if "b" in needed:
        first = f" + tl.load(arrays[{origin}])" if form.shifted else ""
        head.append(f"    b = b % batch{first}")
    for i, name in enumerate(INDICES[1 : form.shifted], 1):
        if name in needed:
            head.append(f"    {name} = {name} + tl.load(arrays[{origin}] + {i})")
    parameters = (["score"] if scored else []) + ["b", "h", "q", "k", "arrays", "batch"]
    results = [_result(x, text, scored) for x, text in zip(outputs, texts, strict=True)]
    if slope and isinstance(outputs[1], np.ndarray) and outputs[1] == 1.0:
        results[1] = "None"
    kind = "slope" if slope else "score" if scored else "mask"
    lines = [
        f"def {kind}_{program.digest}({', '.join(parameters)}):",
        *head,
        *reversed(body),
        f"    return {', '.join(results)}",
    ]
    return "\n".join(lines) + "\n"


def _result(value: Any, text: str, scored: bool) -> str:
    """Returns the source of a result: a score for every element, a mask that broadcasts."""
    if not isinstance(value, np.ndarray):
        return f"expand_to_tile({text}, score)" if scored else text
    if scored:
        return f"tl.full(score.shape, {text}, tl.float32)"
    return "(q >= 0) & (k >= 0)" if value else "(q < 0) & (k < 0)"


@triton.jit
def expand_to_tile(x, score):
    """Returns ``x`` in float32 for every element of the tile ``score``."""
    return tl.broadcast_to(x, score.shape).to(tl.float32)


@lru_cache(maxsize=256)
def device_function(form: ModForm, slope: bool = False) -> Any:
    """Returns the device function of a mod."""
    text = source(form, slope)
    name = text[len("def ") : text.index("(")]
    file = f"<ejkernel {name}>"
    # the compiler asks for the source of a function
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names = dict(globals())
    exec(compile(text, file, "exec"), names)
    function: Callable[..., Any] = names[name]
    function.__module__ = __name__
    return triton.jit(function)


def unsupported_reason(problem: Problem) -> str | None:
    """Returns why the functions of a call cannot be computed in a tile, None if they can."""
    try:
        for form in (problem.score_mod, problem.mask_mod):
            if form is not None:
                source(form)
        if problem.score_mod is not None:
            source(problem.score_mod, slope=True)
    except Unsupported as error:
        return str(error)
    return None
