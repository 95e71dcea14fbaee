"""The requests of one comparison: which sessions, in which order, with which tokens, and what of them is reusable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eval.workloads.order import closed_loop
from eval.workloads.scaling import Scaling
from eval.workloads.sessions import Session

PAGE = 64
VOCABULARY = 256  # the demo model's bytes: every id a single token, none of them special


@dataclass(frozen=True)
class Request:
    """One prompt. `reusable` is what an infinite cache would not compute again, in whole pages.

    `pages[i]` names the first i + 1 pages: equal names, equal tokens.
    """

    session: str
    tokens: list[int]
    pages: tuple[int, ...]
    output_tokens: int
    reusable: int


def choose(sessions: Iterable[Session], count: int, context_tokens: int, turns: int) -> list[Session]:
    """Return the first `count` sessions that have three turns or more once they are cut, cut so."""
    chosen: list[Session] = []
    for session in sessions:
        if len(chosen) == count:
            break
        kept = session.cut(context_tokens, turns)
        if len(kept.turns) >= 3:
            chosen.append(kept)
    return chosen


def requests_of(
    sessions: Sequence[Session],
    *,
    live: int,
    longest_gap_s: float,
    tokens_per_block: int,
    most_output: int,
) -> list[Request]:
    """Return the requests in the order they are sent.

    A cache that loses nothing and can resume at every page has all pages of all earlier prompts; a prompt's
    last token is computed in any case. Outputs are not part of later prompts: those have the recorded tokens.

    Raises:
        ValueError: see `Scaling` and `closed_loop`.
    """
    scaling = Scaling(tokens_per_block, VOCABULARY, PAGE)
    seen: set[int] = set()
    requests = []
    blocks_per_page = PAGE // tokens_per_block
    for step in closed_loop(sessions, live, longest_gap_s):
        prompt = scaling.prompt(step.session, step.turn)
        pages = prompt.prefixes[blocks_per_page - 1 :: blocks_per_page]
        known = next((index for index, name in enumerate(pages) if name not in seen), len(pages))
        reusable = min(known, (len(prompt.tokens) - 1) // PAGE) * PAGE
        seen.update(pages)
        output = scaling.output_tokens(step.session, step.turn, most_output)
        requests.append(Request(step.session.name, prompt.tokens, pages, output, reusable))
    return requests


def working_set(requests: Sequence[Request]) -> int:
    """Return how many tokens of different pages there are."""
    return PAGE * len({name for request in requests for name in request.pages})
