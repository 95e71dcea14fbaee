"""The event loop: requests come, wait, are computed in chunks beside others' decoding, and end.

Steps as continuous batching makes them: every request that decodes gets a token in every step; what is left of the
chunk size goes to prompts, first come, first served. A step ends when its computing has, and when what its prompts
have to load is there: loads go layer by layer beside the computing. The scheduler acts between steps only, except
that reads for a request that arrives begin at once. Steps that only decode are taken many at a time, up to the
next thing that happens.

Everything that is computed is also remembered by a cache without bounds: what that would have restored is written
with each request, and no system may exceed it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from math import inf

from eval.records import Record
from eval.simulate.bounds import Infinite
from eval.simulate.costs import Costs
from eval.simulate.jobs import Job
from eval.simulate.loop import ClosedLoop, Due, Turns
from eval.simulate.system import Admission, System, Visit
from sglang_histate.policy.step import step_tokens

CHUNK_TOKENS = 8192
"""Prompt tokens of a step: SGLang's default on an H100."""


class Active:
    """A request on its way."""

    __slots__ = (
        "admission",
        "arrived_s",
        "decoded",
        "done",
        "first_s",
        "job",
        "reference",
        "reusable",
        "turns",
        "visit",
    )

    def __init__(self, turns: Turns, visit: Visit, arrived_s: float) -> None:
        self.turns = turns
        self.job: Job = visit.job
        self.visit = visit
        self.reference = Visit(visit.job)
        self.arrived_s = arrived_s
        self.admission = Admission()
        self.reusable = 0
        self.done = 0  # tokens of the prompt that are restored or computed
        self.decoded = 0
        self.first_s = 0.0

    def record(self, end_s: float) -> Record:
        job, admission = self.job, self.admission
        return Record(
            session=job.session,
            agent=job.agent,
            turn=job.turn,
            eligible_s=self.arrived_s,
            sent_s=self.arrived_s,
            first_token_s=self.first_s,
            end_s=end_s,
            prompt_tokens=job.prompt_tokens,
            output_tokens=job.output_tokens,
            restored=admission.restored,
            checkpoint_tier=admission.checkpoint_tier,
            kv_match=admission.kv_match,
            reusable=self.reusable,
            rewrite=job.rewrite,
        )


class DoesNotFit(ValueError):
    """A request is larger than the device."""


class Clock:
    """What happens when: functions by time, those of the same time in the order they came."""

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0

    def at(self, time_s: float, what: Callable[[float], None]) -> None:
        """Have `what` called with the time when it has come."""
        self._count += 1
        heappush(self._queue, (time_s, self._count, what))

    @property
    def next_s(self) -> float:
        return self._queue[0][0] if self._queue else inf

    def run_until(self, time_s: float) -> None:
        """Call all that is due up to a time, and what they ask for up to it."""
        while self._queue and self._queue[0][0] <= time_s:
            at_s, _, what = heappop(self._queue)
            what(at_s)


