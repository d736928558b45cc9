"""Block-sparse attention in Pallas' TPU interpreter, against the float64 oracle."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ejkernel.kernels.pallas.tpu.blocksparse_attention.implementation import blocksparse_attention
from ejkernel.types.masks.structure import Unsupported
from ejktest.attention import Call, Pattern, arrays, check, run, with_mask_info
from ejktest.device import interpreted_tpu


@pytest.fixture(autouse=True)
def interpreted():
    with interpreted_tpu(True):
        yield


def test_a_pattern_for_each_head():
    """Batch rows and heads have patterns of their own, and the last blocks are short."""
    call = Call(
        "per head", q=150, k=260, h=2, hk=1, d=64, blocks=(128, 128), mask={"causal": True,
        "causal_offset": 100}, sinks=(2, 1), pattern=Pattern(128, 128, 0.5, (2, 2)),
    )  # fmt: skip
    x = arrays(call)
    check(call, x, *run(with_mask_info(blocksparse_attention), call, x))


def test_a_pattern_known_while_tracing():
    """The grid has as many steps as the longest list; blocks are larger than tiles."""
    call = Call(
        "known", b=1, q=384, k=260, h=2, hk=1, d=64, blocks=(128, 128),
        dtypes=("bfloat16",) * 3, pattern=Pattern(256, 300, 0.7, (1, 1)),
    )  # fmt: skip
    x = arrays(call)
    pattern = np.array([[[[True], [False]]]])
    del x["block_mask"]

    def attend(*args, **options):
        return blocksparse_attention(*args, block_mask=pattern, **options)

    o, *others = run(attend, call, x)
    assert not np.asarray(o[:, 256:], np.float32).any()
    check(call, x | {"block_mask": pattern}, o, *others)


def test_refuses_what_it_cannot_do():
    q = np.ones((1, 256, 2, 64), np.float32)
    with pytest.raises(Unsupported, match="q_block_size: blocks of 64 are no multiple of 128"):
        blocksparse_attention(
            q, q, q, block_mask=np.ones((4, 2), bool), q_block_size=64, kv_block_size=128
        )
    q = jax.ShapeDtypeStruct((1, 2**16, 2, 64), "float32")
    mask = jax.ShapeDtypeStruct((1, 2, 512, 512), "bool")
    with pytest.raises(Unsupported, match=r"block_mask: lists of .* do not fit into scalar memory"):
        jax.eval_shape(lambda q, m: blocksparse_attention(q, q, q, block_mask=m), q, mask)
