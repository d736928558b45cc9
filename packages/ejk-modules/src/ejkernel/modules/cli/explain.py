"""Explain the implementation, platform and configuration that a call would get, the tier they come
from, and why others were refused. Works on shapes alone: nothing is run, tuned or stored.

  ejk explain flash_attention --shape llama3-8b-4k
  ejk explain flash_attention b=2 s=8k h=32 hk=8 d=128 causal=true
  ejk explain page_attention --shape 'decode-*' platform=triton
  ejk explain flash_attention --shapes --device h200      on a GPU that is not here
"""

from __future__ import annotations

import argparse
from typing import Any

from ejkernel.modules.cli import devices
from ejkernel.modules.cli.calls import add_arguments, calls_of, note_devices, sizes_text
from ejkernel.modules.cli.output import Output


def arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    parser.add_argument(
        "--device", metavar="NAME",
        help="explain for h200, h100, a100, mi300x, v5e, ... or gpu:PRODUCT, without having one",
    )  # fmt: skip


def run_command(args: argparse.Namespace, out: Output) -> int:
    from ejkernel.modules.bench.record import config_text

    with devices.device(args.device):
        calls = calls_of(args.operation, args.shape, args.words)
        note_devices(out, calls)
        answers = [explained(call) for call in calls]
    out.data(answers if args.shape is not None and len(answers) != 1 else answers[0])
    if len(answers) > 1:
        rows = [
            (a["shape"], a["implementation"] or "none", a["tier"], config_text(a["config"]))
            for a in answers
        ]
        out.title(answers[0]["operation"])
        out.table(("shape", "implementation", "tier", "config"), rows)
        return int(any(a["error"] for a in answers))
    (answer,) = answers
    out.title(f"{answer['operation']} {answer['shape']}")
    rows = [
        ("arguments", answer["arguments"]),
        ("device", answer["device"]),
        ("implementation", answer["implementation"] or "none"),
        ("config", config_text(answer["config"]) or "none"),
        ("tier", answer["tier"]),
        ("key", answer["key"]),
    ]
    if answer["unused"]:
        rows.append(("no effect", f"{', '.join(answer['unused'])}: not read here"))
    rows += [("note", note) for note in answer["notes"]]
    if answer["error"]:
        rows.append(("error", answer["error"]))
    out.fields(rows)
    out.title("tiers asked")
    out.fields(answer["tiers"])
    if answer["refused"]:
        out.title("not chosen")
        out.fields(answer["refused"])
    return int(bool(answer["error"]))


ANSWERS = ("device", "implementation", "platform", "tier", "key", "error")


def explained(call: Any) -> dict[str, Any]:
    """Returns the explanation of a call as JSON values."""
    from ejkernel.modules.bench.record import config_fields

    explanation = call.explanation()
    return {
        "operation": call.operation,
        "shape": call.name,
        "source": call.source,
        "arguments": sizes_text(call),
        **{name: getattr(explanation, name) for name in ANSWERS},
        "config": config_fields(explanation.cfg),
        "unused": list(explanation.unused),
        "tiers": [list(pair) for pair in explanation.tiers],
        "refused": [list(pair) for pair in explanation.skipped],
        "notes": list(explanation.notes),
    }
