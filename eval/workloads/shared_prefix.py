"""The tools and system prompt that recorded sessions shared, put back where a trace has dropped it.

Traces whose ids are a session's own cannot tell that two sessions begin with the same text, although all sessions of
one agent do. In the Claude Code sessions of WEKA tools and system prompt have 14,949 tokens (median). This
makes the first so many tokens of every session's first prompt the same text in all sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count

from eval.workloads.sessions import Session, Turn


def with_shared_prefix(sessions: Iterable[Session], tokens: int, agent_tokens: int = 0) -> Iterator[Session]:
    """Yield the sessions with ids that mean the same in all of them.

    The whole blocks within the first `tokens` of a session's first prompt become the common ones, as far as that
    prompt goes; so do, from another common text, those within the first `agent_tokens` of the first prompt of each
    agent. Wherever else such a block is in the session it becomes the common one too, every other block stays the
    session's own, and blocks of one session that differ stay different: where two of its agents begin differently,
    the later one's prefix ends there. A first prompt that names a block twice within its prefix has the first
    place's common block at both.

    Raises:
        ValueError: a negative number of tokens, sessions with different block sizes, or sessions whose ids mean
            the same in all of them already.
    """
    if min(tokens, agent_tokens) < 0:
        raise ValueError(f"a prefix of {min(tokens, agent_tokens)} tokens is none: use 0 for no prefix")
    block = 0
    fresh = count()
    common: dict[tuple[str, int], int] = {}
    for session in sessions:
        if session.shared_ids:
            raise ValueError(f"{session.name}: its ids are shared already: leave the prefix to the trace")
        if block not in (0, session.block_tokens):
            raise ValueError(
                f"{session.name}: blocks of {session.block_tokens} tokens beside some of {block}"
            )
        block = session.block_tokens
        names: dict[int, int] = {}
        firsts = [("session", session.turns[:1], tokens)]
        firsts += [("agent", agent.turns[:1], agent_tokens) for agent in session.agents]
        taken: set[int] = set()
        for kind, first, length in firsts:
            for place, one in enumerate(first[0].blocks[: length // block] if first else ()):
                if (kind, place) not in common:
                    common[kind, place] = next(fresh)
                if one not in names:
                    if common[kind, place] in taken:
                        break
                    names[one] = common[kind, place]
                    taken.add(names[one])
        yield _renamed(session, names, fresh)


def _renamed(session: Session, names: dict[int, int], fresh: Iterator[int]) -> Session:
    """Return the session with ids that no other has, but for those in `names`, which grows."""

    def turns(given: Sequence[Turn]) -> tuple[Turn, ...]:
        found = []
        for turn in given:
            for one in turn.blocks:
                if one not in names:
                    names[one] = next(fresh)
            found.append(replace(turn, blocks=tuple([names[one] for one in turn.blocks])))
        return tuple(found)

    own = turns(session.turns)
    agents = tuple(replace(agent, turns=turns(agent.turns)) for agent in session.agents)
    return replace(session, turns=own, agents=agents, shared_ids=True)
