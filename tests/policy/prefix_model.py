"""A second, naive model of the prefix tree and its eviction order, to hold the real one against.

It shares no code with the policy. Everything is stored per token and computed from scratch: a cost is a sum
over every trajectory and every hit position, an order is a sort of all units.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import log1p

DEVICE, HOST, SSD = 0, 1, 2


@dataclass
class Run:
    """A node: `used[i]` is the last request restored after at least i + 1 of its tokens."""

    parent: int
    used: list[int]
    born: int
    kv: set[int] = field(default_factory=set)
    cut: bool = False
    states: dict[int, set[int]] = field(default_factory=dict)
    state_born: dict[int, int] = field(default_factory=dict)
    state_used: dict[int, int] = field(default_factory=dict)


class Model:
    def __init__(self) -> None:
        self.runs: dict[int, Run] = {}
        self.clock = 0
        self.count = 0
        self.q = 0.5
        self.q16 = 8

    # changes

    def number(self) -> int:
        self.count += 1
        return self.count

    def add(self, node: int, parent: int, tokens: int) -> None:
        self.runs[node] = Run(parent, [self.clock] * tokens, self.number())

    def split(self, node: int, upper: int, tokens: int) -> None:
        low = self.runs[node]
        up = Run(low.parent, low.used[:tokens], self.number(), set(low.kv), cut=True)
        for name in ("states", "state_born", "state_used"):
            values = getattr(low, name)
            setattr(up, name, {o: v for o, v in values.items() if o <= tokens})
            setattr(low, name, {o - tokens: v for o, v in values.items() if o > tokens})
        low.parent, low.used = upper, low.used[tokens:]
        self.runs[upper] = up

    def remove(self, node: int) -> None:
        del self.runs[node]

    def set_kv(self, node: int, tier: int, present: bool) -> None:
        (self.runs[node].kv.add if present else self.runs[node].kv.discard)(tier)

    def set_checkpoint(self, node: int, offset: int, tier: int, present: bool) -> None:
        run = self.runs[node]
        if present:
            if offset not in run.states:
                run.states[offset] = set()
                run.state_born[offset] = self.number()
                run.state_used[offset] = self.clock
            run.states[offset].add(tier)
        elif offset in run.states:
            run.states[offset].discard(tier)
            if not run.states[offset]:
                for values in (run.states, run.state_born, run.state_used):
                    del values[offset]

    def touch(self, node: int, offset: int, now: int) -> None:
        self.clock = now
        if offset == 0 and node:
            node = self.runs[node].parent
            offset = len(self.runs[node].used) if node else 0
        first = True
        while node:
            run = self.runs[node]
            if first and offset in run.states:
                run.state_used[offset] = max(run.state_used[offset], now)
            for i in range(offset if first else len(run.used)):
                run.used[i] = now
            first, node = False, run.parent

    def keep(self, node: int, offset: int, until: int) -> None:
        run = self.runs[node]
        if offset in run.states:
            run.state_used[offset] = max(min(run.state_used[offset], self.clock), until)

    def forsake(self, node: int, start: int = 0) -> None:
        if self.children(node):
            return
        for n in reversed(self.path(node)):
            run, first = self.runs[n], self.start(n)
            kept = any(used > self.clock for used in run.state_used.values())
            if kept or (n != node and (run.cut or len(self.children(n)) > 1)):
                break
            run.used = [used if first + i < start else 0 for i, used in enumerate(run.used)]
            run.state_used = {at: used if first + at <= start else 0 for at, used in run.state_used.items()}
            if first < start:
                break

    def observe_hit(self, node: int, offset: int) -> None:
        if not node:
            return
        at_end = any(self.path_states(leaf)[-1:] == [(node, offset)] for leaf in self.leaves())
        self.q += (float(at_end) - self.q) / 512
        if abs(self.q - self.q16 / 16) >= 1 / 16:
            self.q16 = round(self.q * 16)

    # shape

    def children(self, node: int) -> list[int]:
        return [n for n, run in self.runs.items() if run.parent == node]

    def leaves(self) -> list[int]:
        parents = {run.parent for run in self.runs.values()}
        return [n for n in self.runs if n not in parents]

    def path(self, node: int) -> list[int]:
        nodes: list[int] = []
        while node:
            nodes.insert(0, node)
            node = self.runs[node].parent
        return nodes

    def start(self, node: int) -> int:
        return sum(len(self.runs[n].used) for n in self.path(node)[:-1])

    def path_states(self, node: int) -> list[tuple[int, int]]:
        return [(n, o) for n in self.path(node) for o in sorted(self.runs[n].states)]

    # costs

    def costs(self) -> dict[tuple[int, int], tuple[Fraction, Fraction]]:
        """C of every checkpoint: (with weights rounded to 2**-40, exact)."""
        found = {(n, o): (Fraction(0), Fraction(0)) for n, run in self.runs.items() for o in run.states}
        q = Fraction(self.q16, 16)
        for leaf in self.leaves():
            length = self.start(leaf) + len(self.runs[leaf].used)
            states = self.path_states(leaf)
            places = [self.start(n) + o for n, o in states]
            rounded = Fraction(int(Fraction(2**40, length) + Fraction(1, 2)), 2**40)
            for hit in range(length):
                serving = sum(place <= hit for place in places)
                if serving:
                    before = places[serving - 2] if serving > 1 else 0
                    lost = (1 - q) * (places[serving - 1] - before)
                    old = found[states[serving - 1]]
                    found[states[serving - 1]] = (old[0] + lost * rounded, old[1] + lost / length)
            if states:
                lost = q * (places[-1] - (places[-2] if len(places) > 1 else 0))
                old = found[states[-1]]
                found[states[-1]] = (old[0] + lost, old[1] + lost)
        return found

    # order

    def ranked(
        self,
        tier: int,
        state_bytes: int,
        kv_bytes: int,
        measure: int,
        tau: float,
        mode: str,
        costs: dict[tuple[int, int], tuple[Fraction, Fraction]],
    ) -> list[tuple]:
        """All units, lowest score first: (score, birth, kind, checkpoint, state, nodes, cut, bytes, C, t)."""
        units = []
        in_bundle = set()
        for leaf, run in self.runs.items():
            if tier not in run.kv or any(tier in self.runs[c].kv for c in self.children(leaf)):
                continue
            end = self.start(leaf) + len(run.used)
            mark = (leaf, len(run.used)) if len(run.used) in run.states else None
            limit = max([0] + [p for n, o in self.path_states(leaf) if (p := self.start(n) + o) < end])
            nodes: list[int] = []
            tokens, cut = 0, None
            node = leaf
            while node and tier in self.runs[node].kv:
                sharers = [c for c in self.children(node) if tier in self.runs[c].kv]
                keep = sum(self.start(node) + i >= limit for i in range(len(self.runs[node].used)))
                if len(sharers) > 1 or not keep:
                    break
                nodes.append(node)
                tokens += keep
                if keep < len(self.runs[node].used):
                    cut = (node, len(self.runs[node].used) - keep)
                node = self.runs[node].parent
            has_state = mark is not None and tier in run.states[mark[1]]
            if mark:
                in_bundle.add(mark)
            freed = tokens * kv_bytes + (state_bytes if has_state else 0)
            accessed = run.used[-1]
            if mark:
                own = run.state_used[mark[1]]
                accessed = own if mode == "lru" and not kv_bytes else max(own, accessed)
            born = run.state_born[mark[1]] if mark else run.born
            units.append((born, "bundle", mark, has_state, tuple(nodes), cut, freed, accessed))
        for n, run in self.runs.items():
            for o, tiers in run.states.items():
                if tier in tiers and (n, o) not in in_bundle:
                    own = run.state_used[o]
                    accessed = own if mode == "lru" else max(own, run.used[o - 1])
                    units.append(
                        (run.state_born[o], "intermediate", (n, o), True, (), None, state_bytes, accessed)
                    )
        ranked = []
        for born, kind, mark, has_state, gone, cut, freed, accessed in units:
            if not freed:
                continue
            cost = costs[mark][0] if mark else Fraction(0)
            score = float(accessed)
            if mode == "score":
                score += tau * float(cost * measure / freed)
            elif mode == "loss":
                score += tau * log1p(1000 * float(cost * measure / freed))
            ranked.append((score, born, kind, mark, has_state, gone, cut, freed, float(cost), accessed))
        return sorted(ranked, key=lambda unit: unit[:2])