class Engine:
    """One run of one system; `write` gets each request's record when it ends.

    Raises:
        ValueError: a chunk is smaller than what the system's chunks are multiples of.
    """

    def __init__(
        self,
        system: System,
        clock: Clock,
        costs: Costs,
        loop: ClosedLoop,
        write: Callable[[Record], None],
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        if chunk_tokens < system.chunk_tokens:
            raise ValueError(
                f"chunks of {chunk_tokens} tokens: this system's end on multiples of {system.chunk_tokens}"
            )
        self._system = system
        self._clock = clock
        self._costs = costs
        self._loop = loop
        self._write = write
        self._chunk_tokens = chunk_tokens
        self._bound = Infinite()
        self._waiting: list[Active] = []
        self._computing: list[Active] = []
        self._decoding: list[Active] = []
        self._full = False  # no room until something ends
        self._now_s = 0.0
        self.steps = 0
        self.busy_s = 0.0

    def run(self) -> float:
        """Serve everything; return the time when the last answer ended.

        Raises:
            DoesNotFit: see there.
        """
        self._expect(self._loop.start())
        while True:
            self._clock.run_until(self._now_s)
            self._admit()
            if self._computing:
                self._mixed_step()
            elif self._decoding:
                self._decode_steps()
            elif self._clock.next_s < inf:
                self._now_s = self._clock.next_s
            elif self._waiting:
                job = self._waiting[0].job
                raise DoesNotFit(
                    f"session {job.session}, turn {job.turn}: {job.prompt_tokens} tokens and an answer of {job.output_tokens} "
                    "do not fit the device: give it more (--device), or cut the sessions (--select context:TOKENS)"
                )
            else:
                return self._now_s

    def _expect(self, due: list[Due]) -> None:
        for one in due:
            self._clock.at(one.at_s, partial(self._arrive, one))

    def _arrive(self, due: Due, now_s: float) -> None:
        self._waiting.append(Active(due.turns, self._system.arrive(due.job, now_s), now_s))

    def _admit(self) -> None:
        """Start requests while this step has tokens left for them and the device has room."""
        left = self._chunk_tokens - sum(one.job.prompt_tokens - one.done for one in self._computing)
        if left <= 0 or self._full or not self._waiting:
            return
        alone = not self._computing and not self._decoding
        still: list[Active] = []
        for index, one in enumerate(self._waiting):
            if left <= 0 or self._full:
                still += self._waiting[index:]
                break
            if not self._system.ready(one.visit, self._now_s):
                still.append(one)
                continue
            found = self._system.admit(one.visit, self._now_s)
            if found is None:
                still.append(one)
                # On an empty device only locks of others can be in the way: they go when those are admitted.
                self._full = not alone
                continue
            alone = False
            self._begin(one, found)
            left -= one.job.prompt_tokens - one.done
        self._waiting = still

    def _begin(self, one: Active, admission: Admission) -> None:
        one.admission = admission
        one.done = admission.tokens
        one.reusable = self._bound.reusable(one.job)
        assert one.done <= one.reusable, f"{one.job.session}: {one.done} restored of {one.reusable} tokens"
        self._computing.append(one)

    def _mixed_step(self) -> None:
        """One step: a chunk of prompts, and a token for each request that decodes."""
        left, flop, ready_s = self._chunk_tokens, 0.0, self._now_s
        chunks: list[tuple[Active, int]] = []
        for one in self._computing:
            rest = one.job.prompt_tokens - one.done
            end = one.done + step_tokens(rest, left, self._system.tail_tokens)
            if end < one.job.prompt_tokens:
                end = end // self._system.chunk_tokens * self._system.chunk_tokens
            if end <= one.done:
                break
            flop += self._costs.prefill_flop(end - one.done, one.done)
            ready_s = max(ready_s, one.admission.loaded_s)
            chunks.append((one, end))
            left -= end - one.done
        context = sum(one.job.prompt_tokens + one.decoded for one in self._decoding)
        took = self._costs.step_time_s(flop, len(self._decoding), context)
        self._end_step(max(self._now_s + took, ready_s), 1, took)
        decoding = self._decoding
        self._decoding = []
        for one in decoding:
            self._decoded(one, 1)
        for one, end in chunks:
            one.done = end
            self._system.computed(one.visit, end, self._now_s)
            self._bound.computed(one.reference, end, self._now_s)
            if end == one.job.prompt_tokens:
                one.first_s = self._now_s
                self._computing.remove(one)
                self._decoded(one, 1)

    def _decode_steps(self) -> None:
        """Steps that only decode, until an answer ends or something happens."""
        count = len(self._decoding)
        most = min(one.job.output_tokens - one.decoded for one in self._decoding)
        context = sum(one.job.prompt_tokens + one.decoded for one in self._decoding)
        each = self._costs.step_time_s(0.0, count, context)
        slope = self._costs.step_token_s * count

        def took(steps: int) -> float:
            return steps * each + slope * (steps * (steps - 1) / 2)

        low, high = 1, most
        until_s = self._clock.next_s
        while low < high:  # the first number of steps that reaches what happens next
            middle = (low + high) // 2
            if self._now_s + took(middle) >= until_s:
                high = middle
            else:
                low = middle + 1
        self._end_step(self._now_s + took(low), low, took(low))
        decoding = self._decoding
        self._decoding = []
        for one in decoding:
            self._decoded(one, low)

    def _end_step(self, end_s: float, steps: int, busy_s: float) -> None:
        """Let happen what does during a step, then be at its end."""
        self.steps += steps
        self.busy_s += busy_s
        self._clock.run_until(end_s)
        self._now_s = end_s

    def _decoded(self, one: Active, tokens: int) -> None:
        one.decoded += tokens
        if one.decoded < one.job.output_tokens:
            self._decoding.append(one)
            return
        self._system.finish(one.visit, self._now_s)
        self._bound.finish(one.reference, self._now_s)
        self._full = False
        self._write(one.record(self._now_s))
        self._expect(self._loop.ended(one.turns, self._now_s))
