"""Linear recurrences over tokens on several devices.

Each device runs its tokens from a state of zeros. The state S that reaches it changes what it has
by a linear map, so that it is never waited for:

    output_t = local output_t + read_t(S)          state after = local state + transition(S)

Of linear attention with decays, ``transition`` multiplies by the decay of all tokens, and
``read_t`` is the query of token t with the decay up to it. Of the delta rule, both are what the
kernel itself gives for values of zero and the identity as state: the steps' matrices
multiplied, and the queries that have gone through them. Gradients are JAX's, through the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.types.arrays import result_dtype
from ejkernel.types.states.line import LocalSequences, like, states_before

Arguments = Mapping[str, Any]
Run = Callable[[dict[str, Any]], Any]

# TF32 and bfloat16 lose digits that float32 inputs have
matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@dataclass(frozen=True)
class Effect:
    """The change that a state makes on the device that it reaches.

    Attributes:
        queries: ``[batch, tokens, heads, key_dim]``, what reads it.
        transition: ``[batch, heads, key_dim, v_dim]``, where 1 stands for any size, or
            ``[batch, heads, key_dim, key_dim]`` with ``is_matrix``.
        decays: of values, ``[batch, tokens, heads, v_dim]`` or None.
        is_matrix: whether ``transition`` is a factor of a matmul.
        precision: of the matmul of queries and state.
    """

    queries: jax.Array
    transition: jax.Array
    decays: jax.Array | None
    is_matrix: bool
    precision: Any

    def read(self, state: jax.Array) -> jax.Array:
        """Returns what the tokens read of the state: ``[batch, tokens, heads, v_dim]``."""
        o = jnp.einsum("bthk,bhkv->bthv", self.queries, state, precision=self.precision)
        return o if self.decays is None else o * self.decays

    def apply(self, transition: jax.Array, state: jax.Array) -> jax.Array:
        return matmul(transition, state) if self.is_matrix else transition * state

    compose = apply


def run_over_devices(
    a: Arguments,
    sequences: LocalSequences,
    run: Run,
    effect_of: Callable[[Arguments, LocalSequences, Run, Any], Effect],
) -> tuple[jax.Array, ...]:
    """Returns the output, and the last states if the call requests them.

    ``a``: the arguments of one device; ``run``: computes a call of one device.
    """
    s, initial = sequences, a["initial_state"]
    cu = {"cu_seqlens": s.cu_seqlens, "return_state": True}
    o, final = run({**a, **cu, "initial_state": s.starting(initial)})
    effect = effect_of(a, s, run, final.dtype)
    through = jnp.where(s.passes_through, effect.transition, 0)
    state = states_before(
        s.line, s.leaving(final), through, apply=effect.apply, compose=effect.compose
    )
    o = (o.astype(final.dtype) + effect.read(state)).astype(o.dtype)
    if not a["return_state"]:
        return (o,)
    changed = effect.apply(effect.transition, state)
    return o, s.last_states(final + jnp.where(like(s.enters, final), changed, 0))


class Decays(NamedTuple):
    """Log decays of every token: ``[batch, tokens, heads, channels]``, None where there are none.

    Attributes:
        key: of key channels, or one for all of them.
        value: of value channels.
    """

    key: jax.Array | None
    value: jax.Array | None


def decay_effect(a: Arguments, s: LocalSequences, dtype: Any, *, decays: Decays) -> Effect:
    """Returns the effect of a state in linear attention with decays."""
    is_of_entering = s.is_of_entering[None, :, None, None]

    def accumulate(gate: jax.Array | None) -> tuple[Any, Any]:
        """Returns the sums up to each token, and over all of them."""
        if gate is None:
            return None, None
        # rows behind the last sequence may hold anything
        gate = jnp.where(is_of_entering, gate.astype(dtype), 0)
        return jax.lax.cumsum(gate, axis=1, reverse=s.line.reverse), jnp.sum(gate, axis=1)

    key, through_key = accumulate(decays.key)
    value, through_value = accumulate(decays.value)
    query = a["query"]
    wide = jnp.where(is_of_entering, query.astype(dtype), 0) * a["softmax_scale"]
    log = 0 if through_key is None else through_key[..., :, None]
    log = log if through_value is None else log + through_value[..., None, :]
    shape = (1,) * 4 if isinstance(log, int) else log.shape
    return Effect(
        wide if key is None else wide * jnp.exp(key),
        jnp.exp(jnp.broadcast_to(jnp.asarray(log, dtype), shape)),
        None if value is None else jnp.exp(value),
        False,
        _precision(query),
    )


def delta_effect(a: Arguments, s: LocalSequences, run: Run, dtype: Any) -> Effect:
    """Returns the effect of a state in the delta rule, from the kernel itself."""
    value, width = a["value"], a["key"].shape[3]
    b, tokens, heads, _ = value.shape
    identity, cu = jnp.eye(width, dtype=dtype), None
    if s.cu_seqlens is None:
        states = jnp.broadcast_to(identity, (b, heads, width, width))
    else:
        # of packed sequences one at most enters; the tokens before it read nothing
        cu = jnp.stack([jnp.zeros_like(s.first), s.first, s.last])
        states = jnp.stack([jnp.zeros_like(identity), identity])[:, None]
        states = jnp.broadcast_to(states, (2, heads, width, width))
    part = {
        **a,
        "value": jnp.zeros((b, tokens, heads, width), value.dtype),
        "initial_state": states,
        "cu_seqlens": cu,
        "return_state": True,
    }
    queries, final = run(part)
    transition = final if cu is None else final[1:]
    return Effect(queries.astype(dtype), transition, None, True, _precision(value))


def _precision(x: Any) -> Any:
    """Returns the precision of a matmul whose result is rounded to the dtype of ``x``."""
    narrow = jnp.dtype(x.dtype).itemsize < 4
    return jax.lax.Precision.DEFAULT if narrow else jax.lax.Precision.HIGHEST


def sum_of(*gates: jax.Array | None) -> jax.Array | None:
    """Returns the sum of the log decays that are given, None without any."""
    present = [gate for gate in gates if gate is not None]
    if not present:
        return None
    wide = result_dtype(*present, jnp.float32)
    return sum((gate.astype(wide) for gate in present[1:]), present[0].astype(wide))
