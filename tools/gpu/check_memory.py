"""Calls of the kernels for GPUs, for a checker of memory accesses on this one.

    compute-sanitizer --report-api-errors no --error-exitcode 9 python tools/gpu/check_memory.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python tools/gpu/check_memory.py --small

The calls are cases of ``pytest -m gpu`` and small ones with every option, whose lengths cut tiles;
some alone are chosen by kind or by their whole name: ``check_memory.py flash "paged page 16"``.
Kinds whose names begin with ``hopper`` are Pallas kernels, the others Triton's. ``--control`` takes
an element from the end of each operand: a checker that then reports nothing sees nothing.
``--small``: Hopper's calls in a few tiles, for checkers that take long. The
option of the first line leaves out attributes that Triton's launcher asks for and CUDA refuses.
racecheck follows loads, stores and barriers of threads; what the copy engine (TMA) writes it does
not see: ``gpu/races.py`` does, in an interpreter. Of ``latent_split``, whose warps have different
work, it reports one pair of instructions, at the line of ``warp_specialize``: the byte by which
Triton tells warps to end is stored, all pass a barrier, it is loaded. A kernel with no more in it
than ``warp_specialize`` and a barrier in memory is reported so too. Another pair is a fault.
What is not a launch of ours runs on JAX's CPU (``gpu.alone`` says why). Exits with 1 when a result
is not a number.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["JAX_PLATFORMS"] = "cuda,cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checkout

checkout.use()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from ejkernel.kernels import triton  # noqa: E402
from ejkernel.kernels.triton.targets import compile_for, cuda_target  # noqa: E402
from ejktest import at_size, variants  # noqa: E402
from ejktest.cases import attention  # noqa: E402
from ejktest.cases import grouped as grouped_cases  # noqa: E402
from ejktest.cases import latent as latent_cases  # noqa: E402
from ejktest.cases import paged as paged_cases  # noqa: E402
from ejktest.cases import ragged as ragged_cases  # noqa: E402
from ejktest.cases import sparse as sparse_cases  # noqa: E402
from ejktest.cases.delta import delta_arguments  # noqa: E402
from ejktest.device import H200, SMALL_CORES, SMALL_H200, on  # noqa: E402
from gpu import alone  # noqa: E402
from gpu.named import chosen, label  # noqa: E402

SMALL = "--small" in sys.argv[1:]
kernels: Any = triton  # its operations are found by name


def run_attention(call, operation):
    return at_size.kernel(call, operation)(*at_size.inputs(call))


def flash(name: str):
    return run_attention(attention.AT_SIZE[name], kernels.flash_attention)


def sparse(name: str):
    return run_attention(attention.SPARSE[name], kernels.blocksparse_attention)


def paged(name: str):
    return paged_cases.runner(name, kernels.page_attention)(*paged_cases.draw(name))


def latent(name: str):
    return latent_cases.runner(name, kernels.mla_decode)(*latent_cases.draw(name))


def ragged(name: str):
    mix = ragged_cases.CASES[name]
    x = ragged_cases.draw(mix)
    if name == "page 16":  # out of order, beyond the table, pages that are none
        x["starts"], x["lens"] = x["starts"].at[1].set(9999), x["lens"] + 1000
        x["tables"] = x["tables"] - 5
    f, arrays = ragged_cases.writing(kernels.ragged_page_attention_v3, mix, x)
    return f(*arrays)


def contiguous():
    q, k, v = (
        jnp.ones(shape, jnp.bfloat16) for shape in ((3, 4, 64), (3, 77, 2, 64), (3, 77, 2, 40))
    )
    start, end = jnp.asarray([0, -9, 76]), jnp.asarray([77, 10, 1000])
    return kernels.ragged_decode_attention(q, k, v, start, end)


def grouped(*case):
    run, arrays = grouped_cases.case_of(kernels.grouped_matmul, *case)
    return run(*arrays)


def stored(case: str):
    run, arrays, _ = grouped_cases.stored_case(kernels.grouped_matmul, case)
    return run(*arrays)


def lists(name: str):
    run, arrays = sparse_cases.case_of(kernels.native_sparse_attention, name)
    return run(**arrays)


def branches(name: str):
    x = sparse_cases.draw(sparse_cases.CASES[name])
    gate = jnp.ones(x["query"].shape[:3], x["query"].dtype)
    cu = jnp.asarray([0, 5, 5, 170, 251])

    def call(q, k, v):
        return kernels.native_sparse_attention(
            q, k, v, gate, None, None, 3, cu, block_size=10, sliding_window=20
        )

    arrays = [x[name] for name in ("query", "key", "value")]
    out, back = jax.vjp(call, *arrays)
    return out, back(x["do"]), call(*arrays)  # which without gradients is another launch


def full_chunks(reverse: bool):
    """Linear attention in float32 with full chunks: on Hopper a kernel of its own."""
    q, k, v = (jnp.ones((1, 192, h, 128), jnp.float32) for h in (2, 1, 1))
    g = jnp.full((1, 192, 2), -0.1)
    run = lambda *x: kernels.recurrent_attention(*x[:3], g=x[3], reverse=reverse)  # noqa: E731
    out, back = jax.vjp(run, q, k, v, g)
    return out, back(out)


def delta_rule(tokens: int, reverse: bool):
    """Chunks of packed sequences that end inside them; or one token of each sequence."""
    dims = dict(b=1, s=tokens, h=2, hk=1, dk=128, dv=64, states=4, dtype=jnp.bfloat16)
    args = delta_arguments("head", **dims)
    cu = jnp.asarray([0, 1, 1, tokens - 2, tokens - 1])

    def apply(args):
        return kernels.gated_delta_rule(
            **args, cu_seqlens=cu, reverse=reverse, normalize_qk=True, return_state=True
        )

    out, back = jax.vjp(apply, args)
    return out, back(out)


# ---- on Hopper ---------------------------------------------------------------------------------


def hopper(folder: str, operation: str | None = None):
    """The operation of a folder of Hopper kernels, for that GPU whatever the default device."""
    module = importlib.import_module(f"ejkernel.kernels.pallas.gpu.{folder}.implementation")

    def call(*args, **options):
        with on(SMALL_H200 if SMALL else H200):
            return getattr(module, operation or folder)(*args, **options)

    return call


def hopper_flash(name: str):
    call = (attention.SMALL if SMALL else attention.AT_SIZE)[name]
    return run_attention(call, hopper("flash_attention"))


def hopper_sparse(name: str):
    call = (attention.SMALL_SPARSE if SMALL else attention.SPARSE)[name]
    return run_attention(call, hopper("blocksparse_attention"))


def hopper_grouped(*case):
    run, arrays = grouped_cases.case_of(hopper("grouped_matmul"), *case, rows=392)
    return run(*arrays)


def hopper_ragged(name: str):
    mix = (ragged_cases.SMALL if SMALL else ragged_cases.HOPPER)[name]
    operation = hopper("ragged_page_attention", "ragged_page_attention_v3")
    f, arrays = ragged_cases.writing(operation, mix, ragged_cases.draw(mix))
    return f(*arrays)


def hopper_latent(name: str):
    return latent_cases.runner(name, hopper("mla_decode"))(*latent_cases.draw(name))


def varied(operation: str, label: str):
    call = VARIANTS[operation, label]
    smooth = {name: call.arrays[name] for name in call.gradients}
    fixed = {name: x for name, x in call.arguments.items() if name not in smooth}
    out, back = jax.vjp(lambda x: getattr(kernels, operation)(**x, **fixed), smooth)
    return out, back(jax.tree.map(jnp.ones_like, out))


VARIANTS = {
    (operation, label): call
    for operation in (
        "recurrent_attention",
        "gla_attention",
        "lightning_attention",
        "causal_conv1d",
        "mean_pooling",
    )
    for label, call in variants.options()[operation]
}
CALLS = (
    *((flash, name) for name in (
        "odd causal", "odd gqa cap d256", "d40/24 window", "d112 odd", "bias odd rows", "dropout",
        "segments q>k", "everything d96", "float32 d128",
    )),
    *((sparse, name) for name in ("causal 128", "32 x 16", "across, odd", "options", "none seen")),
    *((paged, name) for name in (
        "page 16", "splits 5", "window cap sinks", "int8 page 1", "e4m3 d64 window",
    )),
    *((latent, name) for name in (
        "page 16, rows", "16 heads", "page 3, 40 heads", "e4m3", "int8, 16 heads", "e4m3, 16 heads",
        "e4m3, 16 heads, splits", "float16 and e5m2, page 16", "int8, 20 heads",
    )),
    *((ragged, name) for name in (
        "page 16", "page 1 mqa 64", "page 64", "window cap sinks", "int8 packed d72", "few long",
    )),
    (contiguous,),
    (grouped, "around a tile", "bfloat16", False),
    (grouped, "some of eight", "bfloat16", True),
    (grouped, "around a tile", "odd bfloat16", False),
    (grouped, "around a tile", "odd float32", False),
    *((stored, case) for case in ("int8", "e4m3 transposed", "e5m2", "e5m2 transposed")),
    *((lists, name) for name in ("odd group d80", "one head d64", "float32")),
    *((branches, name) for name in ("one head d64", "float32")),
    *((full_chunks, reverse) for reverse in (False, True)),
    *((delta_rule, tokens, reverse) for tokens in (4, 200) for reverse in (False, True)),
    *((varied, *names) for names in VARIANTS),
    *((hopper_flash, name) for name in (
        "odd causal", "odd gqa cap d256", "segments q>k", "segments cap d64", "sinks cap window",
        "odd full d192/128",
    )),
    *((hopper_sparse, name) for name in (
        "causal 128", "across in sixteens", "none seen", "segments cap", "256 d256",
    )),
    (hopper_grouped, "around a tile", "whole bfloat16", False),
    (hopper_grouped, "some of eight", "whole float16", True),
    *((hopper_ragged, name) for name in ragged_cases.HOPPER),
    *((hopper_latent, name) for name in ("128 heads", "float16, rows", "e4m3")),
)  # fmt: skip


SMALL_CALLS = (
    *((hopper_flash, name) for name in attention.SMALL),
    *((hopper_sparse, name) for name in attention.SMALL_SPARSE),
    *(call for call in CALLS if call[0] is hopper_grouped),
    *((hopper_ragged, name) for name in ragged_cases.SMALL),
)


def main() -> None:
    start, failed, control = time.time(), 0, "--control" in sys.argv[1:]
    selected = [name for name in sys.argv[1:] if not name.startswith("--")]
    print(jax.devices()[0], flush=True)
    alone.install(short=control)
    calls = chosen(SMALL_CALLS if SMALL else CALLS, selected)
    for run, *case in calls[: 1 if control else None]:
        before, earlier = time.time(), len(alone.launched)
        with jax.disable_jit(), jax.default_device(jax.devices("cpu")[0]):
            out = run(*case)
        names = alone.launched[earlier:]
        good = not any(np.isnan(np.asarray(x, np.float32)).any() for x in jax.tree.leaves(out))
        good = good and bool(names)
        failed += not good
        mark = "ok  " if good else "FAIL"
        made = ", ".join(f"{names.count(n)} {n}" for n in dict.fromkeys(names))
        took = time.time() - before
        print(f"{mark} {label((run, *case))} [{took:.1f}s]: {made}", flush=True)
    launches = len(alone.launched)
    print(f"{failed} failed; {launches} launches, {time.time() - start:.0f}s in all", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    with compile_for(cuda_target(90, SMALL_CORES)) if SMALL else contextlib.nullcontext():
        main()
