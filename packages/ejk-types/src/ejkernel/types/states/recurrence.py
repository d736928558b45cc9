"""Linear recurrences over tokens on several devices.

Each device runs its tokens from a state of zeros. The state S that reaches it changes what it has
by a linear map, so that it is never waited for:

    output_t = local output_t + read_t(S)          state after = local state + transition(S)

Of linear attention with decays, ``transition`` multiplies by the decay of all tokens, and
``read_t`` is the query of token t with the decay up to it. Of the delta rule, both are what the
kernel itself gives for values of zero and the identity as state: the steps' matrices
multiplied, and the queries that have gone through them.

Gradients need one backward pass of the kernel, from the state that reached the device. The
gradient of that state is ``read`` transposed, of the output's gradient, and ``transition``
transposed, of the gradient of the state after, which comes from the devices behind. Gradients of
states so pass back as states pass on, before the kernel runs. The forward pass saves its states for
them; where it cannot, gradients are JAX's, through both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.types.arrays import result_dtype
from ejkernel.types.states.line import LocalSequences, expand_flags, scan_states

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

    @classmethod
    def of_delta_rule(cls, queries: jax.Array, transition: jax.Array, value: jax.Array) -> Effect:
        """Returns the effect of a state in the delta rule, from what the kernel gives for it."""
        return cls(queries, transition, None, True, _precision(value))

    def read(self, state: jax.Array) -> jax.Array:
        """Returns what the tokens read of the state: ``[batch, tokens, heads, v_dim]``."""
        o = jnp.einsum("bthk,bhkv->bthv", self.queries, state, precision=self.precision)
        return o if self.decays is None else o * self.decays

    def apply(self, transition: jax.Array, state: jax.Array) -> jax.Array:
        return matmul(transition, state) if self.is_matrix else transition * state

    compose = apply

    def transposed(self, transition: jax.Array) -> jax.Array:
        """Returns the transition of gradients, which pass from later tokens to earlier ones."""
        return jnp.swapaxes(transition, -1, -2) if self.is_matrix else transition

    def read_back(self, do: jax.Array, state: jax.Array) -> jax.Array:
        """Returns the gradient of a state from what the tokens read of it."""
        kind = jax.ShapeDtypeStruct(state.shape, state.dtype)
        return jax.linear_transpose(self.read, kind)(do.astype(state.dtype))[0]


MakeEffect = Callable[[Arguments, LocalSequences, Run, Any], Effect]


class Passed(NamedTuple):
    """The part of a forward pass that a device needs for its gradients.

    Attributes:
        state: that reaches it, ``[batch or 1, heads, key_dim, v_dim]``.
        effect: what the state changes.
    """

    state: jax.Array
    effect: Effect


def run_over_devices(
    a: Arguments, sequences: LocalSequences, run: Run, make_effect: MakeEffect
) -> tuple[tuple[jax.Array, ...], Passed]:
    """Returns the output, the last states if the call requests them, and a part for gradients.

    ``a``: the arguments of one device; ``run``: computes a call of one device.
    """
    s, initial = sequences, a["initial_state"]
    cu = {"cu_seqlens": s.cu_seqlens, "return_state": True}
    o, final = run({**a, **cu, "initial_state": s.initial_states(initial)})
    effect = make_effect(a, s, run, final.dtype)
    through = jnp.where(s.passes_through, effect.transition, 0)
    state = scan_states(
        s.line, s.leaving_state(final), through, apply=effect.apply, compose=effect.compose
    )
    o = (o.astype(final.dtype) + effect.read(state)).astype(o.dtype)
    passed = Passed(state, effect)
    if not a["return_state"]:
        return (o,), passed
    changed = effect.apply(effect.transition, state)
    return (o, s.last_states(final + jnp.where(expand_flags(s.enters, final), changed, 0))), passed


def run_from_state(
    a: Arguments, sequences: LocalSequences, run: Run, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the output, and the states behind this device's tokens, from the state before them.

    A state that enters is no function of this device's arguments: its gradient passes on.
    """
    s, initial = sequences, a["initial_state"]
    if initial is None:
        rows = state.shape[0] if s.cu_seqlens is None else s.cu_seqlens.shape[0] - 1
        initial = jnp.zeros((rows, *state.shape[1:]), state.dtype)
    start = jnp.where(expand_flags(s.enters, initial), state.astype(initial.dtype), initial)
    cu = {"cu_seqlens": s.cu_seqlens, "return_state": True}
    return run({**a, **cu, "initial_state": start})


