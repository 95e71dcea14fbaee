"""A slow or broken disk on purpose. For tests only: active when one of these variables is set.

    HISTATE_TEST_DISK_DELAY_MS    each read and write first sleeps up to this many milliseconds, at random
    HISTATE_TEST_DISK_FAULT_RATE  probability that a read fails: half with EIO, half with one wrong byte
    HISTATE_TEST_DISK_FAULTS      rules such as eio=0.1,stuck:read@1=1, see `fault_plan`; or @FILE: the rules
                                  are what that file says now, so that a test can break and mend a running server
    HISTATE_TEST_WRONG_STATES     a file: while it exists, checkpoints are written with other numbers and sums that fit

The random numbers are seeded with the names of the rank and of the root, so that ranks differ from each other
but not from run to run. A transfer that is stuck goes on when the rules name `stuck` no more.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from .disk import Disk, FilePlace
from .fault_plan import Fault, FaultPlan
from .layout import PAGE_BYTES, RecordLayout
from .wrong_states import WrongStatesDisk

DELAY_VARIABLE = "HISTATE_TEST_DISK_DELAY_MS"
FAULT_VARIABLE = "HISTATE_TEST_DISK_FAULT_RATE"
PLAN_VARIABLE = "HISTATE_TEST_DISK_FAULTS"
WRONG_VARIABLE = "HISTATE_TEST_WRONG_STATES"
SLOW_S = 0.05
LOOK_AGAIN_S = 0.05
_NUMBERS = {
    fault: getattr(errno, fault.name)
    for fault in (Fault.EIO, Fault.EINVAL, Fault.ENOSPC, Fault.EROFS, Fault.ESTALE, Fault.ENODEV)
}


class FaultyDisk:
    """Passes everything on to `inner`, late and sometimes wrong. `plan` and `delay_s` may be changed at any time.

    `counts` says which faults there were. `plan_file`, if given, is where the rules are read from.
    """

    def __init__(
        self,
        inner: Disk,
        plan: FaultPlan,
        *,
        seed: str,
        root: int = 0,
        delay_s: float = 0.0,
        plan_file: Path | None = None,
    ) -> None:
        self.inner = inner
        self.plan = plan
        self.delay_s = delay_s
        self.counts: Counter[Fault] = Counter()
        self.stuck = 0
        self._root = root
        self._plan_file = plan_file
        self._plan_read_s = 0.0
        self._size_bytes = 0
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._releases = 0

    @property
    def direct(self) -> bool:
        return self.inner.direct

    @property
    def file_place(self) -> FilePlace:
        return self.inner.file_place

    def preallocate(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self.inner.preallocate(size_bytes)

    def release(self) -> None:
        """Let all transfers go on that are stuck now."""
        with self._changed:
            self._releases += 1
            self._changed.notify_all()

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> int:
        (buffer,) = buffers
        fault, place = self._begin(reading=True)
        if fault is Fault.SHORT:
            return self.inner.read_at([buffer[: self._part(len(buffer), place)]], offset)
        if fault is Fault.MISDIRECTED:
            offset = self._elsewhere(offset, len(buffer), place)
        count = self.inner.read_at(buffers, offset)
        if fault in (Fault.FLIP, Fault.ZERO):
            _damage(buffer, fault, place)
        return count

    def write_at(self, buffers: Sequence[memoryview], offset: int) -> int:
        (buffer,) = buffers
        fault, place = self._begin(reading=False)
        part = self._part(len(buffer), place)
        if fault is Fault.LOST:
            return len(buffer)
        if fault in (Fault.SHORT, Fault.TORN):
            count = self.inner.write_at([buffer[:part]], offset) if part else 0
            return count if fault is Fault.SHORT else len(buffer)
        if fault is Fault.MISDIRECTED:
            offset = self._elsewhere(offset, len(buffer), place)
        if fault not in (Fault.FLIP, Fault.ZERO):
            return self.inner.write_at(buffers, offset)
        # The record itself must stay as it is: reads are served from it.
        with mmap.mmap(-1, len(buffer)) as copy, memoryview(copy) as damaged:
            damaged[:] = buffer
            _damage(damaged, fault, place)
            return self.inner.write_at([damaged], offset)

    def revive(self) -> None:
        self.inner.revive()

    def sync(self) -> None:
        self.inner.sync()

    def close(self) -> None:
        self.inner.close()

    def _begin(self, reading: bool) -> tuple[Fault | None, float]:
        """Wait and fail as the rules want it; return the fault that is left to do, and where it strikes (0 to 1)."""
        with self._changed:
            self._read_plan()
            draw = self._random.random
            delay_s, place = draw() * self.delay_s, draw()
            fault = self.plan.choose(reading, self._root, draw())
            if fault is not None:
                self.counts[fault] += 1
        time.sleep(delay_s + (SLOW_S if fault is Fault.SLOW else 0))
        if fault is Fault.STUCK:
            self._hang()
        if fault in _NUMBERS:
            raise OSError(_NUMBERS[fault], os.strerror(_NUMBERS[fault]) + ", made by a test")
        self._harm_file(fault)
        return fault, place

    def _hang(self) -> None:
        with self._changed:
            releases = self._releases
            self.stuck += 1
            while releases == self._releases and any(rule.fault is Fault.STUCK for rule in self.plan.rules):
                self._changed.wait(LOOK_AGAIN_S)
                self._read_plan()
            self.stuck -= 1

    def _harm_file(self, fault: Fault | None) -> None:
        path = getattr(self.inner, "path", None)
        if path is None:
            return
        with contextlib.suppress(FileNotFoundError):
            if fault is Fault.DELETE:
                os.unlink(path)
            elif fault is Fault.TRUNCATE:
                os.truncate(path, os.path.getsize(path) // 2)

    def _read_plan(self) -> None:
        now = time.monotonic()
        if self._plan_file is None or now - self._plan_read_s < LOOK_AGAIN_S:
            return
        self._plan_read_s = now
        with contextlib.suppress(OSError, ValueError):  # being written at the moment
            self.plan = FaultPlan.parse(self._plan_file.read_text())

    def _part(self, length: int, place: float) -> int:
        """Return less than `length`, whole pages."""
        return int(place * (length // PAGE_BYTES)) * PAGE_BYTES

    def _elsewhere(self, offset: int, length: int, place: float) -> int:
        """Return where the transfer goes instead: whole lengths away, so that it may meet another record's start."""
        first = PAGE_BYTES + (offset - PAGE_BYTES) % length
        count = max(1, (self._size_bytes - first) // length)
        return first + int(place * count) * length


def _damage(buffer: memoryview, fault: Fault, place: float) -> None:
    position = int(place * len(buffer))
    if fault is Fault.FLIP:
        buffer[position] ^= 0x40
    else:
        start = position // PAGE_BYTES * PAGE_BYTES
        buffer[start : start + PAGE_BYTES] = bytes(len(buffer[start : start + PAGE_BYTES]))


def from_environment(
    disk: Disk,
    rank_name: str,
    layout: RecordLayout,
    root: int = 0,
    environment: Mapping[str, str] = os.environ,
) -> Disk:
    """Return `disk` itself, or wrapped when a test asks for it.

    Raises:
        ValueError: a variable cannot be read.
    """
    delay_ms = float(environment.get(DELAY_VARIABLE) or 0)
    rate = float(environment.get(FAULT_VARIABLE) or 0)
    text = environment.get(PLAN_VARIABLE) or ""
    if switch := environment.get(WRONG_VARIABLE):
        disk = WrongStatesDisk(disk, layout, Path(switch))
    if not (delay_ms or rate or text):
        return disk
    plan_file = Path(text[1:]) if text.startswith("@") else None
    plan = FaultPlan.parse(text) if plan_file is None else FaultPlan()
    plan = FaultPlan((*plan.rules, *FaultPlan.bad_reads(rate).rules))
    return FaultyDisk(
        disk, plan, seed=f"{rank_name}/{root}", root=root, delay_s=delay_ms / 1000, plan_file=plan_file
    )
