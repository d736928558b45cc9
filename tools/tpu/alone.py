"""Kernels that are compared with their own past alone: JAX ships none of their purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tools.tpu.copies import ONE_ROW_EACH, PREFILLED, Counted, decoding, mixed
from tools.tpu.cost import LANES, Cost

from ejkernel.kernels import pallas
from ejktest.cases import (
    attention,
    convolution,
    delta,
    grouped,
    latent,
    linear,
    paged,
    pooling,
    ragged,
    sparse,
)


@dataclass(frozen=True)
class Alone:
    """A kernel that is compared with its own past alone.

    Attributes:
        row: what it computes. kernel: part of its name. call: a call that runs it.
        backward: whether it is counted in the program with gradients. tiles: its tiles, for the
            table.
        passes: matmuls of 128 x 128 x 128 in its steady code, where they are counted.
        copies: what counts its copies, where it copies by hand.
        returns_output: whether the program with gradients returns the result too, as that of a
            training step: the kernels of both passes are counted in one program.
    """

    row: str
    kernel: str
    call: Any
    backward: bool = False
    tiles: str = ""
    passes: int = 1
    copies: Callable[[Any], Counted] | None = None
    returns_output: bool = False

    def count(self) -> Iterator[Cost]:
        """Yields the cost."""
        function = self.call.backward(pallas) if self.backward else self.call.forward(pallas)
        work = self.passes * LANES**3
        shapes, row = self.call.shapes(), self.row
        yield Cost(
            "ejkernel",
            row,
            self.kernel,
            self.tiles,
            work,
            LANES,
            function,
            shapes,
            self.call,
            self.backward,
            self.returns_output,
            None if self.copies is None else partial(self.copies, self.call),
        )


_SPARSE, _JOINED = (sparse.COMPILED_TPU[f"sparse {name}"] for name in ("branches", "joined heads"))
_LINEAR = linear.COMPILED_TPU["linear heads"]
_CONVOLUTION, _CHANNELS = (
    convolution.COMPILED_TPU["convolution"],
    delta.COMPILED_TPU["delta channels"],
)
_CHUNKS, _PACKED = (pooling.COMPILED_TPU[f"pooling {name}"] for name in ("chunks", "packed"))
_DELTA = delta.COMPILED_TPU["delta"]
_ONE_ROW, _NO_PAGES = "grouped one row each", "contiguous"
_WRITING, _WRITING_ROWS = ragged.COMPILED_TPU["ragged"], ragged.writing_ahead(16)
ALONE = {
    **{
        part: (
            trained("choice", "ejkernel_select_blocks"),
            trained("selected", "ejkernel_selected_fwd", tiles="128x512", passes=8),
            trained("gradients", "ejkernel_selected_bwd", tiles="128x512", passes=20),
        )
        for part, trained in (
            ("native sparse", partial(Alone, call=_SPARSE, backward=True, returns_output=True)),
            (
                "native sparse joined",
                partial(Alone, call=_JOINED, backward=True, returns_output=True),
            ),
        )
    },
    "linear": (
        Alone("forward", "ejkernel_linear_attention", _LINEAR),
        Alone("gradients", "ejkernel_linear_attention_gradients", _LINEAR, True),
    ),
    "delta": (
        Alone("forward", "ejkernel_gated_delta_rule", _DELTA),
        Alone("gradients", "ejkernel_gated_delta_rule_gradients", _DELTA, True),
        Alone("channels forward", "ejkernel_gated_delta_rule", _CHANNELS),
        Alone("channels gradients", "ejkernel_gated_delta_rule_gradients", _CHANNELS, True),
    ),
    "convolution": (
        Alone("forward", "ejkernel_causal_conv1d", _CONVOLUTION),
        Alone("gradients", "ejkernel_causal_conv1d_gradient", _CONVOLUTION, True),
    ),
    "grouped short inner": (
        Alone("forward", "ejkernel_grouped_matmul", grouped.COMPILED_TPU["grouped short inner"]),
    ),
    "grouped 8 bits": tuple(
        Alone(dtype, "ejkernel_grouped_matmul", grouped.COMPILED_TPU[f"grouped {dtype}"])
        for dtype in ("int8", "e4m3")
    ),
    "512 groups": (
        Alone("one row each", "ejkernel_grouped_matmul", grouped.COMPILED_TPU[_ONE_ROW]),
        Alone("weights", "ejkernel_grouped_matmul_weights", grouped.COMPILED_TPU[_ONE_ROW], True),
    ),
    "ragged decode": (
        Alone("contiguous", "ejkernel_decode", paged.COMPILED_TPU[_NO_PAGES], copies=decoding),
    ),
    "decode 8 bits": (
        Alone("int8", "ejkernel_decode", paged.COMPILED_TPU["paged int8"], copies=decoding),
        Alone("e4m3", "ejkernel_decode", paged.COMPILED_TPU["paged e4m3"], copies=decoding),
    ),
    "ragged write": tuple(
        Alone(row, "ejkernel_ragged_attention", call, copies=partial(mixed, mix=mix))
        for row, call, mix in (
            ("prefill", _WRITING, PREFILLED),
            ("one row", _WRITING_ROWS, ONE_ROW_EACH),
            ("int8", ragged.COMPILED_TPU["ragged int8"], PREFILLED),
        )
    ),
    # calls with trees copy what the same calls copy without them
    "trees": tuple(
        Alone(row, kernel, family.COMPILED_TPU[call])
        for row, kernel, family, call in (
            ("ragged", "ejkernel_ragged_attention", ragged, "ragged tree"),
            ("ragged write window", "ejkernel_ragged_attention", ragged, "ragged tree window"),
            ("latent", "ejkernel_decode", latent, "latent tree"),
            ("latent window", "ejkernel_decode", latent, "latent tree window"),
        )
    ),
    "latent": tuple(
        Alone(row, "ejkernel_decode", latent.COMPILED_TPU[f"latent {name}"], copies=decoding)
        for row, name in (("decode", "128 heads"), ("16 heads", "16 heads"), ("int8", "int8"))
    ),
    "pooling": (
        Alone("chunks", "ejkernel_pool_chunks", _CHUNKS),
        Alone("chunks gradients", "ejkernel_pool_chunks_gradient", _CHUNKS, True),
        Alone("packed", "ejkernel_pool_segments", _PACKED),
        Alone("packed gradients", "ejkernel_pool_segments_gradient", _PACKED, True),
    ),
    **{
        part: tuple(
            Alone(kernel, f"ejkernel_flash_{kernel}", call, kernel != "fwd")
            for kernel in ("fwd", "bwd")
        )
        for part, call in (
            ("blocksparse", attention.COMPILED_TPU["sparse"]),
            ("joined heads", attention.COMPILED_TPU["joined heads"]),
            ("latent expanded", latent.COMPILED_TPU["latent expanded"]),
        )
    },
}
