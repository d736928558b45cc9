"""score_mod and mask_mod: functions of one logit's indices, as programs that kernels can read.

A function is traced once a call, on scalars, to a jaxpr. The arrays it closes over are operands of
the program, so that they are batched, differentiated and sharded as the arguments of a call are,
and no cache holds them: a program is compared by its equations, never by its arrays.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from ejkernel.types.errors import describe, invalid

INDICES = ("b", "h", "q", "k")
SCORE, MASK = MODS = ("score_mod", "mask_mod")
_FORMS = {
    SCORE: "a function (score, b, h, q, k) of scalars that returns a float scalar",
    MASK: "a function (b, h, q, k) of scalars that returns a bool scalar",
}
_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.dtype, np.generic, type)
_INLINED = ("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint")


class Program:
    """The equations of a mod; equal to another of the same equations.

    Equations with a derivative of their own hold a Python function, which has no content to
    compare: a program that has any is equal to programs of the same Python function alone.

    Attributes:
        name: ``score_mod`` or ``mask_mod``.
        closed: the equations, with the captured arrays as their first inputs.
        captured: how many there are.
        reads: the indices that the result depends on.
    """

    __slots__ = ("_hash", "captured", "digest", "jaxpr", "key", "name", "reads")

    def __init__(self, name: str, function: Any, jaxpr: Any, captured: int) -> None:
        self.name, self.jaxpr, self.captured = name, jaxpr, captured
        opaque: list[Any] = []
        equations = _jaxpr_key(jaxpr, opaque)
        self.digest = hashlib.sha256(repr((name, equations)).encode()).hexdigest()[:16]
        self.key = (name, captured, equations, function if opaque else None)
        self._hash = hash((name, captured, self.digest))
        self.reads = frozenset(_reads(jaxpr, captured, name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.key == other.key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"{self.name}:{self.digest}"

    @property
    def dtype(self) -> np.dtype:
        """The dtype of scores; bool of a mask."""
        return self.jaxpr.outvars[0].aval.dtype

    def __call__(self, arrays: Sequence[Any], *inputs: Any) -> Any:
        """The result on scalars: the score of a score_mod, then b, h, q, k."""
        return jaxpr_as_fun(ClosedJaxpr(self.jaxpr, ()))(*arrays, *inputs)[0]


def _jaxpr_key(jaxpr: Any, opaque: list[Any]) -> Any:
    """Returns the equations as nested tuples; adds to ``opaque`` parameters without content."""
    numbers: dict[Any, int] = {}

    def name(var: Any) -> Any:
        if isinstance(var, Literal):
            value = np.asarray(var.val)
            return str(var.aval), value.tobytes()
        return numbers.setdefault(var, len(numbers))

    inputs = tuple((name(v), str(v.aval)) for v in jaxpr.invars)
    equations = tuple(
        (
            e.primitive.name,
            tuple(map(name, e.invars)),
            tuple((name(v), str(v.aval)) for v in e.outvars),
            tuple((k, _param_key(k, v, opaque)) for k, v in sorted(_params(e).items())),
        )
        for e in jaxpr.eqns
    )
    return inputs, equations, tuple(map(name, jaxpr.outvars))


def _params(equation: Any) -> Mapping[str, Any]:
    if equation.primitive.name in _INLINED:  # the others say how it would be compiled alone
        return {"jaxpr": equation.params.get("jaxpr", equation.params.get("call_jaxpr"))}
    return equation.params


def _param_key(name: str, value: Any, opaque: list[Any]) -> Any:
    if isinstance(value, ClosedJaxpr):
        consts = tuple(_param_key(name, x, opaque) for x in value.consts)
        return _jaxpr_key(value.jaxpr, opaque), consts
    if isinstance(value, Jaxpr):
        return _jaxpr_key(value, opaque)
    if isinstance(value, (tuple, list)):
        return tuple(_param_key(name, x, opaque) for x in value)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    text = repr(value)
    if not isinstance(value, _SCALARS) and (
        callable(value) or hasattr(value, "call_wrapped") or " at 0x" in text
    ):
        opaque.append(value)
        return "function"
    return text


def _reads(jaxpr: Any, captured: int, name: str) -> list[str]:
    """Returns the names of the inputs that the result depends on."""
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for e in reversed(jaxpr.eqns):
        if needed.intersection(e.outvars):
            needed.update(v for v in e.invars if not isinstance(v, Literal))
    names = (*(("score",) if name == SCORE else ()), *INDICES)
    return [x for x, v in zip(names, jaxpr.invars[captured:], strict=True) if v in needed]


@jtu.register_pytree_with_keys_class
class Mod:
    """A traced function and the arrays it reads: a pytree whose leaves are arrays.

    Attributes:
        program: its equations.
        arrays: the captured arrays.
        origin: int32, the indices that the call's first ones have in the whole call: of its batch
            row and head ``[2]``, or ``[4]`` of its query and key too. None for a call that is
            whole.
        blocks: int8 ``[#b, #h, q blocks, kv blocks]`` of a mask: 0 where no pair of a block is
            visible, 2 where all are, 1 elsewhere. None where that is not known.
        block_size: rows and keys of a block, 0 without ``blocks``.
    """

    __slots__ = ("arrays", "block_size", "blocks", "origin", "program")

    def __init__(
        self,
        program: Program,
        arrays: Sequence[Any],
        origin: Any = None,
        blocks: Any = None,
        block_size: int = 0,
    ) -> None:
        self.program, self.arrays, self.origin = program, tuple(arrays), origin
        self.blocks, self.block_size = blocks, block_size

    def __repr__(self) -> str:
        return f"<{self.program!r} with {len(self.arrays)} arrays>"

    def __call__(self, *inputs: Any) -> Any:
        """The result on scalars of the call's own indices."""
        first = len(inputs) - len(INDICES)
        shifted = list(inputs)
        for i in range(self.shifted):
            shifted[first + i] += self.origin[i]
        return self.program(self.arrays, *shifted)

    def tree_flatten_with_keys(self) -> tuple[tuple, tuple]:
        names = ("arrays", "origin", "blocks")
        children = ((jtu.GetAttrKey(name), getattr(self, name)) for name in names)
        return tuple(children), (self.program, self.block_size)

    def tree_flatten(self) -> tuple[tuple, tuple]:
        return (self.arrays, self.origin, self.blocks), (self.program, self.block_size)

    @classmethod
    def tree_unflatten(cls, static: tuple, children: tuple) -> Mod:
        """Rebuilds without checks: JAX puts arbitrary objects in the place of arrays."""
        new = object.__new__(cls)
        new.arrays, new.origin, new.blocks = children
        new.program, new.block_size = static
        return new

    @property
    def shifted(self) -> int:
        """Number of indices that count from an origin: 0, 2 or 4, in the order of ``INDICES``."""
        return 0 if self.origin is None else self.origin.shape[0]

    @property
    def form(self) -> ModForm:
        """The static part, hashable."""
        return ModForm(self.program, self.shifted, self.block_size)

    def _moved(self, *first: Any) -> jax.Array:
        """Returns the origin of a part whose first indices in this call are given."""
        origin = jnp.stack([jnp.asarray(x, jnp.int32) for x in first])
        if self.origin is None:
            return origin
        short, long = sorted((origin, self.origin), key=len)
        return long.at[: len(short)].add(short)

    def on_shard(self, batch: Any, heads: Any) -> Mod:
        """Returns the mod of a shard whose first batch row and head are given."""
        origin = self._moved(batch, heads)
        return Mod(self.program, self.arrays, origin, self.blocks, self.block_size)

    def on_piece(self, query: Any, key: Any, q_len: int, kv_len: int) -> Mod:
        """Returns the mod of some queries and keys, whose first indices are given.

        They are multiples of the lengths, or of the lengths of equal chunks.
        """
        origin, size, blocks = self._moved(0, 0, query, key), self.block_size, None
        if self.blocks is not None and q_len % size == 0 == kv_len % size:
            blocks = jnp.asarray(self.blocks)
            for axis, first, length in ((2, query, q_len), (3, key, kv_len)):
                blocks = jax.lax.dynamic_slice_in_dim(blocks, first // size, length // size, axis)
        return Mod(self.program, self.arrays, origin, blocks, 0 if blocks is None else size)

    def local_blocks(self, batch: int, heads: int) -> Any:
        """Returns ``blocks`` of the call's own batch rows and heads, None where unknown."""
        blocks = self.blocks
        for axis, size in ((0, batch), (1, heads)):
            if blocks is not None and self.origin is not None and blocks.shape[axis] > 1:
                first = self.origin[axis]
                blocks = jax.lax.dynamic_slice_in_dim(jnp.asarray(blocks), first, size, axis)
        return blocks

    def leaves(self) -> dict[str, Any]:
        """Returns the arrays by the names that ``ModForm.mod`` takes."""
        name, program = self.program.name, self.program
        named = {f"{name}_{i:03}": x for i, x in enumerate(self.arrays)}
        extra = {f"{name}_origin": self.origin, f"{name}_blocks": self.blocks}
        assert len(named) == program.captured
        return named | {key: x for key, x in extra.items() if x is not None}


class ModForm(tuple):
    """Static part of a Mod: its program, how many indices are shifted, its block size."""

    __slots__ = ()

    def __new__(cls, program: Program, shifted: int, block_size: int) -> ModForm:
        return super().__new__(cls, (program, shifted, block_size))

    @property
    def program(self) -> Program:
        return self[0]

    @property
    def shifted(self) -> int:
        return self[1]

    @property
    def block_size(self) -> int:
        return self[2]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the captured arrays, as ``Mod.leaves`` has them."""
        return tuple(f"{self.program.name}_{i:03}" for i in range(self.program.captured))

    def mod(self, arrays: Mapping[str, Any]) -> Mod:
        """Returns the mod whose arrays are entries of ``arrays``."""
        name = self.program.name
        captured = [arrays[x] for x in self.names]
        origin, blocks = (arrays.get(f"{name}_{x}") for x in ("origin", "blocks"))
        return Mod(self.program, captured, origin, blocks, self.block_size)


def trace_mod(name: str, function: Any, dtype: Any = np.float32) -> Mod:
    """Returns a function as a Mod; ``dtype``: of the scores of a score_mod.

    Raises:
        InvalidArgument: no function, a wrong number of arguments, or a result that is no scalar of
            the right kind.
    """
    if isinstance(function, Mod) and function.program.name == name:
        return function
    if not callable(function):
        raise invalid(name, f"{_FORMS[name]}, or None", function)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    inputs = [index] * len(INDICES)
    if name == SCORE:
        inputs.insert(0, jax.ShapeDtypeStruct((), dtype))
    _check_arity(name, function, len(inputs))

    # a new function each time: what is closed over may have been replaced since the last call
    def traced(*scalars: Any) -> Any:
        result = function(*scalars)
        _check_result(name, result)
        return jnp.asarray(result).astype(dtype if name == SCORE else bool)

    # equations remember the mesh of where they are traced, and devices run them inside a shard_map
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        closed = jax.make_jaxpr(traced)(*inputs)
    jaxpr, arrays = _with_captured_inputs(closed)
    return Mod(Program(name, function, jaxpr, len(arrays)), arrays)


def _check_arity(name: str, function: Any, count: int) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins may have none
        return
    try:
        signature.bind(*range(count))
    except TypeError:
        text = f"a function of {signature}"
        raise invalid(name, f"{_FORMS[name]}, which takes {count} arguments", text) from None


def _check_result(name: str, result: Any) -> None:
    kinds = (jnp.floating,) if name == SCORE else (jnp.bool_,)
    plain = isinstance(result, (bool, int, float, np.generic)) or hasattr(result, "dtype")
    if plain:
        dtype = jnp.result_type(result)
        is_right = np.shape(result) == () and any(jnp.issubdtype(dtype, kind) for kind in kinds)
        if is_right:
            return
        result = f"one that returns {dtype.name}{list(np.shape(result))}"
    else:
        result = f"one that returns {describe(result)}"
    raise invalid(name, _FORMS[name], result)


def _with_captured_inputs(closed: Any) -> tuple[Any, list[Any]]:
    """Returns equations whose first inputs are the constants, and the constants."""
    jaxpr = closed.jaxpr
    arrays = [x if isinstance(x, jax.Array) else np.asarray(x) for x in closed.consts]
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]), arrays


def apply_mod(mod: Mod, b: Any, h: Any, q: Any, k: Any, score: Any = None) -> Any:
    """Returns the results of a mod for every pair of a tile.

    Args:
        mod: the mod.
        b, h, q, k: int32 indices ``[batch]``, ``[heads]`` (or several axes of heads), ``[rows]``
            and ``[keys]``.
        score: ``[batch, *heads, rows, keys]`` of a score_mod.

    Returns:
        ``[batch, *heads, rows, keys]``; of a mask ``batch`` and ``heads`` are 1 where it does not
        depend on them.
    """
    scored = score is not None
    if not scored:
        b = b if "b" in mod.program.reads else b[:1]
        h = h if "h" in mod.program.reads else h.reshape(-1)[:1].reshape((1,) * h.ndim)

    def run(*inputs: Any) -> Any:
        return mod(*inputs) if scored else mod(*inputs[1:])

    # the innermost axis first
    of_score = 0 if scored else None
    run = jax.vmap(run, (of_score, None, None, None, 0))
    run = jax.vmap(run, (of_score, None, None, 0, None))
    for _ in range(h.ndim):
        run = jax.vmap(run, (of_score, None, 0, None, None))
    run = jax.vmap(run, (of_score, 0, None, None, None))
    return run(score, b, h, q, k)


def is_float(x: Any) -> bool:
    """Returns whether a captured array has a gradient."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def leaves_of(*mods: Mod | None) -> dict[str, Any]:
    """Returns the arrays of the mods there are, by name."""
    return {name: x for mod in mods if mod is not None for name, x in mod.leaves().items()}
