"""All runs of one command: which system when, with which bytes, into which file."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.eviction.budgets import DEMO_UNITS
from eval.internal_hits import machine as host
from eval.internal_hits.budgets import Units
from eval.records import RunFacts
from eval.replay.engine import Work, learn_units, replay_system, replay_url
from eval.replay.kept import complete
from eval.replay.options import Options
from eval.replay.probe import find
from eval.replay.requests import SessionRequests, build, digest, working_set
from eval.replay.systems import SYSTEMS, Bytes, System, in_proportion, scaled, setup_of, split, start_only
from eval.replay.trace import as_sent
from eval.replay.workload import load
from eval.workloads.save import saved

Say = Callable[[str], None]


@dataclass(frozen=True)
class Planned:
    """One run: `position` is its place in its round, from 1."""

    system: str
    round: int
    position: int
    path: Path


@dataclass(frozen=True)
class Workload:
    """What every run of the command sends. `name` is equal only for equal requests.

    `scale`: tokens sent for a recorded one; the largest where the sessions' blocks differ in size.
    """

    name: str
    sessions: Sequence[SessionRequests]
    different_tokens: int
    scale: float

    def text(self) -> str:
        requests = [request for session in self.sessions for request in session.all_requests()]
        prompt = sum(len(request.prompt) for request in requests)
        reusable = sum(request.reusable for request in requests)
        return (
            f"{len(requests)} requests of {len(self.sessions)} sessions: {prompt:,} prompt tokens, {reusable:,} of them "
            f"reusable by an infinite cache ({100 * reusable / max(prompt, 1):.1f} %), {self.different_tokens:,} "
            f"different, {sum(len(request.output) for request in requests):,} in answers; longest prompt "
            f"{max(len(request.prompt) for request in requests):,}."
        )


class Limit:
    """Says whether another round of work ends in time, by the longest one so far. The first always begins.

    `begun_s`: when the time limit began, of `clock`.
    """

    def __init__(
        self, minutes: float | None, begun_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._end_s = (
            math.inf if minutes is None else (clock() if begun_s is None else begun_s) + 60 * minutes
        )
        self._last_s: float | None = None
        self._longest_s = 0.0

    def allows_another(self) -> bool:
        """Call it where a round begins."""
        now_s = self._clock()
        if self._last_s is not None:
            self._longest_s = max(self._longest_s, now_s - self._last_s)
        self._last_s = now_s
        return self._longest_s == 0 or now_s + self._longest_s <= self._end_s


def prepare(options: Options) -> Workload:
    """Load the sessions and build their requests, saved if wanted; errors as in `load`, `build` and `saved`."""
    recorded = load(options.selection)
    sessions = build(recorded, options.shape)
    shape, pace = options.shape, options.pace
    if options.save_trace is not None:
        deque(saved(as_sent(recorded, shape), options.save_trace), maxlen=0)
    scale = "as tokens" if shape.time_scale is None else f"x {shape.time_scale:g}"
    most = f" of at most {shape.most_output} tokens" if shape.most_output < 1 << 20 else ""
    answers = ("recorded" if shape.recorded_outputs else "free") + f" answers{most}"
    ramp = f" started over {pace.ramp_s:g} s" if pace.ramp_s else ""
    name = (
        f"{options.selection.name}; {shape.tokens_per_block} tokens a block, {answers}; {pace.live} live{ramp}, pauses "
        f"up to {shape.longest_gap_s:g} s, scaled {scale}; {digest(sessions)}"
    )
    tokens = max(shape.scale_of_tokens(session) for session in recorded)
    return Workload(name, sessions, working_set(sessions, shape.recorded_outputs), tokens)


def plan(systems: Sequence[str], repeats: int, out: Path) -> Iterator[Planned]:
    """Yield the runs: every round has every system once, and every second round runs in the opposite order.

    A server that starts first was measured up to a quarter slower than one that starts second on one machine.
    """
    for number in range(1, repeats + 1):
        ordered = systems if number % 2 else tuple(reversed(systems))
        for position, system in enumerate(ordered, 1):
            yield Planned(system, number, position, out / f"{system}-{number}.jsonl")


def run_all(options: Options, workload: Workload, command: str, say: Say) -> list[Path]:
    """Run everything that was asked for and return the records files.

    Raises:
        ValueError, ServerFailed, Unusable, AskFailed, ServerGone, RecordsError, OSError: see `engine`.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    work = Work(
        workload.sessions, options.shape, options.pace, options.shape.recorded_outputs, options.resume
    )
    facts = _facts(options)
    if options.url is not None:
        return [_run_url(options, options.url, workload, work, command, facts)]
    given, units = _budgets(options, workload, say)
    longest = max(len(one.prompt) + len(one.output) for s in workload.sessions for one in s.all_requests())
    budgets = split(given, units, longest, options.running)
    chunk = options.chunk_at(workload.scale)
    facts |= {
        "model": options.model or "demo",
        "running_requests": options.running,
        "chunk_tokens": chunk,
        "chunk_recorded_tokens": round(chunk / workload.scale),
        "server_args": list(options.server_args),
        "budgets": asdict(given),
        "flags": asdict(budgets),
        "units": asdict(units),
    }
    paths: list[Path] = []
    limit = Limit(options.minutes)
    planned_runs = list(plan(options.systems, options.repeats, options.out))
    if not options.resume:
        # A round that there is no time for must not leave an earlier command's records beside this one's.
        for planned in planned_runs:
            planned.path.unlink(missing_ok=True)
    for planned in planned_runs:
        if planned.position == 1 and not limit.allows_another():
            say(f"no time for round {planned.round} of {options.repeats} (--minutes {options.minutes:g})")
            break
        system = SYSTEMS[planned.system]
        paths.append(planned.path)
        more = _facts_of(system, workload) | {"round": planned.round, "position": planned.position}
        run = RunFacts(
            system.name, "engine", workload.name, str(facts["machine"]["commit"]), command, facts | more
        )
        if options.resume and complete(planned.path, run):
            say(f"{planned.path} is complete")
            continue
        setup = setup_of(
            system,
            budgets,
            units,
            model=options.model,
            work_dir=options.out / "servers",
            running=options.running,
            chunk=chunk,
            scale=workload.scale,
            recorded=work.recorded,
            extra=options.server_args,
        )
        replay_system(system, setup, run, planned.path, work, say)
    return paths


