"""``python -m eval.journal LOG``: does the policy give the answers again that it gave on a server?

Reads what a server wrote with ``--histate-policy-log``, feeds it to the same policy code in a process without a
server, and compares every victim, interval, learned plan, tier and pressure. Exit status 0: all equal; 1: an answer differs; 2: the log
cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.arguments import with_examples
from eval.progress import each
from sglang_histate.policy.history_tier import historical_tier
from sglang_histate.policy.hit_prior import HitPrior
from sglang_histate.policy.interval import DEFAULT_INTERVALS, IntervalPolicy
from sglang_histate.policy.journal import Event, written
from sglang_histate.policy.place_prior import PlaceKind, PlacePrior
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.prefix_tree import PrefixTree
from sglang_histate.policy.queue import EvictionQueue
from sglang_histate.policy.residence import Residence
from sglang_histate.policy.score import Eviction
from sglang_histate.policy.segment_plan import plan_segment
from sglang_histate.policy.units import Pool, Unit


class JournalError(ValueError):
    """The log is no journal; the message names file and line."""


@dataclass
class Outcome:
    """What was compared. `different` has one sentence for each answer that is not the recorded one."""

    events: int = 0
    victims: int = 0
    intervals: int = 0
    plans: int = 0
    tiers: int = 0
    pressures: int = 0
    different: list[str] = field(default_factory=list)


class Replay:
    """The policy of one rank, fed with events."""

    def __init__(self) -> None:
        self._choices = IntervalPolicy(DEFAULT_INTERVALS)
        self._residence = Residence()
        self._hits, self._places = HitPrior(), PlacePrior()
        self.tree = PrefixTree()
        """As the events so far have left it."""
        self._queues: dict[str, EvictionQueue] = {}
        self._settings: tuple[int, float, Eviction] = (1, 0.0, Eviction.SCORE)
        self.outcome = Outcome()

    def take(self, event: Event) -> None:
        """Do what the event says, and compare if it has an answer.

        Raises:
            KeyError, TypeError, ValueError, IndexError: it is no event, or cannot follow those before.
        """
        name, *rest = event
        self.outcome.events += 1
        EVENTS[name](self, *rest)

    def _supported(self, intervals: list[int]) -> None:
        self._choices = IntervalPolicy(tuple(intervals))

    def _reset(self, root: int, tau: float, mode: str, kv_token_bytes: int) -> None:
        self.tree, self._queues = PrefixTree(root), {}
        self._settings = kv_token_bytes, tau, Eviction(mode)

    def _pool(self, name: str, tier: int, state_bytes: int, kv_token_bytes: int) -> None:
        pool = Pool(Tier(tier), state_bytes, kv_token_bytes)
        self._queues[name] = EvictionQueue(self.tree, pool, *self._settings)

    def _add(self, node: int, parent: int, tokens: int) -> None:
        self.tree.add(node, parent, tokens)

    def _split(self, node: int, upper: int, tokens: int) -> None:
        self.tree.split(node, upper, tokens)

    def _remove(self, node: int) -> None:
        self.tree.remove(node)

    def _kv(self, node: int, tier: int, present: bool) -> None:
        self.tree.set_kv(node, Tier(tier), present)

    def _checkpoint(self, node: int, offset: int, tier: int, present: bool) -> None:
        self.tree.set_checkpoint(node, offset, Tier(tier), present)

    def _touch(self, node: int, offset: int, now: int) -> None:
        self.tree.touch(node, offset, now)

    def _hit(self, node: int, offset: int) -> None:
        self.tree.observe_hit(node, offset)

    def _keep(self, node: int, offset: int, until: int) -> None:
        self.tree.keep(node, offset, until)

    def _forsake(self, node: int, start: int) -> None:
        self.tree.forsake(node, start)

    def _left(self, kind: str, entered: int, now: int) -> None:
        {"kv": self._residence.kv, "state": self._residence.state}[kind].evicted(entered, now)

    def _pressure(self, now: int, oldest_kv: int | None, oldest_state: int | None, recorded: float) -> None:
        self.outcome.pressures += 1
        self._compare("pressure", recorded, self._residence.pressure(now, oldest_kv, oldest_state))

    def _interval_chosen(self, tokens: int, state_tokens: float, pressure: float, recorded: int) -> None:
        self.outcome.intervals += 1
        self._compare("interval", recorded, self._choices.choose(tokens, state_tokens, pressure))

    def _segment(self, start: int, end: int) -> None:
        self._hits.segment(start, end)

    def _parted(self, at: int, end: int) -> None:
        self._hits.parted(at, end)

    def _seen(self, kind: str) -> None:
        self._places.seen(PlaceKind(kind))

    def _left_at(self, kind: str, share: float) -> None:
        self._places.parted(PlaceKind(kind), share)

    def _plan(
        self, start: int, end: int, price: float, given: list[int], places: list[Any], recorded: list[int]
    ) -> None:
        self.outcome.plans += 1
        expected = [(page, self._places.expected(PlaceKind(kind))) for page, kind in places]
        answer = list(plan_segment(self._hits, start, end, price, given, expected))
        self._compare("plan", recorded, answer)

    def _tier(
        self, host: float, ssd: float, worth: float, is_end: bool, refused: bool, recorded: int | None
    ) -> None:
        self.outcome.tiers += 1
        answer = historical_tier(host, ssd, worth, is_end=is_end, refused=refused)
        self._compare("tier", recorded, None if answer is None else int(answer))

    def _victim(self, pool: str, refused: list[Any], recorded: list[Any] | None) -> None:
        self.outcome.victims += 1
        there = list(refused)

        def usable(unit: Unit) -> bool:
            # The refused ones come in the recorded order or the ranking is another one.
            return not (there and written(unit) == there[0] and there.pop(0))

        answer = written(self._queues[pool].victim(usable))
        self._compare(f"victim of {pool}", recorded, answer)
        if there:
            self._compare(f"units of {pool} that could not go", refused, refused[: len(refused) - len(there)])

    def _compare(self, what: str, recorded: Any, answer: Any) -> None:
        if recorded != answer:
            self.outcome.different.append(
                f"event {self.outcome.events}: {what}: the server's was {recorded}, this one is {answer}"
            )


EVENTS: dict[str, Callable[..., None]] = {
    "choices": Replay._supported,
    "reset": Replay._reset,
    "pool": Replay._pool,
    "add": Replay._add,
    "split": Replay._split,
    "remove": Replay._remove,
    "kv": Replay._kv,
    "checkpoint": Replay._checkpoint,
    "touch": Replay._touch,
    "hit": Replay._hit,
    "keep": Replay._keep,
    "forsake": Replay._forsake,
    "left": Replay._left,
    "pressure": Replay._pressure,
    "interval": Replay._interval_chosen,
    "segment": Replay._segment,
    "parted": Replay._parted,
    "seen": Replay._seen,
    "left at": Replay._left_at,
    "plan": Replay._plan,
    "tier": Replay._tier,
    "victim": Replay._victim,
}


def replay(events: Iterable[Event]) -> Outcome:
    """Feed the events to a new policy and return what came of it. Errors as in `Replay.take`."""
    policy = Replay()
    for event in events:
        policy.take(event)
    return policy.outcome


def read(path: Path) -> Iterator[Event]:
    """Yield a log's events; a last line that was cut off is left out.

    Raises:
        JournalError: a line is no event.
        OSError: the file cannot be read.
    """
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                return
            try:
                event = json.loads(line)
            except json.JSONDecodeError as error:
                raise JournalError(f"{path}:{number}: no JSON: {error.msg}") from None
            if not (isinstance(event, list) and event and event[0] in EVENTS):
                raise JournalError(f"{path}:{number}: no event: {line[:80].rstrip()}")
            yield event


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.journal", description=__doc__.partition("\n\n")[2])
    with_examples(parser, "python -m eval.journal policy.jsonl")
    parser.add_argument("log", type=Path, help="what --histate-policy-log named, one file per rank")
    given = parser.parse_args(argv)
    try:
        outcome = replay(each(read(given.log), "replay", "event"))
    except (JournalError, OSError) as error:
        print(f"eval.journal: {error}", file=sys.stderr)
        return 2
    except (KeyError, TypeError, ValueError) as error:
        print(f"eval.journal: {given.log}: an event cannot follow those before: {error}", file=sys.stderr)
        return 2
    for sentence in outcome.different[:20]:
        print(sentence)
    print(
        f"{outcome.events} events: {outcome.victims} victims, {outcome.intervals} intervals, {outcome.plans} plans, "
        f"{outcome.tiers} tiers, {outcome.pressures} pressures; {len(outcome.different)} differ"
    )
    return 1 if outcome.different else 0


if __name__ == "__main__":
    sys.exit(main())
