"""What is sent: the prompt and the recorded answer of every turn, and what an infinite cache would reuse of it.

Prompts are those of `Scaling`, with one addition: what follows the last whole block has no id in a trace, yet a
session that goes on keeps it. So where the next prompt of the same list keeps all whole blocks of a prompt and is
no shorter, the rest of the shorter one has the tokens that the longer one has there.

An answer's tokens are those that follow the prompt in the next prompt of the same list, if that extends it. Where it
grows by less than the answer (one turn in ten: a part was dropped) the answer's first tokens are taken to be the kept
ones: a trace does not tell which. The tokens that no later prompt has are drawn from a checksum.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from zlib import crc32

from eval.workloads.order import closed_loop
from eval.workloads.scaling import Scaling
from eval.workloads.sessions import Session, Turn

PAGE = 64

Key = tuple[str, str, int]


@dataclass(frozen=True)
class Request:
    """One turn. `gap_s` is the pause before it as replayed; `output` the recorded answer; lengths are tokens.

    `reusable`: prompt tokens that a cache which loses nothing and can resume at every page would not compute again.
    `rewrite`: the prompt drops a whole block of the one before it in its list. The other fields are the record's.
    """

    session: str
    agent: str
    turn: int
    prompt: array[int]
    output: array[int]
    gap_s: float
    reusable: int
    rewrite: bool

    @property
    def key(self) -> Key:
        return self.session, self.agent, self.turn


@dataclass(frozen=True)
class AgentRequests:
    """A sub-agent's turns. It starts `delay_s` after the end of turn number `after` of its parent (-1: at once)."""

    name: str
    after: int
    delay_s: float
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class SessionRequests:
    """A session's own turns and those of the agents that it waits for."""

    name: str
    requests: tuple[Request, ...]
    agents: tuple[AgentRequests, ...] = ()

    def all_requests(self) -> Iterator[Request]:
        yield from self.requests
        for agent in self.agents:
            yield from agent.requests


@dataclass(frozen=True)
class Shape:
    """How recorded sessions become requests.

    Every block becomes `tokens_per_block` tokens, ids from `first_id` to `first_id + vocabulary - 1`; answers have at
    most `most_output` tokens. Pauses are cut to `longest_gap_s`, then multiplied by `time_scale`. `live` and the cut
    give the order by which `reusable` is counted. `recorded_outputs`: the server says what was recorded, so that later
    prompts match its answers; else only prompts are reusable.
    """

    tokens_per_block: int
    vocabulary: int = 256
    first_id: int = 0
    most_output: int = 1 << 30
    longest_gap_s: float = 60.0
    time_scale: float | None = None
    live: int = 24
    recorded_outputs: bool = True

    def scale_of_tokens(self, session: Session) -> float:
        """Return how many tokens are sent for a recorded one."""
        return self.tokens_per_block / session.block_tokens

    def scale_of_time(self, session: Session) -> float:
        return self.scale_of_tokens(session) if self.time_scale is None else self.time_scale

    def pause_s(self, recorded_s: float, session: Session) -> float:
        return min(recorded_s, self.longest_gap_s) * self.scale_of_time(session)


def build(sessions: Sequence[Session], shape: Shape) -> list[SessionRequests]:
    """Return the requests of every session, in the order given. The same arguments give the same requests.

    Raises:
        ValueError: two sessions, or two agents of one, have the same name, or see `Scaling` and `closed_loop`.
    """
    scaling = Scaling(shape.tokens_per_block, shape.vocabulary, PAGE)
    texts: dict[Key, tuple[array[int], array[int]]] = {}
    for session in sessions:
        for agent, turns in _lists(session):
            for index, text in enumerate(_texts(scaling, session, agent, turns, shape)):
                key = session.name, agent, index
                if key in texts:
                    raise ValueError(
                        f"two lists of turns are called {session.name!r} {agent!r}: names tell them apart"
                    )
                texts[key] = text
    reusable = _reusable(sessions, texts, shape)

    def requests(session: Session, agent: str, turns: Sequence[Turn]) -> tuple[Request, ...]:
        made = []
        for index, turn in enumerate(turns):
            before = turns[index - 1].blocks if index else ()
            gap_s = shape.pause_s(turn.gap_s, session) if index else 0.0
            key = session.name, agent, index
            rewrite = turn.blocks[: len(before)] != before
            made.append(Request(*key, *texts[key], gap_s, reusable[key], rewrite))
        return tuple(made)

    return [
        SessionRequests(
            session.name,
            requests(session, "", session.turns),
            tuple(
                AgentRequests(
                    agent.name,
                    agent.after,
                    shape.pause_s(agent.delay_s, session),
                    requests(session, agent.name, agent.turns),
                )
                for agent in session.agents
            ),
        )
        for session in sessions
    ]


