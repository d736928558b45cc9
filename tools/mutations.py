# ruff: noqa: E501 (source text, one line each)
"""Plants faults in a copy of the sources and shows that the tests catch each one.

    python tools/mutations.py            # all of them, ten minutes
    python tools/mutations.py --only sign

A fault that survives is a hole in the tests: the exit status is 1 and the line says SURVIVED.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[1]
XLA = "ejk-kernels-xla/src/ejkernel/kernels/xla"
TYPES = "ejk-types/src/ejkernel/types"
OPS = "ejk-ops/src/ejkernel/ops"
TRITON = "ejk-kernels-triton/src/ejkernel/kernels/triton"
HOPPER = "ejk-kernels-pallas/src/ejkernel/kernels/pallas/gpu"
XLA_TESTS = "packages/ejk-kernels-xla/tests"
TYPES_TESTS = "packages/ejk-types/tests"
OPS_TESTS = "packages/ejk-ops/tests"
TRITON_TESTS = "packages/ejk-kernels-triton/tests"


@dataclass(frozen=True)
class Fault:
    """Replace ``old``, which must stand exactly once in ``file``, by ``new``; run ``tests``, files."""

    name: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = (
    Fault(
        "sign of the softmax derivative", f"{XLA}/_common/blockwise.py",
        "ds = p * (dp - block_delta)", "ds = p * (dp + block_delta)",
        f"{XLA_TESTS}/test_flash_attention.py",
    ),
    Fault(
        "causal mask one key too wide", f"{TYPES}/masks/rules.py",
        "return _clamp(self.offset)\n", "return _clamp(self.offset + 1)\n",
        f"{XLA_TESTS}/test_flash_attention.py",
    ),
    Fault(
        "window one key too narrow on the left", f"{TYPES}/masks/rules.py",
        "_clamp(self.offset - self.window[0])", "_clamp(self.offset - self.window[0] + 1)",
        f"{XLA_TESTS}/test_flash_attention.py",
    ),
    Fault(
        "sinks left out of the sum", f"{TYPES}/attention/rows.py",
        "jnp.exp2(key + rows.l2) + jnp.exp2(sink) * weight", "jnp.exp2(key + rows.l2)",
        f"{XLA_TESTS}/test_flash_attention.py",
    ),
    Fault(
        "dropout without rescaling", f"{XLA}/_common/blockwise.py",
        "return 1.0 / (1.0 - self.spec.dropout_prob)", "return 1.0",
        f"{XLA_TESTS}/test_flash_attention.py",
    ),
    Fault(
        "another dropout hash", f"{TYPES}/attention/dropout.py", "0xC2B2AE35", "0xC2B2AE37",
        f"{XLA_TESTS}/test_dropout.py",
    ),
    Fault(
        "the page before the right one", f"{XLA}/_paged/layouts.py",
        "return jnp.clip(tables[sequence[:, None], column], 0, self.num_pages - 1)",
        "return jnp.clip(tables[sequence[:, None], column] - 1, 0, self.num_pages - 1)",
        f"{XLA_TESTS}/test_paged.py",
    ),
    Fault(
        "unseen memory is read into the result", f"{XLA}/_paged/core.py",
        "used = jnp.any(seen, axis=1)[:, :, None, None]",
        "used = jnp.ones_like(jnp.any(seen, axis=1))[:, :, None, None]",
        f"{XLA_TESTS}/test_paged.py",
    ),
    Fault(
        "decode rows one position too far", f"{XLA}/page_attention/implementation.py",
        "lens[:, None] - 1, ", "lens[:, None], ", f"{XLA_TESTS}/test_paged.py",
    ),
    Fault(
        "value gate forgotten", f"{XLA}/linear_attention/chunk.py",
        "return o + times_exp(q @ start, value and value.since)", "return o + q @ start",
        f"{XLA_TESTS}/test_linear_attention.py",
    ),
    Fault(
        "delta rule without beta inside a chunk", f"{XLA}/gated_delta_rule/chunk.py",
        "system=jnp.tril(rows.beta * gram, -1)", "system=jnp.tril(gram, -1)",
        f"{XLA_TESTS}/test_gated_delta_rule.py",
    ),
    Fault(
        "a packed convolution that forgets its state", f"{XLA}/causal_conv1d/implementation.py",
        'z = z.at[row].add(first, mode="drop")', "z = z + 0 * row[0, 0]",
        f"{XLA_TESTS}/test_causal_conv1d.py",
    ),
    Fault(
        "selection ignores the own block", f"{XLA}/native_sparse_attention/select.py",
        "return jnp.where(same_block[None, :, None], jnp.inf, score)", "return score",
        f"{XLA_TESTS}/test_native_sparse.py",
    ),
    Fault(
        "compressed blocks seen one token early", f"{TYPES}/masks/token_blocks.py",
        "return (self.block + 1) * self.size\n", "return (self.block + 1) * self.size - 1\n",
        f"{XLA_TESTS}/test_native_sparse.py",
    ),
    # ---- masks
    Fault(
        "joined masks forget the second ids", f"{TYPES}/masks/apply.py",
        "return mask if same else None", "return mask", f"{TYPES_TESTS}/test_combine.py",
    ),
    Fault(
        "two causal rules leave the wider", f"{TYPES}/masks/rules.py",
        "offset=min(self.offset, other.offset)", "offset=max(self.offset, other.offset)",
        f"{TYPES_TESTS}/test_combine.py",
    ),
    Fault(
        "chunks do not move with the offset", f"{TYPES}/masks/rules.py",
        "start = shifted(p, _clamp(self.offset)) // chunk * chunk", "start = p // chunk * chunk",
        f"{TYPES_TESTS}/test_apply.py",
    ),
    Fault(
        "the last block of keys is left out", f"{TYPES}/masks/blocks.py",
        "xp.maximum(hi // other_block + 1, start)", "xp.maximum(hi // other_block, start)",
        f"{TYPES_TESTS}/test_prepare.py",
    ),
    Fault(
        "a block with hidden pairs counts as full", f"{TYPES}/masks/blocks.py",
        "full_stop = (full_hi + 1) // other_block", "full_stop = full_hi // other_block + 1",
        f"{TYPES_TESTS}/test_prepare.py",
    ),
    Fault(
        "chunks of packed sequences by index", f"{TYPES}/masks/combine.py",
        "if same and rule.chunk is None:", "if same:", f"{TYPES_TESTS}/test_combine.py",
    ),
    Fault(
        "padding sees padding", f"{TYPES}/masks/convert.py",
        "result = both(result, (q == kv) & (q >= 0))", "result = both(result, q == kv)",
        f"{TYPES_TESTS}/test_convert.py",
    ),
    Fault(
        "one rule's mask serves another", f"{TYPES}/masks/combine.py",
        "rule_mask = mask_of_rule(rule)", "rule_mask = mask_of_rule(type(rule)(True))",
        f"{TYPES_TESTS}/test_combine.py",
    ),
    # ---- flash attention on Triton, and what every backend shares
    Fault(
        "sums are not scaled anew", f"{TRITON}/common/softmax.py",
        "return p, m, l * alpha + tl.sum(p, 1), alpha",
        "return p, m, l + tl.sum(p, 1), alpha", f"{TRITON_TESTS}/test_flash_attention.py",
    ),
    Fault(
        "the dropout hash of one kernel alone", f"{TRITON}/common/dropout.py",
        "x = x ^ (x >> 13) ^ s", "x = x ^ (x >> 12) ^ s", f"{TRITON_TESTS}/test_flash_attention.py",
    ),
    Fault(
        "gradients without that of lse", f"{TYPES}/attention/softmax.py",
        "return delta - dlse", "return delta", f"{TRITON_TESTS}/test_flash_attention.py",
    ),
    Fault(
        "a sink's gradient turned round", f"{TYPES}/attention/softmax.py",
        "return -jnp.sum(weight", "return jnp.sum(weight", f"{TRITON_TESTS}/test_flash_attention.py",
    ),
    Fault(
        "Hopper's stored tile is chosen again", f"{HOPPER}/flash_attention/tiles.py",
        "    return tiles if tiles.block_kv == block_kv else _paired(tiles)", "    return tiles",
        "packages/ejk-kernels-pallas/tests/test_gpu_flash_tiles.py",
    ),
    # ---- where configs come from
    Fault(
        "a key without the dtype", f"{OPS}/core/keys.py",
        '"dtype": str(dtype),', '"dtype": "",', f"{OPS_TESTS}/test_selection.py",
    ),
    Fault(
        "a key without the sharding", f"{OPS}/core/keys.py",
        '"sharding": sharding_fingerprint(x),', '"sharding": None,',
        f"{OPS_TESTS}/test_selection.py",
    ),
    Fault(
        "buckets one power too large", f"{OPS}/utils/buckets.py",
        "1 << (int(n) - 1).bit_length()", "1 << int(n).bit_length()",
        f"{OPS_TESTS}/test_device_sharding.py",
    ),
    Fault(
        "outer overlays before inner ones", f"{OPS}/config/cache.py",
        "for cache in _overlays.get():\n        for name", "for cache in _overlays.get()[::-1]:\n        for name",
        f"{OPS_TESTS}/test_selection.py",
    ),
    Fault(
        "a remembered config that cannot run is used", f"{OPS}/config/selection.py",
        'if refusal is not None:\n            lookup.miss("memory"', 'if refusal is False:\n            lookup.miss("memory"',
        f"{OPS_TESTS}/test_tables.py",
    ),
    Fault(
        "a stored config for another platform is used",
        f"{OPS}/config/selection.py",
        "_unusable_reason(kernel, cfg, call) or self._lowering_failure(lookup, cfg)",
        "self._lowering_failure(lookup, cfg)",
        f"{OPS_TESTS}/test_tables.py",
    ),
    Fault(
        "a stored config that cannot be lowered is used",
        f"{OPS}/config/selection.py",
        "_unusable_reason(kernel, cfg, call) or self._lowering_failure(lookup, cfg)",
        "_unusable_reason(kernel, cfg, call)",
        f"{OPS_TESTS}/test_stored_configs.py",
    ),
    Fault(
        "the key of a recorded call is the file's",
        f"{OPS}/recording.py",
        "return Invocation(kernel, args, kwargs, route=route)",
        "return (inv := Invocation(kernel, args, kwargs, route=route)).made.__dict__.update("
        'key=call["key"]) or inv',
        f"{OPS_TESTS}/test_recording.py",
    ),
    Fault(
        "arithmetic is stored", f"{OPS}/config/selection.py",
        'return lookup.hit("heuristics", kernel.convert_config(cfg, call), "hit")',
        'return self.cache.put(inv.key, cfg) or lookup.hit("heuristics", cfg, "hit")',
        f"{OPS_TESTS}/test_selection.py",
    ),
    Fault(
        "what was tuned is lost with the process", f"{OPS}/config/selection.py",
        "self.persistent.put(key, cfg, metadata=metadata, measured=measured)", "pass",
        f"{OPS_TESTS}/test_selection.py",
    ),
    Fault(
        "a known GPU is tuned by default", f"{OPS}/config/selection.py",
        "if not self.policy.explicitly_enabled() and self._has_shipped_table(lookup):", "if False:",
        f"{OPS_TESTS}/test_tables.py",
    ),
    Fault(
        "tiles of another head dim", f"{OPS}/config/key_distance.py",
        "        elif octaves:\n            return math.inf\n", "", f"{OPS_TESTS}/test_tables.py",
    ),
    Fault(
        "the first entry serves, not the nearest", f"{OPS}/config/tables.py",
        "in sorted(matches, key=lambda item: item[:2])", "in matches", f"{OPS_TESTS}/test_tables.py",
    ),
    Fault(
        "the best of one platform for all", f"{OPS}/config/key_distance.py",
        'if tuned not in ("auto", platform):', "if False:", f"{OPS_TESTS}/test_tables.py",
    ),
    Fault(
        "an argument that no kernel reads is let through", f"{OPS}/call_kernel.py",
        "                return name\n", "                return None\n",
        "packages/ejk-modules/tests/integration/test_arguments_read.py",
    ),
    Fault(
        "warpgroups given to a kernel without", f"{OPS}/call_kernel.py",
        "if groups is not None and not self.reads_warpgroups:", "if False:",
        "packages/ejk-modules/tests/test_configs_and_answers.py",
    ),
)  # fmt: skip


def faulty(fault: Fault) -> str:
    """The text of the file with the fault in it."""
    text = (ROOT / "packages" / fault.file).read_text()
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.name}: {fault.file} holds {fault.old!r} {text.count(fault.old)}x")
    return text.replace(fault.old, fault.new)


def plant(fault: Fault, folder: pathlib.Path) -> None:
    """A copy of the distribution's sources with the fault in it."""
    package, path = fault.file.split("/src/")
    shutil.copytree(ROOT / "packages" / package / "src", folder, dirs_exist_ok=True)
    (folder / path).write_text(faulty(fault))


