"""The two ends of the scale: a cache that never forgets, and none."""

from __future__ import annotations

from typing import Any

from eval.simulate.budgets import Budgets, Space
from eval.simulate.costs import PAGE_TOKENS, Costs
from eval.simulate.jobs import Job, Pages
from eval.simulate.radix import RadixTree
from eval.simulate.system import Admission, Visit


class Infinite:
    """All KV and a checkpoint after every page, on a device without a limit: what no cache can exceed."""

    chunk_tokens = PAGE_TOKENS
    tail_tokens = 0

    def __init__(self) -> None:
        self.computed_so_far = RadixTree()

    def arrive(self, job: Job, now_s: float) -> Visit:
        return Visit(job)

    def ready(self, visit: Visit, now_s: float) -> bool:
        return True

    def reusable(self, job: Job) -> int:
        """Return the tokens of a prompt that were computed before and need not be again."""
        pages = sum(matched for _, matched in self.computed_so_far.match(job.prompt))
        return min(pages, job.most_restored) * PAGE_TOKENS

    def admit(self, visit: Visit, now_s: float) -> Admission | None:
        tokens = self.reusable(visit.job)
        return Admission({"device": tokens, "host": 0, "ssd": 0}, "device" if tokens else "", tokens, now_s)

    def computed(self, visit: Visit, tokens: int, now_s: float) -> None:
        self._extend(visit, visit.job.prompt, tokens // PAGE_TOKENS)

    def finish(self, visit: Visit, now_s: float) -> None:
        pages = visit.job.pages
        self._extend(visit, pages, len(pages))

    def _extend(self, visit: Visit, pages: Pages, end: int) -> None:
        # Nothing is ever removed, and a split leaves a run's end where it was: go on where the request has come to.
        for run in self.computed_so_far.extend(visit.run or self.computed_so_far.root, pages, end):
            visit.run = run

    def facts(self) -> dict[str, Any]:
        return {"ssd_written_bytes": 0}


class NoCache:
    """Computes every prompt. The device's memory limits how many requests run, as everywhere."""

    chunk_tokens = PAGE_TOKENS
    tail_tokens = 0

    def __init__(self, costs: Costs, budgets: Budgets) -> None:
        self._costs = costs
        self._device = Space("device", budgets.device_bytes)

    def arrive(self, job: Job, now_s: float) -> Visit:
        return Visit(job)

    def ready(self, visit: Visit, now_s: float) -> bool:
        return True

    def admit(self, visit: Visit, now_s: float) -> Admission | None:
        need = visit.job.room_pages * self._costs.page_bytes
        if need + self._costs.state_bytes > self._device.free:
            return None
        visit.room = need, self._costs.state_bytes
        self._device.take(sum(visit.room))
        return Admission({"device": 0, "host": 0, "ssd": 0}, "", 0, now_s)

    def computed(self, visit: Visit, tokens: int, now_s: float) -> None:
        """Nothing is kept."""

    def finish(self, visit: Visit, now_s: float) -> None:
        self._device.take(-sum(visit.room))

    def facts(self) -> dict[str, Any]:
        return {
            "ssd_written_bytes": 0,
            "budget_bytes": {"device": self._device.limit},
            "peak_bytes": {"device": self._device.peak},
        }