def digest(sessions: Iterable[SessionRequests]) -> str:
    """Return twelve hex digits that differ where any token, pause, bound or name differs."""
    hasher = sha256()
    for session in sessions:
        for agent in session.agents:
            hasher.update(repr((session.name, agent.name, agent.after, agent.delay_s)).encode())
        for request in session.all_requests():
            hasher.update(repr((request.key, request.gap_s, request.reusable, request.rewrite)).encode())
            hasher.update(request.prompt.tobytes() + b"/" + request.output.tobytes())
    return hasher.hexdigest()[:12]


def working_set(sessions: Iterable[SessionRequests], outputs: bool = True) -> int:
    """Return how many tokens the different pages of all prompts (and answers) have."""
    pages = _Pages()
    for session in sessions:
        for request in session.all_requests():
            pages.add(request.prompt + request.output[:-1] if outputs else request.prompt)
    return PAGE * len(pages)


def _lists(session: Session) -> Iterator[tuple[str, Sequence[Turn]]]:
    yield "", session.turns
    for agent in session.agents:
        yield agent.name, agent.turns


def _texts(
    scaling: Scaling, session: Session, agent: str, turns: Sequence[Turn], shape: Shape
) -> list[tuple[array[int], array[int]]]:
    """Return the prompt and the answer of each turn of one list."""
    code = "H" if shape.first_id + shape.vocabulary <= 1 << 16 else "I"
    scaled = [scaling.prompt(session, turn) for turn in turns]
    prompts = [array(code, (shape.first_id + token for token in prompt.tokens)) for prompt in scaled]
    for index in range(
        len(prompts) - 2, -1, -1
    ):  # from the end: a rest may reach into the next prompt's rest
        this, following = prompts[index], prompts[index + 1]
        whole = len(turns[index].blocks) * shape.tokens_per_block
        if len(following) >= len(this) and following[:whole] == this[:whole]:
            this[whole:] = following[whole : len(this)]
    found = []
    for index, (turn, prompt) in enumerate(zip(turns, prompts, strict=True)):
        length = scaling.output_tokens(session, turn, shape.most_output)
        output = array(code)
        if index + 1 < len(prompts) and prompts[index + 1][: len(prompt)] == prompt:
            output = prompts[index + 1][len(prompt) : len(prompt) + length]
        place = f"{session.name}/{agent}/{index}"
        output.extend(
            shape.first_id + crc32(f"{place}/{number}".encode()) % shape.vocabulary
            for number in range(len(output), length)
        )
        found.append((prompt, output))
    return found


def _reusable(
    sessions: Sequence[Session], texts: dict[Key, tuple[array[int], array[int]]], shape: Shape
) -> dict[Key, int]:
    """Return the bound of every request, in the order of a closed loop with the recorded times.

    A prompt's last token is computed in any case. The last token of an answer is never read by the model, so no
    cache has its KV.
    """
    pages = _Pages()
    found = {}
    for step in closed_loop(sessions, shape.live, shape.longest_gap_s):
        key = step.session.name, step.agent, step.index
        prompt, output = texts[key]
        found[key] = min(pages.known(prompt), (len(prompt) - 1) // PAGE * PAGE)
        pages.add(prompt + output[:-1] if shape.recorded_outputs else prompt)
    return found


class _Pages:
    """Whole pages seen so far, each by all tokens before it."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, bytes], int] = {}

    def __len__(self) -> int:
        return len(self._names)

    def add(self, text: array[int]) -> None:
        at = 0
        for start in range(0, len(text) - PAGE + 1, PAGE):
            at = self._names.setdefault((at, text[start : start + PAGE].tobytes()), len(self._names) + 1)

    def known(self, text: array[int]) -> int:
        """Return how many tokens of `text`, in whole pages, were seen."""
        at = 0
        for start in range(0, len(text) - PAGE + 1, PAGE):
            found = self._names.get((at, text[start : start + PAGE].tobytes()))
            if found is None:
                return start
            at = found
        return len(text) // PAGE * PAGE