def caught(fault: Fault) -> tuple[bool, float, str]:
    """Returns whether the tests fail with the fault planted, seconds, and the first failing test."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        plant(fault, pathlib.Path(folder))
        # the copy comes first on the path, so its part of the namespace hides the real one
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
             *fault.tests.split()],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        )  # fmt: skip
    failing = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    # 1 = tests failed; anything else means that they did not run as they should
    if run.returncode not in (0, 1):
        raise SystemExit(f"{fault.name}: pytest ended with {run.returncode}\n{run.stdout[-2000:]}")
    first = failing[0].split(" - ")[0].removeprefix("FAILED ") if failing else ""
    return run.returncode == 1, time.perf_counter() - start, first


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mutations", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of a fault's name")
    args = parser.parse_args(argv)
    chosen = [f for f in FAULTS if args.only in f.name]
    if not chosen:
        print(f"no fault has {args.only!r} in its name; there are:", file=sys.stderr)
        print("\n".join(f"  {f.name}" for f in FAULTS), file=sys.stderr)
        return 2
    survived = 0
    for fault in chosen:
        is_caught, seconds, test = caught(fault)
        survived += not is_caught
        print(
            f"{'caught  ' if is_caught else 'SURVIVED'} {seconds:5.0f} s  {fault.name}  {test}",
            flush=True,
        )
    print(f"{len(chosen) - survived} of {len(chosen)} faults caught")
    return 1 if survived else 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
