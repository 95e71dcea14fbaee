"""One form for recorded agent sessions, whatever file they come from.

A prompt is a list of block ids: two prompts whose lists begin alike begin with the same text. A session is its
own turns and the agents it starts; every agent is a list of turns too, and its parent waits for it. Times are
seconds, lengths tokens, both as recorded: nothing is scaled or capped here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Turn:
    """One request.

    `blocks` are the ids of the whole blocks of the prompt; what is left of `input_tokens` has no id. `start_s`
    counts from the session's start. `gap_s` is the pause after the previous turn of the same list, `service_s`
    how long the request took where it was recorded (0 if that is not known: then the next gap has it in it).
    """

    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    start_s: float
    gap_s: float
    service_s: float


@dataclass(frozen=True)
class Agent:
    """A sub-agent. It starts `delay_s` after the end of the parent's turn number `after` (from 0)."""

    name: str
    after: int
    delay_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Session:
    """`turns` are the session's own. Block ids of its agents are of the same namespace as its own.

    `shared_ids`: whether ids mean the same in every session of the file; else only inside this one.
    `start_s`: when the session began on the file's clock, 0 where its sessions have no common one.
    """

    name: str
    block_tokens: int
    turns: tuple[Turn, ...]
    agents: tuple[Agent, ...] = ()
    shared_ids: bool = False
    start_s: float = 0.0

    @property
    def requests(self) -> int:
        """Requests of the session and its agents."""
        return len(self.turns) + sum(len(agent.turns) for agent in self.agents)

    def all_turns(self) -> Iterator[Turn]:
        """Yield the turns of the session, then those of its agents."""
        yield from self.turns
        for agent in self.agents:
            yield from agent.turns

    def cut(self, context_tokens: int, turns: int | None = None) -> Session:
        """Return the session without what comes after the context is full, or after so many turns of a list.

        The first turn whose prompt and output take more than `context_tokens` ends its list, and so does turn
        number `turns`. Agents that would start later than the session's last turn are left out.
        """
        own = _kept(self.turns, context_tokens, turns)
        agents = (
            replace(agent, turns=_kept(agent.turns, context_tokens, turns))
            for agent in self.agents
            if agent.after < len(own)
        )
        return replace(self, turns=own, agents=tuple(agent for agent in agents if agent.turns))


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many items two lists have in common before they part."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while high - low > 1:  # the first `low` are equal, the first `high` are not; slices compare fast
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _kept(turns: Sequence[Turn], context_tokens: int, count: int | None) -> tuple[Turn, ...]:
    kept = []
    for turn in turns[:count]:
        if turn.input_tokens + turn.output_tokens > context_tokens:
            break
        kept.append(turn)
    return tuple(kept)
