"""One system, from an empty disk to its records: started here, or found at a URL."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.eviction.rows import quantile
from eval.internal_hits import machine as host
from eval.internal_hits.budgets import Units, difference
from eval.internal_hits.systems import Running, Setup, command_line, disk_dir, shown
from eval.records import Record, RunFacts
from eval.replay import machine
from eval.replay.client import Client
from eval.replay.kept import GrowingRun, Kept, keep
from eval.replay.probe import (
    Target,
    check_lengths,
    check_recorded_answers,
    check_reports_cache,
    find,
    random_tokens,
)
from eval.replay.requests import SessionRequests, Shape
from eval.replay.sending import Pace, send_all
from eval.replay.systems import System
from eval.servers import Server, ServerFailed

START_TIMEOUT_S = 900.0
_WARM_UP = (2048, 512, 65)
# What a server counts from its start: unknown of a run that another server began.
_COUNTED = ("counters", "recomputed_with_kv_tokens", "intervals", "status")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Work:
    """What is sent, in which form and how fast."""

    sessions: Sequence[SessionRequests]
    shape: Shape
    pace: Pace
    recorded: bool
    resume: bool


@contextmanager
def started(system: System, setup: Setup, log: str, say: Say) -> Iterator[Running]:
    """Start a system with an empty disk tier and stop it at the end, its disk tier removed; it writes to `log`.log.

    Raises:
        ServerFailed: it does not start.
    """
    arguments, environ = command_line(system.base, setup)
    disk = disk_dir(system.base, setup)
    shutil.rmtree(disk, ignore_errors=True)
    disk.parent.mkdir(parents=True, exist_ok=True)
    begin_s = time.monotonic()
    try:
        with Server(arguments, setup.work_dir / f"{log}.log", environ) as server:
            server.wait_ready(START_TIMEOUT_S)
            running = Running(system.base, setup, server)
            running.measure_holdings()
            held = f": {running.holdings.text()}" if running.holdings else ""
            say(f"{system.name} is up after {time.monotonic() - begin_s:.0f} s{held}")
            yield running
    finally:
        shutil.rmtree(disk, ignore_errors=True)


def replay_system(system: System, setup: Setup, run: RunFacts, path: Path, work: Work, say: Say) -> None:
    """Start `system`, send everything that `path` does not have yet, and write it there.

    What a server counts as a whole is None in the facts if another one answered a part of the requests.

    Raises:
        ServerFailed, Unusable, AskFailed, ServerGone: it did not start or failed, or cannot be measured.
        RecordsError: `path` has records of something else.
    """
    kept = _kept(path, run, work)
    page_cache = machine.drop_page_cache()
    load = host.load()
    with started(system, setup, path.stem, say) as running:
        target = asyncio.run(_prepare(running, system, work))
        running.flush()
        group = running.server.process.pid
        written, counters = machine.written_bytes(group), running.counters()
        growing = GrowingRun(path, run, kept.records)
        try:
            asyncio.run(_send(target, growing, work, kept.left, system.name, kept.end_s))
            running.settle()
        except BaseException:
            growing.close()
            raise
        after = machine.written_bytes(group)
        facts: dict[str, Any] = {
            "command_line": shown(system.base, setup),
            "bytes_held": asdict(running.holdings) if running.holdings else None,
            "unequal_bytes": _unequal(setup, running),
            "page_cache": page_cache,
            "load": {"before": load, "after": host.load()},
            **server_facts(system, counters, running.counters()),
        }
        if not system.has_disk:
            facts["ssd_written_bytes"] = 0
        elif written is None or after is None or kept.records:
            facts["ssd_written_bytes"] = None
        else:
            facts["ssd_written_bytes"] = after - written
        if system.has_histate:
            facts["status"] = running.server.status()
        if kept.records:
            facts |= {name: None for name in _COUNTED if name in facts}
        if facts["unequal_bytes"]:
            say(f"warning: {system.name} holds other bytes than asked for, {facts['unequal_bytes']}")
        growing.finish({**facts, **_end_facts(growing.records, len(kept.records))})


def replay_url(target: Target, run: RunFacts, path: Path, work: Work, expects_hits: bool) -> None:
    """The same for a server that runs already: its caches are as they are, its counters are not read."""
    kept = _kept(path, run, work)

    async def go() -> GrowingRun:
        check_lengths(work.sessions, target.context_tokens, "context")
        async with Client(target.base_url, target.model, sglang=target.sglang, force=work.recorded) as client:
            await check_recorded_answers(client, work.shape)
            await check_reports_cache(client, work.shape, str(time.time_ns()), expects_hits)
        growing = GrowingRun(path, run, kept.records)
        try:
            await _send(target, growing, work, kept.left, run.system, kept.end_s)
        except BaseException:
            growing.close()
            raise
        return growing

    growing = asyncio.run(go())
    growing.finish(_end_facts(growing.records, len(kept.records)))


def learn_units(system: System, setup: Setup, say: Say) -> Units:
    """Start HiState once to learn what a token of KV and a state take."""
    with started(system, setup, "units", say) as running:
        if running.units is None:
            raise ServerFailed(f"{system.name} does not say what a token of KV takes")
        return running.units


def server_facts(system: System, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return what HiState's counters say about the time between; nothing for other systems."""
    if not system.has_histate:
        return {"counters": None}
    grown = difference_of(before, after)
    chosen = grown.get("intervals_chosen_total") or {}
    return {
        "counters": grown,
        "recomputed_with_kv_tokens": grown.get("recomputed_tokens_with_kv_total"),
        "intervals": {key: count for key, count in chosen.items() if count},
    }


