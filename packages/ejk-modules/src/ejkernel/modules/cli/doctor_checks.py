"""Support of each operation on each platform here, and small calls that are run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from ejkernel.modules.cli.checks import Check, make_check

PLATFORMS = ("triton", "pallas", "cuda", "xla")


def operations() -> list[dict[str, Any]]:
    """Returns the automatic choice for a typical call of each operation, and platforms' answers.

    ``{"operation", "chosen", "platforms": {platform: "yes" | reason}}``; nothing is run.
    """
    from ejkernel.modules import supports
    from ejkernel.modules.workloads.call import call_of
    from ejkernel.modules.workloads.find import device_meant, operation_names, shapes_of

    rows = []
    for name in operation_names():
        shape = (shapes_of(name, device=device_meant()) or shapes_of(name))[0]
        call = call_of(shape, name)
        answers = {p: supports(name, platform=p, **call.abstract()) for p in PLATFORMS}
        rows.append(
            {
                "operation": name,
                "shape": shape.name,
                "chosen": call.explanation().platform or "none",
                "platforms": {p: "yes" if a else a.reason for p, a in answers.items()},
            }
        )
    return rows


def packages() -> Iterator[Check]:
    """Checks that every installed kernel package loads."""
    from ejkernel.ops import kernel_registry as registry

    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        registry.load()
        for point, failure in registry.failures():
            distribution = point.dist.name if point.dist else point.value.partition(".")[0]
            ours = point.value.startswith("ejkernel.")
            yield Check(
                "kernels", f"{point.name} kernels", "fail" if ours else "warn",
                f"{point.value} does not load: {type(failure).__name__}: {failure}",
                f"python -m pip install --force-reinstall {distribution}   # or uninstall it",
            )  # fmt: skip
        names = registry.list_algorithms()
    replaced: dict[tuple[str, str], list[str]] = {}
    for i in registry.replacements():
        replaced.setdefault((i.origin, i.replaces), []).append(i.name)
    for (origin, replaces), kernels in replaced.items():
        yield Check(
            "kernels", "replaced", "warn", f"{origin} replaces {', '.join(kernels)} of {replaces}",
            f"python -m pip uninstall {origin.partition(' ')[0]}   # brings them back",
        )  # fmt: skip
    text = f"{', '.join(registry.installed())}: {len(names)} algorithms"
    if names:
        yield Check("kernels", "registered", "ok", text)
    else:
        fix = "python -m pip install ejk-modules   # kernels are found by their entry points"
        yield Check("kernels", "registered", "fail", "no kernel package is installed", fix)


def small_call() -> Iterator[Check]:
    """Checks flash_attention and its gradient on the device against a reference in numpy."""
    import time

    import jax
    import numpy as np

    from ejkernel.modules import flash_attention
    from ejkernel.ops import policy_override
    from ejkernel.ops.execution.progress import first_line

    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 64, 2, 64), np.float32)
    start = time.perf_counter()
    try:
        with policy_override(autotune=False):
            out, pull = jax.vjp(lambda q: flash_attention(q, k, v, causal=True), q)
            gradient = pull(out)[0]
        out, gradient = np.asarray(out), np.asarray(gradient)
    except Exception as error:
        line = first_line(str(error))[:300]
        yield Check(
            "kernels", "a small call", "fail", f"{type(error).__name__}: {line}",
            "ejk explain flash_attention s=64 h=2 d=64 dtype=float32 causal=true",
        )  # fmt: skip
        return
    x = np.einsum("bqhd,bkhd->bhqk", q, k) / 8
    x = np.where(np.tri(64, dtype=bool), x, -np.inf)
    p = np.exp(x - x.max(-1, keepdims=True))
    expected = np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v)
    error = float(np.abs(out - expected).max())
    valid = error < 5e-3 and bool(np.isfinite(gradient).all())
    yield make_check(
        "kernels", "a small call", "" if valid else "fail",
        f"flash_attention and its gradient, largest error {error:.1e}, "
        f"{time.perf_counter() - start:.1f} s with compilation",
        "report this with the output of: ejk doctor --json",
    )  # fmt: skip


def gated_gradients(platform: str) -> Iterator[Check]:
    """Checks gradients of gated linear attention over a few chunks against a reference in numpy.

    Some compilers of Triton got them wrong on Hopper, and nothing else.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from ejkernel.modules import recurrent_attention
    from ejkernel.ops import policy_override
    from ejkernel.ops.execution.progress import first_line

    rng = np.random.default_rng(0)
    rounded = jnp.asarray(rng.standard_normal((4, 192, 64)), jnp.bfloat16)
    q, k, v, do = np.asarray(rounded, np.float64)
    g = -np.abs(rng.standard_normal(192)).astype(np.float32) / 8
    subject = f"gated gradients on {platform}"

    def call(q, k, v, g):
        return recurrent_attention(q, k, v, g=g, softmax_scale=1.0, platform=platform)

    try:
        with policy_override(autotune=False):
            rows = [x[None, :, None] for x in (*rounded, jnp.asarray(g))]
            pull = jax.vjp(call, *rows[:3], rows[4])[1]
            gradients = [np.asarray(x, np.float64)[0, :, 0] for x in pull(rows[3])]
    except Exception as error:
        line = first_line(str(error))[:300]
        fix = f"ejk explain recurrent_attention --platform {platform}"
        yield Check("kernels", subject, "fail", f"{type(error).__name__}: {line}", fix)
        return
    total = np.cumsum(g, dtype=np.float64)
    decay = np.exp(np.where(np.tri(192, dtype=bool), total[:, None] - total, -np.inf))
    weights, pairs = decay * (q @ k.T), decay * (do @ v.T)
    both = pairs * (q @ k.T)
    dg = np.cumsum((both.sum(1) - both.sum(0))[::-1])[::-1]
    expected = (pairs @ k, pairs.T @ q, weights.T @ do, dg)
    matched = zip(gradients, expected, strict=True)
    errors = [float(np.abs(x - y).max() / np.abs(y).max()) for x, y in matched]
    valid = bool(np.max(errors) < 2e-2)  # NaN is not
    yield make_check(
        "kernels", subject, "" if valid else "fail",
        "recurrent_attention: largest errors of dq, dk, dv, dg are "
        + ", ".join(f"{e:.1e}" for e in errors) + " of the largest value",
        "python -m pip install -U triton   # 3.4 to 3.7.0 compile them wrongly",
    )  # fmt: skip
