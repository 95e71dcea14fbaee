"""From a request of the loop to a record in the file."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from tqdm import tqdm

from eval.internal_hits.client import AskFailed, Cached
from eval.records import Record
from eval.replay.client import Answer
from eval.replay.closed_loop import ClosedLoop
from eval.replay.requests import Request, SessionRequests

MOST_ERRORS_IN_A_ROW = 10


class ServerGone(RuntimeError):
    """So many requests failed one after the other that going on makes no sense."""


class Asks(Protocol):
    async def ask(self, prompt: Sequence[int], recorded: Sequence[int]) -> Answer: ...


class Adds(Protocol):
    def add(self, record: Record) -> None: ...


@dataclass(frozen=True)
class Pace:
    """At most `live` sessions at once, the first of them started over `ramp_s` seconds."""

    live: int
    ramp_s: float = 0.0


class Sending:
    """The `Send` of a `ClosedLoop`: asks, times, counts errors and goes on.

    Seconds in records count from `offset_s` before this object was made: what an interrupted run took.
    """

    def __init__(self, client: Asks, run: Adds, bar: Progress, offset_s: float = 0.0) -> None:
        self._client = client
        self._run = run
        self._bar = bar
        self._zero_s = _now_s() - offset_s
        self._failed_in_a_row = 0

    async def __call__(self, request: Request, eligible_s: float) -> None:
        sent_s = _now_s()
        try:
            answer = await self._client.ask(request.prompt, request.output)
        except AskFailed as error:
            record = self._failure(request, eligible_s, sent_s, str(error) or type(error).__name__)
            self._failed_in_a_row += 1
        else:
            record = self._success(request, eligible_s, answer)
            self._failed_in_a_row = 0
        self._run.add(record)
        self._bar.count(record)
        if self._failed_in_a_row >= MOST_ERRORS_IN_A_ROW:
            raise ServerGone(
                f"{self._failed_in_a_row} requests in a row failed, the last one with: {record.error}"
            )

    def _success(self, request: Request, eligible_s: float, answer: Answer) -> Record:
        cached = answer.cached
        return Record(
            *request.key,
            eligible_s=self._since_start(eligible_s),
            sent_s=self._since_start(answer.sent_s),
            first_token_s=self._since_start(answer.first_token_s),
            end_s=self._since_start(answer.end_s),
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            restored={"device": cached.device, "host": cached.host, "ssd": cached.storage},
            checkpoint_tier=checkpoint_tier(cached),
            kv_match=None,
            reusable=request.reusable,
            rewrite=request.rewrite,
        )

    def _failure(self, request: Request, eligible_s: float, sent_s: float, error: str) -> Record:
        now_s = self._since_start(_now_s())
        return Record(
            *request.key,
            eligible_s=self._since_start(eligible_s),
            sent_s=self._since_start(sent_s),
            first_token_s=now_s,
            end_s=now_s,
            prompt_tokens=len(request.prompt),
            output_tokens=0,
            restored={},
            checkpoint_tier="",
            kv_match=None,
            reusable=request.reusable,
            rewrite=request.rewrite,
            error=error,
        )

    def _since_start(self, at_s: float) -> float:
        return round(at_s - self._zero_s, 6)


def checkpoint_tier(cached: Cached) -> str:
    """Return where the state of a hit was. The server says so for the SSD only; else it lies with the last KV."""
    if not cached.total:
        return ""
    if cached.ssd_checkpoint or cached.storage:
        return "ssd"
    return "host" if cached.host else "device"


class Progress:
    """A bar on a terminal, a line every half minute elsewhere."""

    def __init__(self, name: str, total: int) -> None:
        on_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            desc=name,
            unit="req",
            mininterval=0.5 if on_terminal else 30,
            maxinterval=1 if on_terminal else 60,
        )
        self._hit = self._prompt = self._errors = 0

    def count(self, record: Record) -> None:
        if record.error:
            self._errors += 1
        else:
            self._hit += record.hit
            self._prompt += record.prompt_tokens
        rate = self._hit / self._prompt if self._prompt else 0.0
        self._bar.set_postfix_str(f"hit {rate:.1%}, {self._errors} errors", refresh=False)
        self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


async def send_all(
    client: Asks, sessions: Sequence[SessionRequests], pace: Pace, run: Adds, name: str, offset_s: float = 0.0
) -> None:
    """Send every request of the sessions and add a record of each to `run`.

    Raises:
        ServerGone: see there.
    """
    total = sum(1 for session in sessions for _ in session.all_requests())
    with Progress(name, total) as bar:
        sending = Sending(client, run, bar, offset_s)
        await ClosedLoop(sessions, pace.live, sending, pace.ramp_s).run()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
