"""A layer of experts, trained: each token goes to its best few of many small networks.

    python docs/examples/moe.py               # a few seconds on a CPU
    python docs/examples/moe.py --steps 500
    python docs/examples/moe.py --devices 4   # experts and tokens over four devices

A router scores the experts, each token takes the best ``chosen`` of them, and the rows are sorted
by expert, so that every expert has one run of consecutive rows: two calls of ``grouped_matmul``
with an activation between are the whole layer. Nothing is padded and no token is dropped. The loss
of Fedus et al. 2021, "Switch Transformers" (arXiv 2101.03961), section 2.2, keeps the experts
equally busy.

``experts_on_devices`` is the same layer with the experts spread over a mesh axis: every device
holds some of the matrices and multiplies only the rows that are theirs. ``layer`` itself does so
under plain ``jit`` if the matrices are sharded, with one sum over the devices for each matmul.
There every device has all tokens. With many tokens, ``experts_and_tokens_on_devices`` spreads both:
rows travel to the devices of their experts and back, by ``all_to_all``.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ejkernel.modules import grouped_matmul


class Experts(NamedTuple):
    """``router [dim, experts]``, ``up [experts, dim, hidden]``, ``down [experts, hidden, dim]``."""

    router: jax.Array
    up: jax.Array
    down: jax.Array


class Routes(NamedTuple):
    """The routing of rows to experts.

    order: token of every row, rows sorted by expert, ``[tokens * chosen]``.
    sizes: rows of every expert ``[experts]``.
    weights: of every row in its token's sum.
    balance: 1 where experts are equally busy, more where they are not.
    """

    order: jax.Array
    sizes: jax.Array
    weights: jax.Array
    balance: jax.Array


def init(key: jax.Array, dim: int, hidden: int, experts: int) -> Experts:
    keys = jax.random.split(key, 3)
    shapes = (dim, experts), (experts, dim, hidden), (experts, hidden, dim)
    fans = dim, dim, hidden
    return Experts(
        *(
            jax.random.normal(k, shape) * fan**-0.5
            for k, shape, fan in zip(keys, shapes, fans, strict=True)
        )
    )


def route(router: jax.Array, x: jax.Array, chosen: int) -> Routes:
    """The best ``chosen`` experts of every token of ``x [tokens, dim]``."""
    experts = router.shape[1]
    probabilities = jax.nn.softmax(x @ router)
    best, expert = jax.lax.top_k(probabilities, chosen)
    weights = best / best.sum(-1, keepdims=True)
    rows = expert.reshape(-1)
    order = jnp.argsort(rows, stable=True)
    sizes = jnp.bincount(rows, length=experts)
    balance = experts * jnp.sum(sizes / rows.size * probabilities.mean(0))
    return Routes(order // chosen, sizes, weights.reshape(-1)[order], balance)


def layer(p: Experts, x: jax.Array, chosen: int = 2) -> tuple[jax.Array, jax.Array]:
    """``sum over chosen experts of weight * down(silu(up(x)))`` of every token, and the balance."""
    to = route(p.router, x, chosen)
    rows = x[to.order]
    rows = jax.nn.silu(grouped_matmul(rows, p.up, to.sizes))
    rows = grouped_matmul(rows, p.down, to.sizes)
    out = jnp.zeros_like(x).at[to.order].add(rows * to.weights[:, None])
    return out, to.balance


def dense(p: Experts, x: jax.Array, chosen: int = 2) -> jax.Array:
    """Runs all experts on all tokens: ``layer`` must equal it, at a fraction of its cost."""
    best, expert = jax.lax.top_k(jax.nn.softmax(x @ p.router), chosen)
    weights = best / best.sum(-1, keepdims=True)
    everyone = jnp.einsum("eth,ehd->ted", jax.nn.silu(jnp.einsum("td,edh->eth", x, p.up)), p.down)
    return jnp.einsum("tk,tkd->td", weights, jnp.take_along_axis(everyone, expert[..., None], 1))


def experts_on_devices(
    p: Experts, x: jax.Array, mesh: jax.sharding.Mesh, axis: str, chosen: int = 2
) -> jax.Array:
    """``layer`` with the experts spread over ``axis``: ``up`` and ``down`` are cut along axis 0.

    ``group_offset`` says which expert a device's first matrix belongs to; rows of the others give
    0, so a sum over the devices puts the answers together.
    """
    to = route(p.router, x, chosen)
    local_experts = p.up.shape[0] // mesh.shape[axis]

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(axis), P(axis), P()),
        out_specs=P(),
    )
    def run(rows, up, down, sizes):
        first = jax.lax.axis_index(axis) * local_experts
        rows = jax.nn.silu(grouped_matmul(rows, up, sizes, first))
        return jax.lax.psum(grouped_matmul(rows, down, sizes, first), axis)

    rows = run(x[to.order], p.up, p.down, to.sizes)
    return jnp.zeros_like(x).at[to.order].add(rows * to.weights[:, None])


def experts_and_tokens_on_devices(
    p: Experts, x: jax.Array, mesh: jax.sharding.Mesh, axis: str, chosen: int = 2
) -> tuple[jax.Array, jax.Array]:
    """``layer`` with tokens and experts spread over ``axis``, and the rows that each device gets.

    Dispatch: every device sorts its rows by expert, and so by the device that holds it, and sends
    each device its rows. Combine: the same way back. A message has room for all rows of a device,
    so no token is dropped however uneven the routes are.
    """
    devices = mesh.shape[axis]
    local_experts = p.up.shape[0] // devices

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(axis), P(axis), P(axis)),
        out_specs=(P(axis), P(axis)),
    )
    def run(router, up, down, x):
        to = route(router, x, chosen)
        room = to.order.shape[0]
        sizes = to.sizes.reshape(devices, local_experts)  # of each expert of each device
        counts = sizes.sum(1)
        starts = jnp.cumsum(counts) - counts
        place = starts[:, None] + jnp.arange(room)
        sent = jnp.take(x[to.order], place, axis=0, mode="fill", fill_value=0)
        exchange = partial(
            jax.lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0, tiled=True
        )
        rows, sizes = exchange(sent), exchange(sizes)

        # the rows of each sender are sorted by expert; those past its last one count as one more
        ends = jnp.cumsum(sizes, axis=1)
        expert = (jnp.arange(room)[None, :, None] >= ends[:, None]).sum(-1).reshape(-1)
        order = jnp.argsort(expert, stable=True)
        rows = rows.reshape(-1, x.shape[1])[order]
        sizes = sizes.sum(0)
        rows = jax.nn.silu(grouped_matmul(rows, up, sizes))
        rows = grouped_matmul(rows, down, sizes)
        rows = jnp.zeros_like(rows).at[order].set(rows)

        back = exchange(rows.reshape(devices, room, -1))
        owner = jnp.searchsorted(jnp.cumsum(counts), jnp.arange(room), side="right")
        rows = back[owner, jnp.arange(room) - starts[owner]]
        out = jnp.zeros_like(x).at[to.order].add(rows * to.weights[:, None])
        return out, sizes.sum()[None]

    return run(*p, x)


@partial(jax.jit, static_argnames=("chosen", "rate"))
def step(p: Experts, x: jax.Array, y: jax.Array, chosen: int = 2, rate: float = 0.3):
    """One step of gradient descent on ``mean((layer(x) - y) ** 2)``: parameters, loss, balance."""

    def loss(p: Experts):
        out, balance = layer(p, x, chosen)
        return jnp.mean((out - y) ** 2) + 0.01 * balance, balance

    (value, balance), gradient = jax.value_and_grad(loss, has_aux=True)(p)
    return jax.tree.map(lambda w, g: w - rate * g, p, gradient), value, balance


def main(steps: int = 200, tokens: int = 256, dim: int = 16, experts: int = 8) -> list[float]:
    """Learn a function of eight kinds of tokens; returns the losses."""
    keys = jax.random.split(jax.random.key(0), 4)
    teacher, student = init(keys[0], dim, 32, experts), init(keys[1], dim, 32, experts)
    losses = []
    for i in range(steps):
        x = jax.random.normal(jax.random.fold_in(keys[2], i), (tokens, dim))
        student, loss, balance = step(student, x, dense(teacher, x))
        losses.append(float(loss))
        if i % max(steps // 10, 1) == 0 or i == steps - 1:
            print(f"step {i:4d}  loss {losses[-1]:.4f}  balance {float(balance):.2f}")
    return losses


def spread(devices: int, tokens: int = 256, dim: int = 16, experts: int = 8) -> jax.Array:
    """Runs one layer with tokens and experts over the devices; returns the rows of each device."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("expert",))
    p = init(jax.random.key(0), dim, 32, experts)
    x = jax.random.normal(jax.random.key(1), (tokens, dim))
    run = jax.jit(partial(experts_and_tokens_on_devices, mesh=mesh, axis="expert"))
    out, rows = run(p, x)
    error = jnp.abs(out - dense(p, x)).max()
    print(f"rows of each device  {' '.join(map(str, rows))}")
    print(f"balance {rows.max() / rows.mean():.2f}  error {error:.1e}")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--devices", type=int, help="run one layer over this many, on a CPU")
    options = parser.parse_args()
    for name, value in vars(options).items():
        if value is not None and value < 1:
            parser.error(f"argument --{name}: given {value}, expected at least 1")
    try:
        if options.devices is None:
            main(options.steps)
        else:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", options.devices)
            spread(options.devices)
    except KeyboardInterrupt:
        print("moe.py: stopped", file=sys.stderr)
        sys.exit(130)
