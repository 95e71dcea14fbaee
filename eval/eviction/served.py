"""The comparison on a real server: one start per ranking, one request at a time."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eval.eviction.budgets import Budgets
from eval.eviction.requests import Request
from eval.eviction.rows import Mode, Row, quantile
from eval.internal_hits.client import Answer, ask
from eval.progress import each
from eval.servers import Server, ServerFailed

START_TIMEOUT_S = 600.0
# Threads that wait actively for each other are slow where several servers share few cores.
_ENVIRON = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
_SAY_EVERY = 100


@dataclass
class Run:
    """What one server did: its row, every answer, its last status."""

    row: Row
    answers: list[Answer]
    status: dict[str, Any]
    command: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        short = [
            {"prompt": a.prompt_tokens, "cached": asdict(a.cached), "ttft_s": round(a.ttft_s, 4)}
            for a in self.answers
        ]
        return {"row": self.row.as_json(), "command": self.command, "answers": short, "status": self.status}


def arguments(mode: Mode, budgets: Budgets, ssd_dir: Path, extra: Sequence[str]) -> list[str]:
    """Return the server's command line for a ranking."""
    return [
        "--demo",
        *("--histate-ssd-dir", str(ssd_dir)),
        *("--histate-ssd-size", str(budgets.ssd_bytes)),
        *("--histate-host-size", str(budgets.host_bytes)),
        *("--histate-inflight-size", str(budgets.inflight_bytes)),
        *("--max-total-tokens", str(budgets.device_kv_tokens)),
        *("--max-mamba-cache-size", str(budgets.device_states)),
        *("--chunked-prefill-size", "8192"),
        *("--histate-eviction", mode.eviction.value),
        *("--histate-tau", f"{mode.tau:g}"),
        "--sleep-on-idle",
        *(() if budgets.one_device_pool else ("--histate-static-split",)),
        *extra,
    ]


def serve(
    requests: Sequence[Request],
    mode: Mode,
    budgets: Budgets,
    work_dir: Path,
    extra: Sequence[str],
    say: Callable[[str], None],
) -> Run:
    """Start a server with empty tiers, send all requests one after the other, and stop it.

    Every write is waited for before the next request, so that speed does not decide what is cached.

    Raises:
        ServerFailed, AskFailed, OSError: the server did not start, or a request failed.
    """
    name = mode.name.replace(" ", "-")
    ssd_dir = work_dir / f"{name}-ssd"
    shutil.rmtree(ssd_dir, ignore_errors=True)
    work_dir.mkdir(parents=True, exist_ok=True)
    command = arguments(mode, budgets, ssd_dir, extra)
    with Server(command, work_dir / f"{name}.log", _ENVIRON) as server:
        server.wait_ready(START_TIMEOUT_S)
        ask(server.port, requests[0].tokens, 2)  # what a first request would otherwise pay for
        server.settle()
        server.flush()
        before = _counters(server.status())
        begin = time.perf_counter()
        answers = []
        for number, request in enumerate(each(requests, mode.name, "request"), 1):
            answers.append(ask(server.port, request.tokens, request.output_tokens))
            status = server.settle()
            if number % _SAY_EVERY == 0:
                say(f"  {mode.name}: {number} of {len(requests)} after {time.perf_counter() - begin:.0f} s")
        wall_s = time.perf_counter() - begin
    shutil.rmtree(ssd_dir, ignore_errors=True)
    return Run(_row(mode, requests, answers, before, status, wall_s), answers, status, command)


def _row(
    mode: Mode,
    requests: Sequence[Request],
    answers: Sequence[Answer],
    before: dict[str, int],
    status: dict[str, Any],
    wall_s: float,
) -> Row:
    for request, answer in zip(requests, answers, strict=True):
        if answer.prompt_tokens != len(request.tokens):
            raise ServerFailed(
                f"the server counted {answer.prompt_tokens} tokens in a prompt of {len(request.tokens)}"
            )
        if answer.cached.total > request.reusable:
            raise ServerFailed(
                f"{answer.cached.total} tokens were cached of a prompt of which only {request.reusable} were "
                "ever seen before"
            )
    cached = sum(answer.cached.total for answer in answers)
    reusable = sum(request.reusable for request in requests)
    after = _counters(status)
    evictions = {name: after[name] - before[name] for name in after if name != _WITH_KV}
    times = [answer.ttft_s for answer in answers]
    return Row(
        mode.name,
        len(requests),
        sum(answer.prompt_tokens for answer in answers),
        reusable,
        cached,
        reusable - cached,
        after[_WITH_KV] - before[_WITH_KV],
        evictions,
        quantile(times, 0.5),
        quantile(times, 0.95),
        wall_s,
    )


_WITH_KV = "recomputed_tokens_with_kv_total"


def _counters(status: dict[str, Any]) -> dict[str, int]:
    rank = status["ranks"][0]
    return {_WITH_KV: rank["counters"][_WITH_KV], **rank["eviction"]["evictions_total"]}


def different_outputs(runs: Sequence[Run]) -> list[str]:
    """Return one sentence for each run some of whose greedy outputs differ from the first run's."""
    found = []
    for run in runs[1:]:
        pairs = zip(runs[0].answers, run.answers, strict=True)
        differing = [number for number, (a, b) in enumerate(pairs) if a.output_ids != b.output_ids]
        if differing:
            found.append(
                f"{run.row.mode}: {len(differing)} outputs differ from those of {runs[0].row.mode}, first that of "
                f"request {differing[0]}"
            )
    return found


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
