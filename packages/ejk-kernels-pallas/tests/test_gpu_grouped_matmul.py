"""Hopper's gradient of grouped matrices where there is no Hopper GPU.

Where JAX can interpret all of the kernel it runs here, warpgroups, copies, barriers and all, with
an eye on races; it runs at real sizes on a GPU only (``test_gpu_card.py``).
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from ejkernel.kernels.pallas import compat

if compat.mosaic_gpu_problem() is not None:
    pytest.skip(compat.mosaic_gpu_problem(), allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.chip import Chip
from ejkernel.kernels.pallas.gpu.grouped_matmul import implementation, tile_queue, weights
from ejkernel.kernels.pallas.gpu.grouped_matmul.weights import Weights
from ejkernel.ops.differentiate import Work
from ejkernel.types.masks.structure import Unsupported
from ejkernel.types.problems.grouped_matmul import GroupedProblem
from ejktest.bound import bound, on, struct
from ejktest.oracles import grouped as oracle
from ejktest.programs import sizes_of
from ejktest.tolerance import check_close

interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="JAX before 0.11 interprets part of the kernel"
)
# sizes, rows, group offset, shape of the matrices, what else the kernel is told
CASES = {
    "around a step": ([0, 1, 63, 64, 65, 9], 208, None, (128, 256), {}),
    "around a tile": ([127, 0, 128, 129, 300], 704, None, (192, 320), {}),
    "more than there are": ([40, -3, 2, 2**31 - 1, 7], 64, None, (128, 256), {}),
    "many without rows": (
        [3, 0, 0, 0, 0, 0, 0, 61, 0, 0, 0, 0, 0], 72, None, (128, 256), dict(cores=1),
    ),
    "some of five": ([60, 70, 1, 65, 20], 216, 3, (128, 256), dict(held=3, stages=3, staged=4)),
    "none before the first": (
        [9, 12], 24, -1, (256, 256), dict(held=2, cores=1, stages=3, staged=1, piece=256),
    ),
}  # fmt: skip


@pytest.fixture
def parts_in_the_language(monkeypatch) -> None:
    """The interpreter knows no instructions of the compiler's own: what is made of them is said
    again here. A GPU runs them (``test_gpu_card.py``).
    """
    numbers = itertools.count()

    def taken(counter, words, place, asks):
        kind = jax.ShapeDtypeStruct((), jnp.int32)
        return io_callback(lambda: np.int32(next(numbers)), kind)

    def clear(ref, first, last):
        x = ref[...]
        row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
        ref[...] = jnp.where((row >= first) & (row < last), x, jnp.zeros_like(x))

    monkeypatch.setattr(tile_queue, "fetch_index_in_warpgroup", taken)
    monkeypatch.setattr(weights, "clear_rows", clear)


@interpreted
@pytest.mark.usefixtures("parts_in_the_language")
@pytest.mark.parametrize("name", CASES)
def test_against_float64_without_races(name: str) -> None:
    """Rows behind the groups hold NaN and infinity."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    sizes, rows, offset, (down, across), options = CASES[name]
    kernel = Weights(
        rows=rows, down=down, across=across, batch=1, groups=len(sizes), dtype="bfloat16",
        **(dict(held=len(sizes), cores=2) | options),
    )  # fmt: skip
    rng, used = np.random.default_rng(0), sum(max(n, 0) for n in sizes)
    a, b = (rng.standard_normal((rows, n)) for n in (down, across))
    a[used:], b[used:] = np.nan, np.inf
    a, b = jnp.asarray(a, "bfloat16"), jnp.asarray(b, "bfloat16")
    given = a, b, np.asarray(sizes, np.int32), None if offset is None else np.asarray([offset])
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        found = np.asarray(jax.jit(kernel.__call__)(*given))
    assert not gpu_callbacks.get_races().races_found
    full_weights = np.zeros((kernel.held, down, across))
    want = oracle.grouped_matmul(a, full_weights, np.maximum(sizes, 0), offset, dout=b).drhs
    check_close(found, want, name=name)


def test_fewer_than_three_steps_in_memory_would_wait_for_each_other() -> None:
    with pytest.raises(ValueError, match="stages: 2"):
        Weights(64, 128, 256, 1, 1, 1, "bfloat16", 1, stages=2)


