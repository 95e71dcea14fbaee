"""The command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from eval.arguments import positive, size_bytes, with_examples
from eval.replay.requests import PAGE, Shape
from eval.replay.sending import Pace
from eval.replay.systems import CHUNK, PAPER_SHARES, SYSTEMS, Bytes, scaled
from eval.replay.workload import NAMES, TRACES, Selection
from eval.workloads.load import FORMATS
from eval.workloads.select import HELP as STEPS

RECORDED, FREE = "recorded", "free"
DEFAULT_SYSTEMS = "histate,hicache"


@dataclass(frozen=True)
class Options:
    """What to run. `sizes`: budgets in bytes by name, those given; `url`: a server that runs already.

    `chunk`: tokens as sent, None for `CHUNK` recorded ones.
    """

    selection: Selection
    shape: Shape
    pace: Pace
    systems: tuple[str, ...]
    repeats: int
    minutes: float | None
    model: str | None
    running: int
    chunk: int | None
    budget_factor: float
    sizes: dict[str, int]
    inflight: int
    url: str | None
    label: str
    expects_hits: bool
    out: Path
    resume: bool
    server_args: tuple[str, ...]
    save_trace: Path | None = None

    def chunk_at(self, scale: float) -> int:
        """Return the prefill chunk, in tokens, where `scale` tokens are sent for a recorded one."""
        return scaled(CHUNK, scale) if self.chunk is None else self.chunk

    def bytes_from(self, proportional: Bytes) -> Bytes:
        """Return the budgets: those given, else `proportional` ones times the factor."""
        scaled = proportional.scaled(self.budget_factor)
        return Bytes(
            self.sizes.get("device", scaled.device),
            self.sizes.get("host", scaled.host),
            self.sizes.get("disk", scaled.disk),
            self.inflight,
        )


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m eval.replay",
        description="Replays recorded agent sessions on real servers, one system after the other with the same bytes, or on "
        "a server that runs already (--url). Closed loop: so many sessions at a time, the next turn a pause after the "
        "answer. Writes one file of records for each run.",
        epilog="Systems: "
        + "; ".join(f"{system.name}: {system.description}" for system in SYSTEMS.values())
        + ". Exit code: 0 all well, 1 some requests failed, 2 a server, the workload or the command line failed, 130 "
        "interrupted (go on with --resume).",
    )
    with_examples(
        found,
        "python -m eval.replay --workload codex --systems histate,hicache --out build/replay",
        "python -m eval.replay --workload trace.jsonl --url http://127.0.0.1:30000 --out build/replay",
    )
    found.add_argument(
        "--workload",
        required=True,
        metavar="NAME|PATH",
        help="; ".join(f"{name}: {text}" for name, text in NAMES.items()) + "; or a trace file or folder",
    )
    found.add_argument("--out", required=True, type=Path, metavar="DIR", help="records, logs and disk tiers")
    found.add_argument(
        "--resume", action="store_true", help="keep complete sessions of DIR's records, run the others"
    )
    _workload(found.add_argument_group("requests"))
    _pace(found.add_argument_group("pace"))
    _servers(found.add_argument_group("servers that are started here"))
    _url(found.add_argument_group("a server that runs already"))
    return found


def _workload(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--format", choices=FORMATS, help="of the file (found out from its first line)")
    group.add_argument("--traces", type=Path, default=TRACES, metavar="DIR", help="where named traces are")
    group.add_argument("--select", default="", metavar="STEPS", help=STEPS)
    group.add_argument("--sessions", type=positive, metavar="N", help="the first N (all)")
    group.add_argument(
        "--least-turns", type=positive, default=1, metavar="N", help="of sessions with so many turns (1)"
    )
    group.add_argument(
        "--context",
        type=positive,
        default=131072,
        help="a session ends where it exceeds it (%(default)s tokens)",
    )
    group.add_argument("--turns", type=positive, metavar="N", help="most turns of a session (all)")
    group.add_argument(
        "--tokens-per-block",
        type=positive,
        default=4,
        metavar="N",
        help="tokens for a recorded block (%(default)s); 64 for a block of 64 replays the recorded lengths",
    )
    group.add_argument(
        "--most-output",
        type=positive,
        default=1 << 20,
        metavar="N",
        help="most tokens of an answer, scaled (all)",
    )
    group.add_argument(
        "--vocabulary", type=positive, default=256, metavar="N", help="token ids used (%(default)s)"
    )
    group.add_argument("--first-id", type=int, default=0, metavar="ID", help="the least of them (0)")
    group.add_argument(
        "--save-trace",
        type=Path,
        metavar="FOLDER",
        help="also write what is sent, lengths, pages and pauses, as a trace in WEKA's form for another client; to replay "
        "that one, --tokens-per-block 64",
    )


def _pace(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--live", type=positive, default=24, metavar="N", help="sessions at a time (%(default)s)"
    )
    group.add_argument(
        "--cap", type=float, default=60.0, metavar="S", help="recorded pauses are cut to it (%(default)s)"
    )
    group.add_argument(
        "--time-scale",
        type=float,
        metavar="X",
        help="pauses are multiplied by it after the cut (as tokens are: tokens per block / recorded block)",
    )
    group.add_argument(
        "--ramp",
        type=float,
        default=0.0,
        metavar="S",
        help="start the first live sessions over so many seconds instead of at once (0)",
    )


def _servers(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--systems",
        default=DEFAULT_SYSTEMS,
        help="comma-separated, in the order of the first round (%(default)s)",
    )
    group.add_argument(
        "--repeats",
        type=positive,
        default=1,
        metavar="N",
        help="rounds, every second one in the opposite order (1)",
    )
    group.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="begin no further round that would end later than this after the start, if it takes as long as the longest "
        "before it (no limit)",
    )
    group.add_argument("--model", metavar="PATH", help="a hybrid model instead of the demo model")
    group.add_argument(
        "--running", type=positive, default=8, metavar="N", help="most requests in a batch (%(default)s)"
    )
    group.add_argument(
        "--chunk",
        type=positive,
        metavar="N",
        help=f"prefill chunk in tokens as sent ({CHUNK} recorded tokens, scaled as prompts are: {CHUNK} x tokens per block / "
        f"recorded block in whole pages of {PAGE}, at least one; "
        f"{scaled(CHUNK, 4 / 64)} for 4 tokens a block of 64)",
    )
    device, cpu, disk = (f"{100 * share:.1f}" for share in PAPER_SHARES)
    group.add_argument(
        "--budget-factor",
        type=float,
        default=1.0,
        metavar="X",
        help=f"device, host and disk get {device} %%, {cpu} %% and {disk} %% of the bytes of all different KV, as in the "
        "paper, times X (%(default)s)",
    )
    for name in ("device", "host", "disk"):
        group.add_argument(f"--{name}-size", type=size_bytes, metavar="SIZE", help=f"{name} bytes instead")
    group.add_argument(
        "--inflight-size",
        type=size_bytes,
        metavar="SIZE",
        help="part of the host's that HiState keeps for records in flight (2MiB for the demo model, else 1GiB)",
    )
    group.add_argument(
        "--server-args", nargs=argparse.REMAINDER, default=[], help="last: SGLang flags for every server"
    )


def _url(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--url", metavar="URL", help="OpenAI-compatible, ends in /v1; starts no server")
    group.add_argument("--served-model", metavar="NAME", help="its model (the first one it lists)")
    group.add_argument("--label", default="url", metavar="NAME", help="its name in tables (%(default)s)")
    group.add_argument("--no-cache", action="store_true", help="its prefix cache is off on purpose")
    group.add_argument(
        "--outputs",
        choices=(RECORDED, FREE),
        help="recorded: the server is made to say the recorded answers, for SGLang with --enable-custom-logit-processor "
        "(what servers started here do); free: it says what it likes, and later prompts cannot match the ends of answers "
        "(what a URL does)",
    )


def parse(argv: list[str] | None = None) -> Options:
    made = parser()
    given = made.parse_args(argv)
    systems = tuple(name.strip() for name in given.systems.split(",") if name.strip())
    unknown = [name for name in systems if name not in SYSTEMS]
    if unknown or not systems:
        made.error(f"--systems: {unknown[0] if unknown else 'nothing'} is not one of {', '.join(SYSTEMS)}")
    if len(set(systems)) < len(systems):
        made.error(f"--systems {given.systems}: name each once; --repeats runs them again")
    if PAGE % given.tokens_per_block:
        made.error(f"--tokens-per-block {given.tokens_per_block} does not divide the page of {PAGE} tokens")
    if given.chunk is not None and given.chunk % PAGE:
        made.error(f"--chunk {given.chunk}: must be whole pages of {PAGE} tokens")
    for flag in ("cap", "ramp", "first_id"):
        if getattr(given, flag) < 0:
            made.error(f"--{flag.replace('_', '-')} {getattr(given, flag)}: must not be negative")
    if given.budget_factor <= 0:
        made.error(f"--budget-factor {given.budget_factor:g}: must be above 0")
    if given.minutes is not None and given.minutes <= 0:
        made.error(f"--minutes {given.minutes:g}: must be above 0")
    if given.time_scale is not None and given.time_scale < 0:
        made.error(f"--time-scale {given.time_scale:g}: must not be negative")
    outputs = given.outputs or (FREE if given.url else RECORDED)
    shape = Shape(
        tokens_per_block=given.tokens_per_block,
        vocabulary=given.vocabulary,
        first_id=given.first_id,
        most_output=given.most_output,
        longest_gap_s=given.cap,
        time_scale=given.time_scale,
        live=given.live,
        recorded_outputs=outputs == RECORDED,
    )
    sizes = {name: getattr(given, f"{name}_size") for name in ("device", "host", "disk")}
    return Options(
        selection=Selection(
            given.workload,
            given.format,
            given.select,
            given.sessions,
            given.context,
            given.turns,
            given.least_turns,
            given.traces,
        ),
        shape=shape,
        pace=Pace(given.live, given.ramp),
        systems=systems,
        repeats=given.repeats,
        minutes=given.minutes,
        model=given.served_model if given.url else given.model,
        running=given.running,
        chunk=given.chunk,
        budget_factor=given.budget_factor,
        sizes={name: size for name, size in sizes.items() if size is not None},
        inflight=given.inflight_size or (1 << 30 if given.model else 2 << 20),
        url=given.url,
        label=given.label,
        expects_hits=not given.no_cache,
        out=given.out,
        resume=given.resume,
        server_args=tuple(given.server_args),
        save_trace=given.save_trace,
    )
