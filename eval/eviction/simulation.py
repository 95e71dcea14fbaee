"""Three tiers without a server: which pages and checkpoints a ranking keeps, request by request.

Drives `sglang_histate.policy` (tree, queues, intervals, residence) as the adapter does, and does the copying
that SGLang and the store do, as far as it decides what is cached:

- A request resumes at the deepest checkpoint, of any tier, below which device or host has all KV. The KV and
  that checkpoint come to the device; the rest of the prompt is computed.
- Its last whole page gets a checkpoint on the device and on the SSD, the positions of the interval policy get
  one on the SSD, and so does the place where its KV, but no checkpoint, went on.
- KV is copied to the host at once (write-through). What the device evicts stays there; what the host evicts is
  gone, with its checkpoints on the SSD. The host evicts nothing that the device has.
- The host keeps no states: they only pass through.
- An answer that completes a page adds one that no prompt has, with a checkpoint at its end on device and SSD.

No time passes but the policy's clock, one tick a request; requests do not overlap and every write has ended
before the next one. Nothing is random: equal requests, equal results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.eviction.budgets import Budgets, Units
from eval.eviction.requests import PAGE, Request
from eval.eviction.tiers import Tiers
from sglang_histate.policy.capture_plan import plan_positions
from sglang_histate.policy.interval import parse_interval
from sglang_histate.policy.score import Eviction


@dataclass(frozen=True)
class Outcome:
    """Of one request, in tokens. `with_kv`: computed although their KV was there, for want of a checkpoint."""

    prompt: int
    cached: int
    with_kv: int


class Simulation:
    """One run, with the server's adaptive intervals."""

    def __init__(self, budgets: Budgets, units: Units, mode: Eviction, tau: float) -> None:
        self.tiers = Tiers(budgets, units, mode, tau)
        self._units = units
        self._interval = parse_interval("adaptive")
        self._answers = 0  # names of pages that end in an answer are negative

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        return [self.serve(request) for request in requests]

    def serve(self, request: Request) -> Outcome:
        """Serve one request and leave everything as it is when its writes have ended.

        Raises:
            ValueError: the prompt alone does not fit the device.
        """
        tiers, pages, total = self.tiers, request.pages, len(request.tokens)
        if len(pages) > tiers.limit.device_pages:
            raise ValueError(
                f"a prompt of {total} tokens does not fit a device of {tiers.limit.device_pages * PAGE}"
            )
        covered, resumed = self._match(pages, (total - 1) // PAGE)
        tiers.locked = frozenset(pages)
        tiers.busy = frozenset((*pages[-1:], *pages[resumed - 1 : resumed]))
        tiers.now += 1
        node = pages[resumed - 1] if resumed else tiers.tree.root
        if resumed:
            tiers.tree.observe_hit(node, PAGE)
        tiers.tree.touch(node, PAGE if resumed else 0, tiers.now)
        if resumed:
            tiers.place_state(node)
        for index, page in enumerate(pages):
            tiers.place_kv(page, pages[index - 1] if index else tiers.tree.root)
        if pages:
            tiers.tree.touch(pages[-1], PAGE, tiers.now)
        for position in self._captures(resumed * PAGE, total, covered * PAGE):
            tiers.store(pages[position // PAGE - 1])
        if pages:
            tiers.place_state(pages[-1])
        tiers.back_up(pages)
        self._finish(request)
        tiers.locked = tiers.busy = frozenset()
        with_kv = max(min(covered, (total - 1) // PAGE) - resumed, 0) * PAGE
        return Outcome(total, resumed * PAGE, with_kv)

    def _finish(self, request: Request) -> None:
        """Cache the answer where it completes a page: one more page, with the checkpoint at its end."""
        tiers, pages = self.tiers, request.pages
        cached = len(request.tokens) + request.output_tokens - 1  # the last token is never computed
        if cached // PAGE == len(pages):
            return
        self._answers -= 1
        page = self._answers
        tiers.locked, tiers.busy = frozenset((*pages, page)), frozenset((page,))
        tiers.place_kv(page, pages[-1] if pages else tiers.tree.root)
        tiers.tree.touch(page, PAGE, tiers.now)
        tiers.place_state(page)
        tiers.store(page)
        tiers.back_up([page])

    def _match(self, pages: Sequence[int], most: int) -> tuple[int, int]:
        """Return how many pages have KV, and how many of them, at most `most`, the deepest checkpoint has read."""
        covered = resumed = 0
        for index, page in enumerate(pages, 1):
            if not self.tiers.has_kv(page):
                break
            covered = index
            if index <= most and self.tiers.tree.checkpoints(page):
                resumed = index
        return covered, resumed

    def _captures(self, start: int, total: int, covered: int) -> list[int]:
        """Return the positions that the server's capture plan would take, ascending."""
        state_tokens = self._units.checkpoint / self._units.kv_token
        interval = self._interval.choose(total - start, state_tokens, self.tiers.pressure())
        positions = set(plan_positions(start, total, interval, PAGE))
        positions |= {total // PAGE * PAGE, (total - 1) // PAGE * PAGE, covered}
        return sorted(position for position in positions if start < position <= total)