def difference_of(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Subtract counters, also inside of groups; one that is new counts from 0."""
    found: dict[str, Any] = {}
    for name, value in after.items():
        earlier = before.get(name)
        if isinstance(value, dict):
            found[name] = difference_of(earlier if isinstance(earlier, dict) else {}, value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value - earlier if isinstance(earlier, int | float) else value
    return found


async def _prepare(running: Running, system: System, work: Work) -> Target:
    """Check that the server can be measured, and send what a first request would otherwise pay for."""
    target = await find(f"{running.server.url}/v1")
    check_lengths(work.sessions, target.context_tokens, "context")
    check_lengths(work.sessions, running.setup.budgets.device_kv_tokens, "device KV pool")
    async with Client(target.base_url, target.model, sglang=True, force=work.recorded) as client:
        await check_recorded_answers(client, work.shape)
        await check_reports_cache(client, work.shape, system.name, system.has_cache)
        most = running.setup.budgets.device_kv_tokens // len(_WARM_UP) // 2
        prompts = [random_tokens(work.shape, f"warm-up/{length}", min(length, most)) for length in _WARM_UP]
        await asyncio.gather(*(client.ask(prompt, prompt[:16]) for prompt in prompts))
    return target


async def _send(
    target: Target,
    growing: GrowingRun,
    work: Work,
    sessions: Sequence[SessionRequests],
    name: str,
    offset_s: float,
) -> None:
    async with Client(target.base_url, target.model, sglang=target.sglang, force=work.recorded) as client:
        await send_all(client, sessions, work.pace, growing, name, offset_s)


def _end_facts(records: Sequence[Record], kept: int) -> dict[str, Any]:
    """Facts of the whole run: how busy the server was, how late the client sent, hits that the bound does not explain.

    Lateness is part of every TTFT: seconds at its 99th percentile, of which this machine's load decides most.

    The bound is counted in the order of the recorded times, so two agents of one session that share a prefix may hit
    more than it says; a session's own turns may not.
    """
    good = [record for record in records if not record.error]
    busy_s = sum(record.end_s - record.sent_s for record in good)
    makespan_s = max((record.end_s for record in good), default=0.0)
    return {
        "complete": True,
        "resumed_requests": kept,
        "mean_in_flight": round(busy_s / makespan_s, 2) if makespan_s else 0.0,
        "sent_late_p99_s": round(
            quantile([record.sent_s - record.eligible_s for record in good] or [0.0], 0.99), 4
        ),
        "hits_beyond_bound": sum(record.hit > record.reusable for record in good),
    }


def _kept(path: Path, run: RunFacts, work: Work) -> Kept:
    return keep(path, run, work.sessions) if work.resume else Kept((), tuple(work.sessions))


def _unequal(setup: Setup, running: Running) -> str | None:
    if setup.reference is None or running.holdings is None:
        return None
    return difference(setup.reference, running.holdings)