class TestComposedKernel:
    """Calls that need Triton's kernels too."""

    @pytest.fixture(autouse=True)
    def both(self) -> None:
        pytest.importorskip("ejkernel.kernels.triton", reason="it does the rest of the work")

    @staticmethod
    def lowered(
        *,
        rows=4096,
        matrices=(8, 512, 1024),
        dtype=jnp.bfloat16,
        mapped=0,
        sharded=False,
        **options,
    ):
        from ejkernel.kernels.pallas.gpu.grouped_matmul.implementation import grouped_matmul

        def pull(lhs, rhs, sizes):
            def loss(rhs):
                return grouped_matmul(lhs, rhs, sizes, **options).astype(jnp.float32).sum()

            return jax.grad(loss)(rhs)

        held, down, across = matrices
        device = jax.sharding.AbstractDevice(
            device_kind="NVIDIA H200", num_cores=132, platform="cuda"
        )
        here = on(device)
        if sharded:
            kinds = (jax.sharding.AxisType.Auto,)
            mesh = jax.sharding.AbstractMesh((2,), ("x",), kinds, abstract_device=device)
            here, spec = jax.sharding.use_abstract_mesh(mesh), jax.sharding.PartitionSpec("x")
            pull = jax.shard_map(pull, mesh=mesh, in_specs=spec, out_specs=spec)
        inner = across if options.get("transpose_rhs") else down
        shapes = struct(rows, inner, dtype=dtype), struct(*matrices, dtype=dtype)
        groups = held + 3 if "group_offset" in options else held
        shapes += (struct(groups, dtype=jnp.int32),)
        if mapped:
            shapes = tuple(struct(mapped, *x.shape, dtype=x.dtype) for x in shapes)
            pull = jax.vmap(pull)
        with here:
            return jax.jit(pull).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()

    @interpreted
    @pytest.mark.usefixtures("parts_in_the_language")
    def test_calls_side_by_side_with_transposed_matrices(self) -> None:
        rows, inner, columns, offsets = 32, 256, 128, np.asarray([0, 1])
        p = GroupedProblem(rows, inner, columns, 1, 2, True, "float16", "float16", "tf32", 2)
        rng = np.random.default_rng(0)
        lhs, dout = (rng.standard_normal((2, rows, n)).astype("float16") for n in (inner, columns))
        sizes = np.asarray([[9, 20], [3, 25]])
        lanes = np.concatenate([sizes, rows - sizes.sum(1, keepdims=True)], axis=1)
        arrays = {name: x.reshape(2 * rows, -1) for name, x in (("lhs", lhs), ("dout", dout))}
        arrays |= {"group_sizes": lanes.reshape(-1), "offset": offsets}
        work = Work(implementation.grouped_matmul, p, None, None, Chip(2))
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            found = jax.jit(implementation.drhs, static_argnums=0)(work, arrays)["out"]
        none = np.zeros((1, columns, inner))
        for i in range(2):
            call = lhs[i], none, sizes[i], offsets[i]
            want = oracle.grouped_matmul(*call, dout=dout[i], transpose_rhs=True).drhs
            check_close(np.asarray(found[i : i + 1]), want)

    @pytest.mark.parametrize(
        "given",
        [
            {},
            dict(transpose_rhs=True, dtype=jnp.float16),
            dict(mapped=3),
            dict(sharded=True),
            dict(group_offset=2),
        ],
        ids=str,
    )
    def test_lowers_for_a_hopper_gpu(self, given) -> None:
        text = self.lowered(**given)
        assert text.count("mosaic_gpu_v2") == 1

    def test_nothing_is_larger_than_operands_and_results(self) -> None:
        """The result and both gradients: no memory that grows with groups times rows."""
        from ejkernel.kernels.pallas.gpu.grouped_matmul.implementation import grouped_matmul

        shapes = struct(4096, 512), struct(64, 512, 1024), struct(64, dtype=jnp.int32)

        def run(lhs, rhs, sizes):
            out, back = jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes), lhs, rhs)
            return out, *back(out)

        with on(jax.sharding.AbstractDevice("NVIDIA H200", num_cores=132, platform="cuda")):
            program = jax.make_jaxpr(run)(*shapes)
        assert "grouped_weights" in str(program)
        assert max(sizes_of(program.jaxpr)) == 2 * shapes[1].size

    @pytest.mark.parametrize(
        ("given", "reason"),
        [
            (dict(dtype=jnp.float32), "float32"),
            (dict(rows=4100), "4100 rows"),
            (dict(matrices=(8, 520, 1024)), "520 x 1024"),
            (dict(matrices=(8, 64, 1024)), "64 x 1024"),
            (dict(matrices=(8, 1024, 128)), "1024 x 128"),
        ],
        ids=str,
    )
    def test_refuses_by_name_what_it_does_not_do(self, given, reason: str) -> None:
        with pytest.raises(Unsupported, match=reason):
            self.lowered(**given)

    @pytest.mark.parametrize(
        ("rows", "held", "across", "ahead"),
        [
            (4096, 8, 768, False),
            (4096, 128, 768, True),
            (4096, 128, 832, False),
            (16384, 128, 832, True),
        ],
    )
    def test_leads_where_it_is_faster(self, rows, held, across, ahead) -> None:
        """Calls in which every multiprocessor has a tile, and short tiles leave in large pieces."""
        from ejkernel.kernels.pallas.gpu.grouped_matmul.implementation import grouped_matmul

        shapes = struct(rows, 512), struct(held, 512, across), struct(held, dtype=jnp.int32)
        with on(jax.sharding.AbstractDevice("NVIDIA H200", num_cores=132, platform="cuda")):
            given = dict(zip(("lhs", "rhs", "group_sizes"), shapes, strict=True))
            priority = grouped_matmul.priority_for(bound(grouped_matmul.call, **given))
        assert (priority > 100) == ahead
