"""Which faults a disk in a test has, how often, and in which root: read from one line of text.

    eio=0.1,flip:read=0.05,enospc@1=1

Comma-separated rules `KIND[:read|:write][@ROOT]=PROBABILITY`. A rule without `:read` or `:write` is for each
direction in which its kind exists; one without `@ROOT` (the position in --histate-ssd-dir, from 0) for all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    EIO = "eio"
    EINVAL = "einval"  # what O_DIRECT says where it does not work
    ENOSPC = "enospc"
    EROFS = "erofs"  # remounted read-only after an error
    ESTALE = "estale"  # the file system under an open file is another one now
    ENODEV = "enodev"  # unplugged
    SHORT = "short"  # fewer bytes than asked for, and says so
    SLOW = "slow"
    STUCK = "stuck"  # hangs until released
    FLIP = "flip"  # one wrong bit
    ZERO = "zero"  # one page of zeroes
    TORN = "torn"  # says that all is well, but only the first pages were written
    LOST = "lost"  # says that all is well, but the old content stays
    MISDIRECTED = "misdirected"  # goes to, or comes from, another place in the file
    DELETE = "delete"  # the file loses its name
    TRUNCATE = "truncate"  # the file loses its second half


_WRITES_ONLY = frozenset({Fault.ENOSPC, Fault.EROFS, Fault.TORN, Fault.LOST})
READ_FAULTS: tuple[Fault, ...] = tuple(fault for fault in Fault if fault not in _WRITES_ONLY)
WRITE_FAULTS: tuple[Fault, ...] = tuple(Fault)
_RULE = re.compile(r"(?P<kind>[a-z]+)(:(?P<way>read|write))?(@(?P<root>\d+))?=(?P<chance>[0-9.]+)")


@dataclass(frozen=True)
class Rule:
    fault: Fault
    probability: float
    reads: bool = True
    writes: bool = True
    root: int | None = None


@dataclass(frozen=True)
class FaultPlan:
    """Rules in order. The sum of the probabilities for one direction of one root is at most 1."""

    rules: tuple[Rule, ...] = ()

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """Read `text` as the module says; nothing and white space mean no fault.

        Raises:
            ValueError: with the rule that cannot be read.
        """
        rules = [_parse_rule(part.strip()) for part in text.split(",") if part.strip()]
        return cls(tuple(rules))

    @classmethod
    def even(cls, probability: float, faults: Sequence[Fault] = tuple(Fault)) -> FaultPlan:
        """Return a plan in which each transfer meets one of `faults` with this probability, all equally likely."""
        reads = [fault for fault in faults if fault in READ_FAULTS]
        rules = [Rule(fault, probability / len(reads), writes=False) for fault in reads]
        rules += [Rule(fault, probability / len(faults), reads=False) for fault in faults]
        return cls(tuple(rules))

    @classmethod
    def bad_reads(cls, probability: float) -> FaultPlan:
        """Return a plan in which a read fails with this probability: half with EIO, half with one wrong bit."""
        return cls(tuple(Rule(fault, probability / 2, writes=False) for fault in (Fault.EIO, Fault.FLIP)))

    def choose(self, reading: bool, root: int, draw: float) -> Fault | None:
        """Return the fault of one transfer; `draw` is a random number from 0 to 1."""
        for rule in self.rules:
            if (rule.reads if reading else rule.writes) and rule.root in (None, root):
                if draw < rule.probability:
                    return rule.fault
                draw -= rule.probability
        return None


def _parse_rule(text: str) -> Rule:
    match = _RULE.fullmatch(text)
    if match is None or match["kind"] not in set(Fault):
        raise ValueError(f"{text!r} is no fault: write KIND[:read|:write][@ROOT]=PROBABILITY")
    fault = Fault(match["kind"])
    reads, writes = match["way"] != "write" and fault in READ_FAULTS, match["way"] != "read"
    if not reads and not writes:
        raise ValueError(f"{text!r} is no fault: {fault.value} is for writes only")
    root = None if match["root"] is None else int(match["root"])
    return Rule(fault, float(match["chance"]), reads, writes, root)
