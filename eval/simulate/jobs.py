"""Requests as lists of pages: what a prompt has in common with others, and what its answer leaves.

A page is 64 tokens with a name; two prompts whose names begin alike begin with the same text. Blocks of a trace
become pages: smaller ones are joined, larger ones cut. What is left of a prompt after its last whole page is
shared with nobody.

A trace names the blocks of prompts only. The pages that an answer completes get their names from the next prompt
of the same list if that prompt keeps the answer: its pages begin with all of this one's, and it is at least as
long as prompt and answer. Otherwise (part of the answer was dropped, as thinking is, or the list ends or went
back) they are pages that nobody asks for. So are those that the next prompt is too short to name. The last
token of an answer is never computed and completes no page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.simulate.costs import PAGE_TOKENS
from eval.workloads.sessions import Session, Turn, common

Pages = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """One request. `prompt` are its whole pages, `answer` those that the answer completes after them.

    `rewrite`: whether the prompt does not begin with all whole pages of the previous one of its list.
    """

    session: str
    agent: str
    turn: int
    prompt: Pages
    answer: Pages
    prompt_tokens: int
    output_tokens: int
    rewrite: bool

    @property
    def pages(self) -> Pages:
        """All pages that the request leaves."""
        return self.prompt + self.answer

    @property
    def total_tokens(self) -> int:
        """Tokens that are computed or restored: the answer's last one is not."""
        return self.prompt_tokens + self.output_tokens - 1

    @property
    def room_pages(self) -> int:
        """Pages that it fills on the device until it ends, the last one maybe in part."""
        return -(-self.total_tokens // PAGE_TOKENS)

    @property
    def most_restored(self) -> int:
        """Pages that may be restored: at least one token of a prompt is always computed."""
        return (self.prompt_tokens - 1) // PAGE_TOKENS


class Naming:
    """Names of pages, the same for all sessions of a workload."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, tuple[int, ...]], int] = {}
        self._fresh = 0

    def jobs(self, session: Session, agent: str, turns: Sequence[Turn]) -> list[Job]:
        """Return the requests of one list of turns, in order.

        Raises:
            ValueError: the block size is neither a multiple nor a divisor of a page.
        """
        named = [self._named(session, turn) for turn in turns]
        prompts = [self._prompt(pages, turn) for pages, turn in zip(named, turns, strict=True)]
        jobs = []
        for index, turn in enumerate(turns):
            output = max(turn.output_tokens, 1)
            following = index + 1 if index + 1 < len(turns) else None
            count = (turn.input_tokens + output - 1) // PAGE_TOKENS - len(prompts[index])
            kept: Pages = ()
            if following is not None and turns[following].input_tokens >= turn.input_tokens + output:
                begins = common(prompts[index], prompts[following])
                if begins == len(prompts[index]):
                    kept = named[following][begins : begins + count]
            answer = (*kept, *(self._new() for _ in range(count - len(kept))))
            rewrite = bool(index) and common(prompts[index - 1], prompts[index]) < len(prompts[index - 1])
            jobs.append(
                Job(
                    session.name,
                    agent,
                    index,
                    prompts[index],
                    answer,
                    turn.input_tokens,
                    output,
                    rewrite,
                )
            )
        return jobs

    def _named(self, session: Session, turn: Turn) -> Pages:
        size, blocks = session.block_tokens, turn.blocks
        scope = "" if session.shared_ids else session.name
        if size <= PAGE_TOKENS and not PAGE_TOKENS % size:
            each = PAGE_TOKENS // size
            whole = len(blocks) // each * each
            return tuple(self._name(scope, blocks[at : at + each]) for at in range(0, whole, each))
        if not size % PAGE_TOKENS:
            parts = range(size // PAGE_TOKENS)
            return tuple(self._name(scope, (block, part)) for block in blocks for part in parts)
        raise ValueError(
            f"session {session.name}: blocks of {size} tokens neither divide a page of {PAGE_TOKENS} nor are made of pages"
        )

    def _prompt(self, named: Pages, turn: Turn) -> Pages:
        missing = turn.input_tokens // PAGE_TOKENS - len(named)
        return (*named, *(self._new() for _ in range(missing)))

    def _name(self, scope: str, content: tuple[int, ...]) -> int:
        found = self._names.get((scope, content))
        if found is None:
            found = self._names[scope, content] = self._new()
        return found

    def _new(self) -> int:
        self._fresh += 1
        return self._fresh
