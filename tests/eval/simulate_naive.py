"""The same caches counted block by block, with nothing in common with the simulator but the request's form.

One request at a time. Everything is a set of prefixes: a prefix of k pages is the tuple of their names. What may be
evicted is found anew for every victim by looking at all prefixes. Slow, and short enough to be checked by eye.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eval.simulate.jobs import Job

Prefix = tuple[int, ...]


def counted_without_limits(jobs: Sequence[Job], inside: Callable[[int, int, int], set[int]]) -> list[int]:
    """Restored pages of each request where nothing is ever evicted.

    `inside(restored, length in tokens, pages that had KV)` names the pages of the prompt after which a checkpoint is
    kept, beside its end and the answer's.
    """
    kv: set[Prefix] = set()
    states: set[Prefix] = set()
    found = []
    for job in jobs:
        usable = [n for n in range(1, (job.prompt_tokens - 1) // 64 + 1) if job.prompt[:n] in states]
        restored = max(usable, default=0)
        had = max((n for n in range(len(job.prompt) + 1) if job.prompt[:n] in kv), default=0)
        whole = job.prompt + job.answer
        kv |= {whole[:n] for n in range(1, len(whole) + 1)}
        keep = inside(restored, job.prompt_tokens, had) | {len(job.prompt), len(whole)}
        states |= {whole[:n] for n in keep if n > restored}
        found.append(restored)
    return found


class LruDevice:
    """One tier that KV and states share, least recently used first, checkpoints at the ends of prompt and answer.

    What goes: a checkpoint that KV goes on after goes alone; the end of a path goes with the KV that nothing else
    needs, back to the checkpoint before. The last use of the former is a hit at that very place, of the latter any
    request that had all of it.
    """

    def __init__(self, limit: int, page: int, state: int) -> None:
        self.limit, self.page, self.state = limit, page, state
        self.kv: dict[Prefix, int] = {}  # last use
        self.states: dict[Prefix, tuple[int, int]] = {}  # last use of its own, number
        self.reserved = 0
        self.locked: Prefix = ()
        self.now = 0
        self.number = 0

    def used(self) -> int:
        return len(self.kv) * self.page + len(self.states) * self.state + self.reserved

    def serve(self, job: Job) -> int:
        """Serve one request from its begin to its end; return the restored pages."""
        usable = [n for n in range(1, (job.prompt_tokens - 1) // 64 + 1) if job.prompt[:n] in self.states]
        restored = max(usable, default=0)
        self.locked = job.prompt[:restored]
        need = (-(-(job.prompt_tokens + job.output_tokens - 1) // 64) - restored) * self.page + self.state
        assert self.make_room(need)
        self.reserved = need
        self.now += 1
        if self.locked in self.states:  # it was copied before room was made, which may have cost it
            self.states[self.locked] = self.now, self.states[self.locked][1]
        self.compute(job.prompt)
        if len(job.prompt) > restored:
            self.keep(job.prompt)
        whole = job.prompt + job.answer
        self.compute(whole)
        self.reserved = 0
        if job.answer:
            self.keep(whole)
        self.locked = ()
        return restored

    def compute(self, pages: Prefix) -> None:
        for n in range(1, len(pages) + 1):
            if pages[:n] not in self.kv or n > len(self.locked):
                self.reserved -= self.page
            self.kv[pages[:n]] = self.now
        self.locked = pages

    def keep(self, place: Prefix) -> None:
        if place not in self.states and self.make_room(self.state):
            self.number += 1
            self.states[place] = self.now, self.number

    def make_room(self, need: int) -> bool:
        while self.used() + need > self.limit:
            going = self.victim()
            if going is None:
                return False
            kv, state = going
            for prefix in kv:
                del self.kv[prefix]
            if state is not None:
                del self.states[state]
        return True

    def victim(self) -> tuple[list[Prefix], Prefix | None] | None:
        parents: dict[Prefix, int] = {}
        for prefix in self.kv:
            parents[prefix[:-1]] = parents.get(prefix[:-1], 0) + 1
        units: list[tuple[tuple[int, int], list[Prefix], Prefix | None]] = []
        for place, (own, number) in self.states.items():
            if place in parents:
                units.append(((own, number), [], place))
        for leaf in self.kv:
            if leaf in parents or leaf == self.locked[: len(leaf)]:
                continue
            kv = [leaf]
            while len(kv[-1]) > 1 and kv[-1][:-1] not in self.states and parents[kv[-1][:-1]] == 1:
                kv.append(kv[-1][:-1])
            kv = [one for one in kv if one != self.locked[: len(one)]]
            state = leaf if leaf in self.states else None
            own, number = self.states.get(leaf, (0, 0))
            units.append(((max(own, self.kv[leaf]), number), kv, state))
        if not units:
            return None
        _, kv, state = min(units, key=lambda unit: unit[0])
        return kv, state
