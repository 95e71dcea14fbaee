"""Traffic that a policy which learns can be wrong about: habits that change, no habits, a tenant that floods.

Sessions grow by `Adversarial.least_new` to `most_new` blocks a turn after instructions of `instructions` blocks. A
rewriting turn parts from the prompt before, and what it adds follows there at once. By `kind`:

- `SHIFT`: the first half of the sessions (the day) changes the last block of the prompt before, as a last message that
  is sent again does. The second half (the night) parts anywhere: what the day has taught is wrong.
- `UNIFORM`: every block of the prompt before is the first changed one with equal probability, in all sessions.
- `FLOOD`: as `UNIFORM`, and `flooders` more sessions of one tenant, from the start to about the end, that send long prompts
  nobody sends again.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from enum import Enum

from eval.workloads.sessions import Session, Turn

_BLOCK = 64


class Kind(Enum):
    """What is adverse, see the module."""

    SHIFT = "shift"
    UNIFORM = "uniform"
    FLOOD = "flood"


@dataclass(frozen=True)
class Adversarial:
    """The workload's parameters; lengths in blocks of 64 tokens, answers in tokens, times in seconds.

    Pauses are exponential with mean `pause_s`, those of flooding sessions with mean `flood_pause_s`.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    kind: Kind
    sessions: int = 96
    turns: int = 24
    instructions: int = 224
    least_new: int = 4
    most_new: int = 60
    rewrites: float = 0.2
    output_tokens: int = 256
    pause_s: float = 30.0
    flooders: int = 2
    flood_turns: int = 240
    least_flood: int = 512
    most_flood: int = 1536
    flood_pause_s: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "sessions", "turns", "instructions", "least_new", "output_tokens", "flooders", "flood_turns", "least_flood",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not above 0")
        for least, most in (("least_new", "most_new"), ("least_flood", "most_flood")):
            if getattr(self, most) < getattr(self, least):
                raise ValueError(f"{most} {getattr(self, most)} is below {least} {getattr(self, least)}")
        for name in ("pause_s", "flood_pause_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} {getattr(self, name)} is no mean of pauses")
        if not 0 <= self.rewrites <= 1:
            raise ValueError(f"rewrites {self.rewrites} is no share")

    @property
    def name(self) -> str:
        """Equal names, equal requests."""
        return f"adversarial-{self.kind.value} seed {self.seed}"


def adversarial_sessions(what: Adversarial) -> list[Session]:
    """Return the sessions in the order in which they begin. Equal arguments give equal sessions."""
    made = [_session(what, number) for number in range(what.sessions)]
    if what.kind is Kind.FLOOD:
        made = [_flood(what, number) for number in range(what.flooders)] + made
    return made


def _session(what: Adversarial, number: int) -> Session:
    turns: list[Turn] = []
    blocks: list[int] = []
    fresh = 0
    start = 0.0
    by_day = what.kind is Kind.SHIFT and 2 * number < what.sessions
    for index in range(what.turns):
        draw = random.Random(f"{what.seed}/{what.kind.value}/{number}/{index}")
        gap = draw.expovariate(1 / what.pause_s) if index else 0.0
        if index and draw.random() < what.rewrites:
            del blocks[-1 if by_day else draw.randrange(len(blocks)) :]
        new = draw.randint(what.least_new, what.most_new) + (0 if index else what.instructions)
        blocks += range(fresh, fresh + new)
        fresh += new
        start += gap
        turns.append(Turn(len(blocks) * _BLOCK, what.output_tokens, tuple(blocks), start, gap, 0.0))
    return Session(f"{what.kind.value}-{number:03d}", _BLOCK, tuple(turns))


def _flood(what: Adversarial, number: int) -> Session:
    draw = random.Random(f"{what.seed}/flood/{number}")
    turns: list[Turn] = []
    fresh = 0
    start = 0.0
    for index in range(what.flood_turns):
        gap = draw.expovariate(1 / what.flood_pause_s) if index else 0.0
        count = draw.randint(what.least_flood, what.most_flood)
        start += gap
        blocks = tuple(range(fresh, fresh + count))
        turns.append(Turn(count * _BLOCK, what.output_tokens, blocks, start, gap, 0.0))
        fresh += count
    return Session(f"flooding-{number:03d}", _BLOCK, tuple(turns))