def _run_url(
    options: Options, url: str, workload: Workload, work: Work, command: str, facts: dict[str, Any]
) -> Path:
    target = asyncio.run(find(url, options.model))
    more = {
        "url": url,
        # A server's own name for its model: two servers may name one model differently.
        "served_model": target.model,
        "sglang": target.sglang,
        "tiers": "as the server counts" if target.sglang else "not told: all hits are counted as device",
    }
    run = RunFacts(
        options.label, "engine", workload.name, str(facts["machine"]["commit"]), command, facts | more
    )
    path = options.out / f"{options.label}-1.jsonl"
    replay_url(target, run, path, work, options.expects_hits)
    return path


def _budgets(options: Options, workload: Workload, say: Say) -> tuple[Bytes, Units]:
    if options.model is None:
        units = Units(DEMO_UNITS.kv_token, DEMO_UNITS.checkpoint)
    else:
        setup = start_only(
            options.model,
            options.out / "servers",
            options.chunk_at(workload.scale),
            options.inflight,
            options.server_args,
        )
        units = learn_units(SYSTEMS["histate"], setup, say)
    kv_bytes = round(workload.different_tokens * units.kv_bytes_per_token)
    return options.bytes_from(in_proportion(kv_bytes, options.inflight)), units


def _facts(options: Options) -> dict[str, Any]:
    shape, pace = options.shape, options.pace
    return {
        "machine": host.describe(),
        "loop": "closed: the next turn of a session is eligible at the end of its last answer plus the pause; parents "
        "wait for their agents",
        "live_sessions": pace.live,
        "ramp_s": pace.ramp_s,
        "pause_cap_s": shape.longest_gap_s,
        "pause_scale": "tokens per block / recorded block" if shape.time_scale is None else shape.time_scale,
        "tokens_per_block": shape.tokens_per_block,
        "outputs": "recorded tokens, forced by a logit processor"
        if shape.recorded_outputs
        else "free, of the recorded length: the ends of answers match no later prompt",
    }


def _facts_of(system: System, workload: Workload) -> dict[str, Any]:
    found: dict[str, Any] = {"description": system.description}
    if system.interval is not None:
        found["interval_tokens"] = scaled(system.interval, workload.scale)
    return found
