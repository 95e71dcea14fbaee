"""`histate size`: what a machine holds of a model's KV and checkpoints, and the flags to serve it with."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from sglang_histate.cli.arguments import size_bytes

_EPILOG = """examples:
  histate size --model Qwen3.5-9B/config.json --device 80GiB --host 256GiB --ssd 2TiB
  histate size --model /models/Qwen3-Next --device 80GiB --host 512GiB --ssd 4TiB --tp 4 --checkpoint-dtype bf16
  histate size --model Qwen3.5-9B --device 80GiB --host 256GiB --ssd 2TiB --trace codex   (in a clone)

Sizes are exact. Expected intervals suppose full tiers, and prompts whose new tokens are captured once. Times of --trace
are those of a cost model of H100 GPUs.
exit codes: 0 sized; 1 cannot be, said in one sentence; 2 bad usage"""


def register(subparsers: Any) -> None:
    """Add the command to the parser of `histate`."""
    parser = subparsers.add_parser(
        "size",
        help="bytes per token and checkpoint, what each tier holds, expected intervals, and the flags to use",
        description="Bytes per token and checkpoint, what each tier holds, expected intervals, and the flags to use. "
        "Nothing is loaded or started.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", required=True, type=Path, metavar="PATH", help="a model's folder, or its config.json"
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", required=True, type=_size, metavar="SIZE", help="memory of one GPU")
    machine.add_argument(
        "--host", required=True, type=_size, metavar="SIZE", help="host memory for HiState, over all ranks"
    )
    machine.add_argument("--ssd", required=True, type=_size, metavar="SIZE", help="SSD space, over all ranks")
    machine.add_argument("--tp", type=_count, default=1, metavar="N", help="ranks, one GPU each (1)")
    machine.add_argument(
        "--mem-fraction-static",
        type=_fraction,
        default=0.85,
        metavar="F",
        help="share of a GPU for weights and the pool, as SGLang's flag (0.85)",
    )
    machine.add_argument("--weights", type=_size, metavar="SIZE", help="bytes of the weights (found out)")
    model = parser.add_argument_group("how numbers are kept, as the server's flags of these names")
    model.add_argument(
        "--checkpoint-dtype",
        choices=("native", "bf16", "int8"),
        default="native",
        help="of --histate-checkpoint-dtype (native)",
    )
    model.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        default="auto",
        help="of the model (auto)",
    )
    model.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"),
        default="auto",
        help="of KV (auto: the model's)",
    )
    model.add_argument(
        "--mamba-ssm-dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of recurrent states (config.json's, else float32)",
    )
    model.add_argument(
        "--conv-dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of convolution windows: SGLANG_MAMBA_CONV_DTYPE of the server (bfloat16)",
    )
    model.add_argument("--page-size", type=_page, default=64, metavar="N", help="tokens of a page (64)")
    model.add_argument(
        "--chunked-prefill-size",
        type=_count,
        default=8192,
        metavar="N",
        help="tokens of a prefill chunk (8192)",
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--session-tokens",
        type=_count,
        default=32768,
        metavar="N",
        help="length of a session in the table (32768)",
    )
    load.add_argument(
        "--trace",
        metavar="FILE|NAME",
        help="also simulate these requests under every policy: a recorded file, or codex or rewriting (made); only in a "
        "clone of the repository, and can take minutes",
    )
    load.add_argument(
        "--live", type=_count, default=24, metavar="N", help="of --trace: sessions at a time (24)"
    )
    load.add_argument(
        "--cost",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of --trace: a constant of the cost model, see python -m eval.simulate --help; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from sglang_histate.cli.size import trace
    from sglang_histate.cli.size.bytes import Dtypes, sizes_of
    from sglang_histate.cli.size.model import read_model
    from sglang_histate.cli.size.plan import Machine, plan
    from sglang_histate.cli.size.text import as_json, as_text
    from sglang_histate.cli.size.weights import Weights, weights_of
    from sglang_histate.config import CheckpointDtype

    if arguments.trace is not None:
        trace.check()
    shape = read_model(arguments.model)
    dtype = _model_dtype(arguments.dtype, shape.dtype)
    dtypes = Dtypes(
        kv=dtype if arguments.kv_cache_dtype == "auto" else arguments.kv_cache_dtype,
        window=arguments.conv_dtype,
        state=arguments.mamba_ssm_dtype or shape.state_dtype,
        encoding=CheckpointDtype(arguments.checkpoint_dtype),
    )
    weights = weights_of(arguments.model, shape, dtype)
    if arguments.weights is not None:
        weights = Weights(arguments.weights, "--weights")
    machine = Machine(
        arguments.device,
        arguments.host,
        arguments.ssd,
        arguments.mem_fraction_static,
        arguments.chunked_prefill_size,
    )
    sizes = sizes_of(shape, dtypes, arguments.tp, arguments.page_size)
    found = plan(machine, sizes, weights.size_bytes, arguments.session_tokens)
    command = _command(arguments, found)
    facts = {
        "model": str(arguments.model),
        "architecture": shape.architecture,
        "full_layers": shape.full_layers,
        "linear_layers": len(shape.linear_layers),
        "weight_bytes": weights.size_bytes,
        "weight_source": weights.source,
        "kv_dtype": dtypes.kv,
        "state_dtype": dtypes.state,
        "conv_dtype": dtypes.window,
        "checkpoint_dtype": dtypes.encoding.value,
        "session_tokens": arguments.session_tokens,
    }
    said = None
    if arguments.trace is not None:
        costs = trace.costs_of(shape, sizes, weights, arguments.cost)
        load = trace.Load(arguments.trace, arguments.live)
        said = trace.simulated(load, costs, found, arguments.chunked_prefill_size)
    if arguments.json:
        simulation = {} if said is None else {"simulation": said.summary}
        print(json.dumps({**as_json(sizes, found, facts), "command": command, **simulation}, indent=1))
        return 0
    print(as_text(sizes, found, facts))
    if said is not None:
        print(f"\nsimulated on H100 GPUs, {arguments.live} sessions at a time\n{said.table}")
    print("\nserve it with\n  " + " \\\n    ".join(_words(command)))
    return 0


def _model_dtype(asked: str, own: str) -> str:
    """Return what SGLang computes in: its 'auto' makes float16 of float32."""
    from sglang_histate.cli.size.errors import SizeError

    if asked != "auto":
        return asked
    found = own.removeprefix("torch.")
    if found not in ("bfloat16", "float16", "float32"):
        raise SizeError(f"--model: its config.json has dtype {own}: say --dtype bfloat16, float16 or float32")
    return "float16" if found == "float32" else found


def _command(arguments: argparse.Namespace, found: Any) -> list[str]:
    """Return the words of the server's command line; the SSD's directory is for the reader to fill in."""
    model = arguments.model if arguments.model.is_dir() else arguments.model.parent
    words = ["python", "-m", "sglang_histate.launch_server", "--model-path", str(model)]
    words += ["--histate-ssd-dir", "/nvme/histate", "--histate-ssd-size", _flag_size(found.ssd_bytes)]
    words += ["--histate-host-size", _flag_size(arguments.host)]
    words += ["--histate-inflight-size", _flag_size(found.inflight_bytes)]
    words += ["--mem-fraction-static", f"{arguments.mem_fraction_static:g}"]
    if arguments.tp > 1:
        words += ["--tp-size", str(arguments.tp)]
    if arguments.checkpoint_dtype != "native":
        words += ["--histate-checkpoint-dtype", arguments.checkpoint_dtype]
    for name, usual in (
        ("dtype", "auto"),
        ("kv_cache_dtype", "auto"),
        ("mamba_ssm_dtype", None),
        ("page_size", 64),
    ):
        value = getattr(arguments, name)
        if value != usual:
            words += ["--" + name.replace("_", "-"), str(value)]
    # SGLang chooses by the GPU's memory otherwise, and what is in flight was sized for this.
    words += ["--chunked-prefill-size", str(arguments.chunked_prefill_size)]
    return (
        words
        if arguments.conv_dtype == "bfloat16"
        else [f"SGLANG_MAMBA_CONV_DTYPE={arguments.conv_dtype}", *words]
    )


def _words(command: list[str]) -> list[str]:
    """Return one line for the program and one for each flag with its value."""
    lines: list[str] = []
    for word in command:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1:] = [" ".join([*lines[-1:], shlex.quote(word)])]
    return lines


def _flag_size(size_bytes: int) -> str:
    """Return a size as the server's flags take it, exact."""
    for name, unit in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes and size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return str(size_bytes)


def _size(text: str) -> int:
    size = size_bytes(text)
    if not size:
        raise argparse.ArgumentTypeError("nothing fits into 0 bytes")
    return size


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _page(text: str) -> int:
    count = _count(text)
    if count % 64:
        raise argparse.ArgumentTypeError(
            f"{count} is not a multiple of 64, where states exist inside a prompt"
        )
    return count


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0 and up to 1")
    return value
