"""Hopper's grouped matmul where there is no Hopper GPU: the gradient of matrices, 8-bit matrices.

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
from jax.experimental import pallas as pl

from ejkernel.kernels.pallas import compat

if compat.mosaic_gpu_problem() is not None:
    pytest.skip(compat.mosaic_gpu_problem(), allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.chip import Chip
from ejkernel.kernels.pallas.gpu.grouped_matmul import (
    eight_bit,
    fragments,
    implementation,
    tile_queue,
    weights,
)
from ejkernel.kernels.pallas.gpu.grouped_matmul.eight_bit import EightBitMatmul
from ejkernel.kernels.pallas.gpu.grouped_matmul.weights import Weights
from ejkernel.ops.differentiate import Work
from ejkernel.types.masks.structure import Unsupported
from ejkernel.types.problems.grouped_matmul import GroupedProblem
from ejktest.bound import bound, on, struct
from ejktest.fragments import convert_columns, transpose_result
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

    def load(ref, part, kind, dtype, *, transposed):
        columns = pl.ds(part * fragments.ROWS, fragments.ROWS)
        return convert_columns(ref[columns, :] if transposed else ref[:, columns].T, kind, dtype)

    def stage(ref, x):
        ref[...] = transpose_result(x, ref.dtype)

    def store(ref, staged, first, last):
        for row in range(staged.shape[0]):

            @pl.when((row >= first) & (row < last))
            def copy(row: int = row) -> None:
                ref.at[pl.ds(row, 1)][...] = staged[pl.ds(row, 1), :]

    monkeypatch.setattr(tile_queue, "fetch_index_in_warpgroup", taken)
    monkeypatch.setattr(weights, "clear_rows", clear)
    monkeypatch.setattr(eight_bit, "load_fragment", load)
    monkeypatch.setattr(eight_bit, "stage_result", stage)
    monkeypatch.setattr(eight_bit, "store_staged", store)


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


class InterpretedMatmul(EightBitMatmul):
    """The kernel for the interpreter, whose matmuls have no operand in registers."""

    def _scratch(self):
        shape = (eight_bit.CONSUMERS, fragments.ROWS, fragments.DEPTH)
        return super()._scratch() | {"columns": plgpu.SMEM(shape, jnp.dtype(self.dtype))}

    def multiply_step(self, r, acc, columns, n):
        mine = r.columns.at[lax.axis_index("wg")]
        mine[...] = columns
        super().multiply_step(r, acc, mine, n)


# sizes, rows, group offset, inner and columns, whether matrices are transposed, programs
EIGHT_BIT_CASES = {
    "around a tile": ([128, 3, 0, 65, 1], 200, None, (256, 128), False, 1),
    "some of five": ([60, 9, 1, 70, 7], 152, 1, (128, 256), True, 2),
    "more than there are": ([40, -3, 2, 2**31 - 1], 72, None, (128, 128), True, 2),
}


@interpreted
@pytest.mark.usefixtures("parts_in_the_language")
@pytest.mark.parametrize("name", EIGHT_BIT_CASES)
def test_8_bit_matrices_against_float64(name: str) -> None:
    """Rows behind the groups hold NaN. Races are looked for by ``tools/gpu/races.py``: of a barrier
    on which both consumers arrive, JAX's interpreter keeps the time of one.
    """
    sizes, rows, offset, (inner, columns), transposed, cores = EIGHT_BIT_CASES[name]
    held = len(sizes) if offset is None else 3
    kernel = InterpretedMatmul(
        rows=rows, inner=inner, columns=columns, batch=1, groups=len(sizes), matrices=held,
        shared=True, transposed=transposed, dtype="bfloat16", stored="int8", cores=cores, tall=128,
    )  # fmt: skip
    rng, used = np.random.default_rng(0), sum(max(n, 0) for n in sizes)
    lhs = rng.standard_normal((rows, inner))
    lhs[used:] = np.nan
    lhs = jnp.asarray(lhs, "bfloat16")
    shape = (columns, inner) if transposed else (inner, columns)
    rhs = rng.integers(-128, 128, (held, *shape)).astype(np.int8)
    scale = rng.uniform(0.5, 2, (held, columns)).astype(np.float32)
    at = None if offset is None else np.asarray([offset], np.int32)
    with plgpu.force_gpu_interpret_mode(
        plgpu.InterpretGPUParams(out_of_bounds_reads="uninitialized")
    ):
        given = lhs, rhs, np.asarray(sizes, np.int32), at, scale
        found = np.asarray(jax.jit(kernel.__call__)(*given))
    want = oracle.grouped_matmul(
        lhs, rhs, np.maximum(sizes, 0), offset, transpose_rhs=transposed, rhs_scale=scale
    )
    check_close(found, want.out, name=name)


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

    @pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn", "float8_e5m2"])
    @pytest.mark.parametrize(
        "given",
        [
            {},
            dict(transpose_rhs=True, scale="column"),
            dict(dtype=jnp.float16, scale="group"),
            dict(mapped=3, scale="column"),
        ],
        ids=str,
    )
    def test_lowers_with_8_bit_matrices(self, stored, given) -> None:
        """The result and the gradient of the rows."""
        lowered = self.traced_8_bit(stored, **given).lower(lowering_platforms=("cuda",))
        assert lowered.as_text().count("mosaic_gpu_v2") == 2

    def test_results_of_other_dtypes_are_computed_by_the_kernel_for_every_gpu(self) -> None:
        traced = self.traced_8_bit("int8", preferred_element_type=jnp.float32)
        assert str(traced.jaxpr).count("name=grouped_matmul_8bit") == 1

    @staticmethod
    def traced_8_bit(
        stored, *, scale=None, mapped=0, dtype=jnp.bfloat16, matrices=(8, 512, 1024), **options
    ):
        from ejkernel.kernels.pallas.gpu.grouped_matmul.implementation import grouped_matmul

        held, down, across = matrices
        inner, columns = (across, down) if options.get("transpose_rhs") else (down, across)
        scales = {None: None, "group": struct(held), "column": struct(held, columns)}[scale]
        out = options.get("preferred_element_type", dtype)
        shapes = [struct(4096, inner, dtype=dtype), struct(*matrices, dtype=stored)]
        shapes += [struct(held, dtype=jnp.int32), scales, struct(4096, columns, dtype=out)]

        def pull(lhs, rhs, sizes, scale, dout):
            def run(lhs):
                return grouped_matmul(lhs, rhs, sizes, rhs_scale=scale, **options)

            out, back = jax.vjp(run, lhs)
            return out, *back(dout)

        if mapped:  # the matrices are shared
            axes = (0, None, 0, None, 0)
            pull = jax.vmap(pull, axes)
            shapes = [
                x if axis is None else struct(mapped, *x.shape, dtype=x.dtype)
                for x, axis in zip(shapes, axes, strict=True)
            ]
        device = jax.sharding.AbstractDevice("NVIDIA H200", num_cores=132, platform="cuda")
        with on(device):
            return jax.jit(pull).trace(*shapes)

    def test_refuses_8_bit_matrices_by_name(self) -> None:
        with pytest.raises(Unsupported, match="512 x 1088 are no multiples of 128"):
            self.traced_8_bit("int8", matrices=(8, 512, 1088))
        with pytest.raises(Unsupported, match="float32"):
            self.traced_8_bit("int8", dtype=jnp.float32)

    @pytest.mark.parametrize(("rows", "ahead"), [(8 * 128, False), (8 * 256, True)])
    def test_leads_with_8_bit_matrices_where_groups_are_large(self, rows, ahead) -> None:
        from ejkernel.kernels.pallas.gpu.grouped_matmul.implementation import grouped_matmul

        with on(jax.sharding.AbstractDevice("NVIDIA H200", num_cores=132, platform="cuda")):
            rhs, sizes = struct(8, 512, 1024, dtype="int8"), struct(8, dtype=jnp.int32)
            lhs = struct(rows, 512, dtype=jnp.bfloat16)
            call = bound(grouped_matmul.call, lhs=lhs, rhs=rhs, group_sizes=sizes)
            assert (grouped_matmul.priority_for(call) > 100) == ahead

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
