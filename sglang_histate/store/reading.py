"""One record on its way from the disk: which pieces have landed, how far it is verified, when it is over.

A record is read in pieces by some of the reader threads, so several pieces are under way at once and land in any order.
They are verified and delivered in the order of the record by one thread at a time, while the others read on: the sums and
the copy cost hardly any time beside the disk. Nothing here waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from .blocks import SlabHeader
from .index import Entry
from .kinds import RecordKind
from .layout import PAGE_BYTES, RecordLayout, sums
from .operations import ReadTicket
from .reasons import MissReason
from .records import Record

_log = logging.getLogger("sglang_histate.store")


class Reading:
    """`pieces` pieces of between `least_bytes` and `most_bytes`, see `piece_ends`. Any thread."""

    def __init__(
        self,
        ticket: ReadTicket,
        layout: RecordLayout,
        fingerprint_half: bytes,
        most_bytes: int,
        least_bytes: int,
    ) -> None:
        assert ticket.record is not None
        self.ticket = ticket
        self.failure: MissReason | None = None
        self.record: Record = ticket.record
        self._layout = layout
        self._fingerprint_half = fingerprint_half
        # The header lies in the first piece.
        least_bytes = max(least_bytes, layout.header_bytes)
        self._ends = piece_ends(layout.transfer_bytes(ticket.kind, ticket.n_pages), most_bytes, least_bytes)
        self.pieces = len(self._ends)
        self._parts = layout.part_bytes(ticket.kind, ticket.n_pages)
        self._part_sums: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self._here = [False] * self.pieces
        self._missing = self.pieces
        self._taken = 0  # pieces, in order
        self._checking = False
        self._checked = 0  # pieces
        self._verified_parts = 0
        self._verified_bytes = layout.header_bytes

    def span(self, piece: int) -> tuple[int, int]:
        """Return where a piece begins and ends in the record's image."""
        return self._ends[piece - 1] if piece else 0, self._ends[piece]

    def take(self) -> int | None:
        """Return the next piece to fetch, or None if each has been taken."""
        with self._lock:
            if self._taken == self.pieces:
                return None
            self._taken += 1
            return self._taken - 1

    @property
    def unwanted(self) -> bool:
        """Whether nobody will look at the record."""
        return self.ticket.cancelled or self.ticket.cleared or self.failure is not None

    def landed(self, piece: int, failure: MissReason | None) -> bool:
        """Piece `piece` is in memory, or will not be because of `failure` or because it is unwanted.

        Verifies and delivers what follows on, unless another thread is about it. Returns whether the reading is over,
        which it does once: all pieces were heard of, and no thread touches the record any more.
        """
        with self._lock:
            self.failure = self.failure or failure
            self._here[piece] = True
            self._missing -= 1
            self.ticket.steps += 1
            if self._checking:
                return False
            self._checking = True
        while True:
            with self._lock:
                following = self._checked
                if self.unwanted or following == self.pieces or not self._here[following]:
                    self._checking = False
                    return self._missing == 0
                self._checked += 1
            failure = attempt(self._check, following)
            with self._lock:
                self.failure = self.failure or failure

    def _check(self, piece: int) -> MissReason | None:
        if piece == 0:
            reason = self._check_header()
            if reason is not None:
                return reason
        _, landed_bytes = self.span(piece)
        first, start = self._verified_parts, self._verified_bytes
        last, end = first, start
        while last < len(self._parts) and end + self._parts[last] <= landed_bytes:
            end += self._parts[last]
            last += 1
        if sums(self.record.image[start:end], self._parts[first:last]) != self._part_sums[first:last]:
            is_kv = self.ticket.kind is RecordKind.KV
            return MissReason.CORRUPT_PAGE if is_kv else MissReason.CORRUPT_SEGMENT
        self._verified_parts, self._verified_bytes = last, end
        return deliver(self.ticket, self.record, range(first, last)) if last > first else None

    def _check_header(self) -> MissReason | None:
        header = SlabHeader.parse(self.record.header.tobytes())
        if header is None:
            return MissReason.CORRUPT_HEADER
        if header.fingerprint_half != self._fingerprint_half:
            return MissReason.WRONG_FINGERPRINT
        self._part_sums = header.part_sums
        return mismatch(header, self.ticket.entry, self._layout)


def piece_ends(total_bytes: int, most_bytes: int, least_bytes: int) -> tuple[int, ...]:
    """Return where each piece ends, in whole pages but for the last.

    A piece is half of what is left, at most `most_bytes` and at least `least_bytes` (which wins), so that when the last one
    lands there is little left to verify.
    """
    ends = [0]
    while (left := total_bytes - ends[-1]) > 0:
        size = max(least_bytes, min(most_bytes, left // 2 // PAGE_BYTES * PAGE_BYTES))
        ends.append(ends[-1] + min(size, left))
    return tuple(ends[1:])


def attempt(step: Callable[..., MissReason | None], *arguments: object) -> MissReason | None:
    """Call `step`; what it raises is a reason too."""
    try:
        return step(*arguments)
    except OSError as error:
        _log.debug("a read failed: %s", error)
        return MissReason.IO_ERROR
    except Exception:
        # A thread that dies here would stop the commits of all ranks. The miss is harmless, the log is loud.
        _log.exception("defect in the reader")
        return MissReason.INTERNAL


def deliver(ticket: ReadTicket, record: Record, parts: range) -> MissReason | None:
    """Hand verified parts over, if anybody wants them."""
    if ticket.deliver is not None:
        with ticket.sealed() as allowed:
            if not allowed:
                return MissReason.TIMED_OUT  # what it delivers to may belong to somebody else by now
            ticket.deliver(record, parts)
    return None


def mismatch(header: SlabHeader, entry: Entry, layout: RecordLayout) -> MissReason | None:
    """Return why a sound header is not the one of `entry`, or None if it is."""
    if header.generation != entry.generation:
        return MissReason.WRONG_GENERATION
    if header.kind is not entry.kind:
        return MissReason.WRONG_KIND
    if (header.key, header.parent, header.at_token) != (entry.key, entry.parent, entry.at_token):
        return MissReason.WRONG_KEY
    if (header.page_keys, header.namespace) != (entry.page_keys, entry.namespace):
        return MissReason.WRONG_KEY
    n_parts = len(layout.part_bytes(entry.kind, entry.n_pages))
    content_bytes = layout.content_bytes(entry.kind, entry.n_pages)
    if (len(header.part_sums), header.content_bytes) != (n_parts, content_bytes):
        return MissReason.WRONG_LENGTH
    return None
