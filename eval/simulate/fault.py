"""Reading from the SSD to the host for a request that waits: one checkpoint, and KV before it that only the SSD has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eval.simulate.radix import Run, State
from eval.simulate.system import Visit
from sglang_histate.policy.prefix_nodes import CACHED, Tier

if TYPE_CHECKING:
    from eval.simulate.tiered import Tiered

ANY = CACHED | 1 << Tier.SSD
MOST_READS = 3
"""For one request, as on the server: what was on the host when it came may be gone when its turn has come."""


class Fault:
    """One read. `run` ends at the checkpoint. Its path is locked on the host until the last of `holders` is admitted."""

    def __init__(self, state: State, run: Run, pages: int, reads_state: bool, room: tuple[int, int]) -> None:
        self.state = state
        self.run = run
        self.pages = pages
        self.reads_state = reads_state
        self.room = room  # reserved on the host: KV, states
        self.abandoned = False  # past the deadline: nobody waits for it any more
        self.waiting: list[Visit] = []
        self.holders: list[Visit] = []
        self.ended = False


class Faults:
    """All reads of one system."""

    def __init__(self, system: Tiered) -> None:
        self._system = system
        self._by_state: dict[State, Fault] = {}
        self._abandoned = 0  # reads under way that are
        self.late = 0
        """Requests that went on without what they waited for."""
        self.no_room = 0
        """Reads that were not begun because the host had no room for them."""

    def look(self, visit: Visit) -> None:
        """Begin to read what the request would gain from, or join the read that is under way.

        While a read is past its deadline, nothing new is read.
        """
        if self._abandoned:
            return
        contents, job = self._system.contents, visit.job
        path = contents.match(job.prompt)
        reach = min(contents.covered(path, ANY), job.most_restored)
        found = contents.deepest_state(path, reach, ANY)
        if found is None:
            return
        run, at = found
        near = contents.deepest_state(path, min(contents.covered(path, CACHED), job.most_restored), CACHED)
        resumed = 0 if near is None else near[0].start + near[1]
        if run.start + at - resumed < self._system.least_gain_pages:
            return
        state = run.states[at]
        fault = self._by_state.get(state)
        if fault is None and visit.reads < MOST_READS:
            fault = self._begin(run, state)
        if fault is None:
            return
        fault.waiting.append(visit)
        visit.waits = fault
        visit.reads += 1

    def release(self, visit: Visit) -> None:
        """The request is admitted: what was read for it needs no lock of its own any more."""
        fault, visit.holds = visit.holds, None
        if fault is not None:
            fault.holders.remove(visit)
            if not fault.holders:
                self._unlock(fault)

    def _begin(self, run: Run, state: State) -> Fault | None:
        system, contents = self._system, self._system.contents
        if state.page < len(run.pages) and not run.kv & CACHED:
            run = contents.split(run, state.page)
        missing = [one for one in run.path() if not one.kv & CACHED]
        reads_state = not state.tiers & CACHED
        kv_bytes = sum(contents.kv_bytes(one) for one in missing)
        state_bytes = contents.state_bytes if reads_state else 0
        for one in run.path():
            one.host_locks += 1
        fault = Fault(
            state, run, sum(len(one.pages) for one in missing), reads_state, (kv_bytes, state_bytes)
        )
        if not system.make_room(Tier.HOST, kv_bytes, state_bytes):
            self._unlock(fault)
            self.no_room += 1
            return None
        contents.kv_space[Tier.HOST].take(kv_bytes)
        contents.state_space[Tier.HOST].take(state_bytes)
        self._by_state[state] = fault
        read_bytes = kv_bytes + (contents.ssd_state_bytes if reads_state else 0)
        end_s = system.links.ssd_read.send(system.now_s, read_bytes)
        system.schedule(end_s, lambda now_s: self._end(fault, now_s))
        if system.read_deadline_s is not None and end_s > system.now_s + system.read_deadline_s:
            system.schedule(system.now_s + system.read_deadline_s, lambda _: self._abandon(fault))
        return fault

    def _end(self, fault: Fault, now_s: float) -> None:
        """Everything is read: give it to the tree, from the top down, and let the requests go on."""
        system, contents, state = self._system, self._system.contents, fault.state
        system.now_s = now_s
        fault.ended = True
        del self._by_state[state]
        self._abandoned -= fault.abandoned
        contents.kv_space[Tier.HOST].unreserve(fault.room[0])
        contents.state_space[Tier.HOST].unreserve(fault.room[1])
        # What only the device had beside the SSD may have left it meanwhile: that was not reserved.
        missing = self._missing(fault)
        wants_state = bool(fault.waiting) and fault.reads_state and not state.tiers & CACHED
        sizes = sum(contents.kv_bytes(one) for one in missing), contents.state_bytes if wants_state else 0
        whole = system.make_room(Tier.HOST, *sizes)
        for one in self._missing(fault):  # making room may have cut a run in two
            if not whole and contents.kv_space[Tier.HOST].free < contents.kv_bytes(one):
                wants_state = False  # nobody could reach it
                break
            contents.set_kv(one, Tier.HOST, True)
        if wants_state and (whole or contents.state_space[Tier.HOST].free >= contents.state_bytes):
            contents.set_state(state.run, state.page, Tier.HOST, True)
        fault.holders = fault.waiting
        fault.waiting = []
        for visit in fault.holders:
            visit.waits, visit.holds = None, fault
            pages, with_state = visit.from_ssd
            visit.from_ssd = pages + fault.pages, with_state or fault.reads_state
        if not fault.holders:
            self._unlock(fault)

    @staticmethod
    def _missing(fault: Fault) -> list[Run]:
        """Return the runs up to the checkpoint of which neither device nor host has the KV, from the top down."""
        return [one for one in reversed(list(fault.run.path())) if not one.kv & CACHED]

    def _abandon(self, fault: Fault) -> None:
        """The read is late: whoever waits for it, however long, goes on without."""
        if fault.ended:
            return
        fault.abandoned = True
        self._abandoned += 1
        for visit in fault.waiting:
            visit.waits = None
        self.late += len(fault.waiting)
        fault.waiting = []

    def _unlock(self, fault: Fault) -> None:
        for one in fault.run.path():
            one.host_locks -= 1
