"""Operations whose mask is a picture: every query row against every key."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from demo_lm.single.common import features, grid, report, text
from ejkernel.types import MaskInfo
from ejktest.oracles import attention as oracle
from ejktest.oracles.latent import Latent, latent_attention

LENGTH, HEADS, KV_HEADS, DIM = 32, 4, 2, 16
DOCUMENTS = (13, 7, 9)  # the last three tokens are padding


def _qkv():
    data = text(LENGTH)
    q = features(data, HEADS, DIM, 0)
    return data, q, features(data, KV_HEADS, DIM, 1), features(data, KV_HEADS, DIM, 2)


def _segments() -> np.ndarray:
    ids = np.full((1, LENGTH), -1, np.int32)
    ids[0, : sum(DOCUMENTS)] = np.repeat(np.arange(len(DOCUMENTS)), DOCUMENTS)
    return ids


def _packed(name: str, **options) -> None:
    data, q, k, v = _qkv()
    ids = _segments()
    mask = MaskInfo.from_segments(jnp.asarray(ids))
    call = {"mask_info": mask, "causal": True, **options}
    see = oracle.visible(1, LENGTH, LENGTH, q_segment_ids=ids, kv_segment_ids=ids, causal=True)
    result = oracle.attention(oracle.Case(q, k, v, see=see, cap=options.get("logits_soft_cap")))
    print("visible keys (rows: query byte), three documents and padding:")
    grid(see[0, 0], data)
    out = report(name, result.o, q, k, v, **call)
    if name == "attention":
        print("weights of head 0 (rows: query byte):")
        grid(out[1][0, 0], data)


def flash_attention() -> None:
    _packed("flash_attention", logits_soft_cap=20.0)


def attention() -> None:
    _packed("attention")


def scaled_dot_product_attention() -> None:
    _packed("scaled_dot_product_attention")


def ring_attention() -> None:
    data, q, k, v = _qkv()
    devices = np.array(jax.devices())
    mesh = jax.sharding.Mesh(devices, ("sp",))
    see = oracle.visible(1, LENGTH, LENGTH, causal=True)
    result = oracle.attention(oracle.Case(q, k, v, see=see))
    held = LENGTH // devices.size
    print("which device holds the keys a row sees (rows: query byte):")
    for i in range(0, LENGTH, 2):
        line = "".join(str(j // held) if j <= i else "·" for j in range(LENGTH))
        print(f"{chr(data[i])!r:>5} {line}")
    report("ring_attention", result.o, q, k, v, axis_name="sp", mesh=mesh, causal=True)


def blocksparse_attention() -> None:
    data, q, k, v = _qkv()
    size, blocks = 4, LENGTH // 4
    i, j = np.arange(blocks)[:, None], np.arange(blocks)
    pattern = (j == 0) | (np.abs(i - j) <= 1)  # the first block, and the neighbours
    call = {"block_mask": pattern, "q_block_size": size, "kv_block_size": size, "causal": True}
    dense = np.kron(pattern, np.ones((size, size), bool))[None, None]
    see = oracle.visible(1, LENGTH, LENGTH, causal=True) & dense
    result = oracle.attention(oracle.Case(q, k, v, see=see))
    print("visible keys (rows: query byte):")
    grid(see[0, 0], data)
    report("blocksparse_attention", result.o, q, k, v, **call)


def mla_attention() -> None:
    data = text(LENGTH)
    rank, nope, rope, value = 24, 16, 8, 16
    rng = np.random.default_rng(3)
    w_kc, w_vc = (
        jnp.asarray(rng.standard_normal((rank, KV_HEADS, n)) * rank**-0.5, jnp.float32)
        for n in (nope, value)
    )
    x = Latent(
        features(data, HEADS, nope + rope, 0), features(data, 1, rank, 1)[:, :, 0], w_kc, w_vc,
        None, features(data, 1, rope, 2)[:, :, 0],
    )  # fmt: skip
    see = oracle.visible(1, LENGTH, LENGTH, causal=True)
    result = latent_attention(x, see=see)
    print(f"a token is kept as {rank + rope} numbers instead of {KV_HEADS * (nope + rope + value)}")
    grid(see[0, 0], data)
    report("mla_attention", result.o, *x, causal=True)
