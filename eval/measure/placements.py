"""Where four ways of taking checkpoints would have resumed each request of a log, every tier unlimited.

- `TURN_ENDS`: one at the end of every prompt. Stock prefix caches of hybrid models do this or a little less.
- `BRANCH_POINTS`: also where a request's KV went on but no checkpoint did, once it has passed there: the second
  prompt that parts at a place finds one.
- `HISTATE`: also inside what is computed, at the intervals of `sglang_histate.policy`, with equal residence times
  (pressure 1) because nothing is ever evicted here.
- `EVERY_PAGE`: the bound. All KV that matches can be used.

Answers are not part of the paths: what a later prompt has of them is counted as new there, for all four alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from eval.measure.paths import Tree, in_order, page_keys, page_tokens
from eval.progress import each
from eval.workloads.sessions import Session
from sglang_histate.policy.capture_plan import plan_positions
from sglang_histate.policy.interval import IntervalPolicy


class Placement(Enum):
    """Ways of taking checkpoints, see the module."""

    TURN_ENDS = "turn ends"
    BRANCH_POINTS = "turn ends and branch points"
    HISTATE = "HiState"
    EVERY_PAGE = "every page (bound)"


@dataclass(frozen=True)
class Outcome:
    """One request, in tokens, positions counted from the prompt's start.

    `page`: the unit of all the others but `prompt`. `match`: how far KV of earlier prompts goes, less than the
    prompt, because its last token is computed in any case. `restored`: where each placement resumes. `turn_end`:
    where the turn that first had the match's last page ended, `match` itself or beyond it; 0 without a match.
    `new_pages`: pages no earlier prompt had. `checkpoints`: those the request added, by placement. `newest`: the end
    of the path that the request continues, where no prompt had gone on; 0 where one had.
    """

    session: str
    prompt: int
    page: int
    match: int
    restored: dict[Placement, int]
    turn_end: int
    new_pages: int
    checkpoints: dict[Placement, int]
    newest: int

    @property
    def internal(self) -> bool:
        """Whether KV matches to a point that is no turn's end."""
        return self.match > self.restored[Placement.TURN_ENDS]

    def computed(self, placement: Placement) -> int:
        """Prompt tokens that the placement computes."""
        return self.prompt - self.restored[placement]

    def again(self, placement: Placement) -> int:
        """Those of them whose KV is there."""
        return self.match - self.restored[placement]


_KEEPING = (Placement.TURN_ENDS, Placement.BRANCH_POINTS, Placement.HISTATE)


def outcomes(sessions: Iterable[Session], interval: IntervalPolicy, state_tokens: float) -> Iterator[Outcome]:
    """Yield the outcome of every request in the order of `paths.in_order`.

    `state_tokens`: a checkpoint's bytes in tokens of KV.

    Raises:
        ValueError: sessions of different block sizes that share ids; what the policy and the loaders say.
    """
    tree, held = Tree(), _Held()
    page = 0
    for sent in each(in_order(sessions), "measure", "request"):
        if sent.anew:
            tree, held = Tree(), _Held()
            page = page_tokens(sent.session)
        elif page != page_tokens(sent.session):
            raise ValueError(
                f"{sent.session.name}: blocks of {sent.session.block_tokens} tokens share ids with others"
            )
        path, known, ended = tree.add(page_keys(sent.session, sent.turn))
        prompt = sent.turn.input_tokens
        match = min(known, (prompt - 1) // page)
        restored = {one: held.deepest(one, path, match) for one in _KEEPING}
        restored[Placement.EVERY_PAGE] = match
        added = dict.fromkeys(Placement, 0)
        for one in _KEEPING:
            positions = {len(path)}
            if one is not Placement.TURN_ENDS:
                positions.add(match)
            if one is Placement.HISTATE:
                positions.add((prompt - 1) // page)  # for the same prompt again, its last token computed anew
                start = restored[one] * page
                chosen = interval.choose(prompt - start, state_tokens)
                positions.update(at // page for at in plan_positions(start, prompt, chosen, page))
            added[one] = held.keep(one, path, positions)
        added[Placement.EVERY_PAGE] = len(path) - known
        yield Outcome(
            sent.session.name,
            prompt,
            page,
            match * page,
            {one: pages * page for one, pages in restored.items()},
            max(tree.turn_end[path[match - 1]], match) * page if match else 0,
            len(path) - known,
            added,
            known * page if ended else 0,
        )


class _Held:
    """The nodes that have a checkpoint, by placement."""

    def __init__(self) -> None:
        self._nodes: dict[Placement, set[int]] = {one: set() for one in _KEEPING}

    def deepest(self, placement: Placement, path: Sequence[int], most: int) -> int:
        """Return how many pages the deepest checkpoint within the first `most` has read, 0 for none."""
        nodes = self._nodes[placement]
        while most and path[most - 1] not in nodes:
            most -= 1
        return most

    def keep(self, placement: Placement, path: Sequence[int], positions: Iterable[int]) -> int:
        """Add checkpoints after so many pages of the path and return how many were not there."""
        nodes = self._nodes[placement]
        before = len(nodes)
        nodes.update(path[at - 1] for at in positions if at)
        return len(nodes) - before
