"""The command line of ``python -m eval.measure``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from eval.arguments import size_bytes, with_examples
from eval.measure.model import sizes_of
from eval.simulate.budgets import Budgets
from eval.simulate.cost_flag import HELP as COST_HELP
from eval.simulate.cost_flag import constant
from eval.simulate.costs import Costs
from eval.workloads.chat_tokens import DEMO
from eval.workloads.fields import TraceError
from eval.workloads.load import FORMATS
from eval.workloads.select import HELP as SELECT_HELP
from sglang_histate.policy.interval import IntervalPolicy, parse_interval
from sglang_histate.sizes import format_size

_EPILOG = (
    "formats:\n"
    + "\n".join(f"  {name:16} {about}" for name, about in FORMATS.items())
    + "\n\nA log for openai has one request a line: messages, optional tools, a time (timestamp, ts, created ...), optional\n"
    "session_id, user, usage. Without session ids requests are put together by the text they share.\n\n"
    "Exit code: 0 measured, 1 the log has no request, 2 the command line or the log is wrong."
)


@dataclass(frozen=True)
class Options:
    """What to measure, and on which machine."""

    log: Path
    format: str | None
    model: str | None
    select: str
    shared_prefix: int
    interval: IntervalPolicy
    budgets: Budgets
    costs: Costs
    model_sizes: bool
    """Whether the sizes of KV and checkpoints in `costs` are those of the model."""
    json_file: Path | None
    save_trace: Path | None


def parse(argv: list[str] | None = None) -> Options:
    """Return the options; an error ends the process with 2 and a sentence that names the flag."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        sizes = sizes_of(Path(given.model)) if given.model else {}
        constants = {**sizes, **dict(given.cost)}
        return Options(
            given.log,
            given.format,
            given.model,
            given.select,
            given.shared_prefix,
            parse_interval(given.interval),
            Budgets(given.device, given.cpu, given.ssd),
            Costs(**constants),
            bool(sizes),
            given.json,
            given.save_trace,
        )
    except (ValueError, TraceError, OSError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.measure",
        description="How many requests of a log match KV at a point that is no turn's end, where hybrid models compute\n"
        "again for want of a checkpoint, and what HiState would save there. Nothing is served.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    with_examples(
        parser,
        "python -m eval.measure requests.jsonl --model /models/Qwen3.5-9B",
        "python -m eval.measure trace.jsonl --device 40GiB --cpu 200GiB --ssd 1TiB --json found.json",
    )
    parser.add_argument("log", type=Path, metavar="LOG", help="a file, or a folder of weka sessions")
    parser.add_argument(
        "--format", choices=FORMATS, metavar="F", help="see below (found out from the first line)"
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="for openai: folder or name of the model whose chat template and tokenizer make the prompts, or "
        f"{DEMO}, one token a byte. A folder's config.json also gives the sizes of KV and checkpoints",
    )
    parser.add_argument("--select", default="", metavar="STEPS", help=SELECT_HELP)
    parser.add_argument(
        "--shared-prefix",
        type=int,
        default=0,
        metavar="TOKENS",
        help="let the sessions' first TOKENS be the same text, for logs whose ids are each session's own (0)",
    )
    parser.add_argument(
        "--interval", default="adaptive", help="of HiState: adaptive, none or fixed:TOKENS (%(default)s)"
    )
    budgets = Budgets()
    for flag, size, about in (
        ("--device", budgets.device_bytes, "GPU memory for prefixes"),
        ("--cpu", budgets.host_bytes, "host memory"),
        ("--ssd", budgets.ssd_bytes, "disk"),
    ):
        parser.add_argument(
            flag, type=size_bytes, default=size, metavar="SIZE", help=f"{about} ({format_size(size)})"
        )
    parser.add_argument(
        "--cost",
        type=constant,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a constant of the cost model (Qwen3.5-9B on one H100), as of eval.simulate; may be repeated: "
        + COST_HELP,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures")
    parser.add_argument(
        "--save-trace",
        type=Path,
        metavar="FILE",
        help="also write the selected sessions as a trace of ids and lengths, without text, for eval.simulate and "
        "eval.replay; the name ends in .jsonl or .jsonl.xz, or is a folder's, for one file a session",
    )
    return parser