def differentiate_states(
    sequences: LocalSequences, passed: Passed, do: jax.Array, last_gradients: jax.Array | None
) -> jax.Array:
    """Returns the gradients of the states behind this device's tokens, as ``run_from_state`` has.

    ``last_gradients``: of the last states, on every device; None: nobody reads them.
    """
    s, (state, effect) = sequences, passed
    ends, back = None, effect.read_back(do, state)
    through = effect.transposed(effect.transition)
    if last_gradients is not None:
        ends = jnp.where(expand_flags(s.ends_here, last_gradients), last_gradients, 0)
        entered = jnp.where(expand_flags(s.enters, ends), ends, 0)
        if s.cu_seqlens is not None:
            entered = jnp.sum(entered, 0, keepdims=True)
        back = back + effect.apply(through, entered.astype(back.dtype))
    through = jnp.where(s.passes_through, through, 0)
    # a packed sequence that does not enter gives nothing back
    back = jnp.where(jnp.any(s.enters), back, 0)
    line = replace(s.line, reverse=not s.line.reverse)
    coming = scan_states(line, back, through, apply=effect.apply, compose=effect.compose)
    if s.cu_seqlens is not None:
        coming = jnp.where(s.leaves[:, None, None, None], coming, 0)
    return coming if ends is None else coming + ends


class Decays(NamedTuple):
    """Log decays of every token: ``[batch, tokens, heads, channels]``, None where there are none.

    Attributes:
        key: of key channels, or one for all of them.
        value: of value channels.
    """

    key: jax.Array | None
    value: jax.Array | None


def make_decay_effect(a: Arguments, s: LocalSequences, dtype: Any, *, decays: Decays) -> Effect:
    """Returns the effect of a state in linear attention with decays."""
    is_entering_token = s.is_entering_token[None, :, None, None]

    def accumulate(gate: jax.Array | None) -> tuple[Any, Any]:
        """Returns the sums up to each token, and over all of them."""
        if gate is None:
            return None, None
        # rows behind the last sequence may hold anything
        gate = jnp.where(is_entering_token, gate.astype(dtype), 0)
        return jax.lax.cumsum(gate, axis=1, reverse=s.line.reverse), jnp.sum(gate, axis=1)

    key, through_key = accumulate(decays.key)
    value, through_value = accumulate(decays.value)
    query = a["query"]
    wide = jnp.where(is_entering_token, query.astype(dtype), 0) * a["softmax_scale"]
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


def make_delta_effect(a: Arguments, s: LocalSequences, run: Run, dtype: Any) -> Effect:
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
    local = {
        **a,
        "value": jnp.zeros((b, tokens, heads, width), value.dtype),
        "initial_state": states,
        "cu_seqlens": cu,
        "return_state": True,
    }
    queries, final = run(local)
    transition = final if cu is None else final[1:]
    return Effect.of_delta_rule(queries.astype(dtype), transition, value)


def _precision(x: Any) -> Any:
    """Returns the precision of a matmul whose result is rounded to the dtype of ``x``."""
    narrow = jnp.dtype(x.dtype).itemsize < 4
    return jax.lax.Precision.DEFAULT if narrow else jax.lax.Precision.HIGHEST


def sum_gates(*gates: jax.Array | None) -> jax.Array | None:
    """Returns the sum of the log decays that are given, None without any."""
    present = [gate for gate in gates if gate is not None]
    if not present:
        return None
    wide = result_dtype(*present, jnp.float32)
    return sum((gate.astype(wide) for gate in present[1:]), present[0].astype(wide))
