"""Which checkpoints have all their KV, and which KV serves one: a pure function against a slow, plain one."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_histate.store import NO_PARENT, LossReason, RecordKind, Recovered
from sglang_histate.store.layout import NO_NAMESPACE
from sglang_histate.store.recovery import restorable

from .conftest import key as number_key
from .conftest import open_store, put, put_extent, settle
from .fakes import FakeDisk

OTHER = bytes(15) + b"1"


def page(path: str) -> bytes:
    """Hash of the last page of a path; like the real ones it stands for the whole prefix."""
    return path.encode().ljust(32, b".")


def checkpoint(path: str, namespace: bytes = NO_NAMESPACE) -> Recovered:
    return Recovered(page(path), RecordKind.CHECKPOINT, 64 * len(path), NO_PARENT, (), namespace, 0, 0)


def extent(path: str, pages: int, namespace: bytes = NO_NAMESPACE) -> Recovered:
    """The last `pages` pages of `path`, of which each letter is one."""
    names = tuple(page(path[: len(path) - pages + 1 + i]) for i in range(pages))
    parent = page(path[:-pages]) if pages < len(path) else NO_PARENT
    return Recovered(names[-1], RecordKind.KV, 64 * len(path), parent, names, namespace, 0, 0)


def check(entries: list[Recovered], kept: str) -> None:
    """`kept` has a letter for each entry: y or n."""
    found = restorable(entries)
    wanted = [entry for entry, flag in zip(entries, kept.split(), strict=True) if flag == "y"]
    assert found.checkpoints == [entry for entry in wanted if entry.kind is RecordKind.CHECKPOINT]
    assert found.extents == [entry for entry in wanted if entry.kind is RecordKind.KV]


def test_an_unbroken_chain():
    check([extent("abcd", 2), checkpoint("abcd"), extent("ab", 2)], "y y y")


def test_a_gap():
    check([extent("ab", 2), extent("abcdef", 2), checkpoint("abcdef"), checkpoint("ab")], "y n n y")


def test_no_kv_at_all():
    check([checkpoint("a")], "n")


def test_kv_after_the_last_checkpoint():
    check([extent("ab", 2), extent("abcd", 2), checkpoint("ab")], "y n y")


def test_a_checkpoint_within_an_extent():
    check([extent("abcd", 4), checkpoint("ab"), checkpoint("abc")], "y y y")


def test_an_extent_that_goes_on_from_within_another():
    check([extent("abcd", 4), extent("abxy", 2), checkpoint("abxy")], "y y y")


def test_extents_that_overlap():
    check([extent("abcd", 4), extent("abcdef", 4), checkpoint("abcdef")], "y y y")
    check([extent("abcdef", 4), extent("abcd", 4), checkpoint("abcd")], "y y y")
    check([extent("abcdef", 3), extent("abcd", 4), checkpoint("abc")], "n y y")
    check([extent("abcd", 3), extent("abcd", 4), checkpoint("abcd")], "y y y")
    check([extent("abcd", 4), extent("a", 1), checkpoint("ab")], "y y y")


def test_tenants_do_not_complete_each_other():
    check([extent("ab", 2, OTHER), extent("abcd", 2), checkpoint("abcd")], "n n n")
    check([extent("ab", 2, OTHER), checkpoint("ab", OTHER)], "y y")
    check([extent("ab", 2, OTHER), checkpoint("ab")], "n n")


def test_a_ring_of_extents_is_no_chain():
    ring = [
        Recovered(page("x"), RecordKind.KV, 64, page("y"), (page("x"),), NO_NAMESPACE, 0, 0),
        Recovered(page("y"), RecordKind.KV, 64, page("x"), (page("y"),), NO_NAMESPACE, 0, 0),
        Recovered(page("z"), RecordKind.KV, 64, page("z"), (page("z"),), NO_NAMESPACE, 0, 0),
    ]
    check([*ring, checkpoint("x"), checkpoint("z")], "n n n n n")


def plain(entries: list[Recovered]) -> tuple[list[Recovered], list[Recovered]]:
    extents = [entry for entry in entries if entry.kind is RecordKind.KV]

    def stored(path: str, namespace: bytes) -> bool:
        return any(page(path) in one.page_keys and one.namespace == namespace for one in extents)

    def prefixes(entry: Recovered) -> list[str]:
        path = entry.key.rstrip(b".").decode()
        return [path[: n + 1] for n in range(len(path))]

    whole = [
        entry
        for entry in entries
        if entry.kind is RecordKind.CHECKPOINT and all(stored(p, entry.namespace) for p in prefixes(entry))
    ]
    needed = {(page(p), entry.namespace) for entry in whole for p in prefixes(entry)}
    return whole, [one for one in extents if any((name, one.namespace) in needed for name in one.page_keys)]


paths = st.text("ab", min_size=1, max_size=6)
tenants = st.sampled_from([NO_NAMESPACE, NO_NAMESPACE, OTHER])
entries = st.one_of(
    st.builds(checkpoint, paths, tenants),
    st.builds(
        lambda path, pages, who: extent(path, min(pages, len(path)), who), paths, st.integers(1, 6), tenants
    ),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(entries, max_size=12))
def test_against_a_plain_one(found):
    result = restorable(found)
    assert (result.checkpoints, result.extents) == plain(found)


def test_it_is_linear():
    path = "".join(chr(0x4E00 + n) for n in range(9))
    chain, parent = [], NO_PARENT
    for number in range(20000):
        names = tuple(f"{path}{number}-{n}".encode()[-32:].rjust(32, b"0") for n in range(24))
        chain.append(Recovered(names[-1], RecordKind.KV, 64, parent, names, NO_NAMESPACE, number, 0))
        parent = names[-1]
    ends = [Recovered(e.key, RecordKind.CHECKPOINT, 64, NO_PARENT, (), NO_NAMESPACE, 0, 0) for e in chain]
    started = time.monotonic()
    found = restorable([*chain[::-1], *ends])
    assert len(found.checkpoints) == len(found.extents) == 20000
    assert time.monotonic() - started < 5


def test_the_store_drops_what_cannot_be_used():
    disk = FakeDisk()
    store = open_store(disk=disk, slabs=8, record_buffers=4)
    put_extent(store, 4, 4)
    settle(store)
    put_extent(store, 8, 4, parent=number_key(4))
    put_extent(store, 99, 2, parent=number_key(98))
    settle(store)
    for number in (4, 8, 99):
        put(store, number)
        settle(store)
    put_extent(store, 12, 4, parent=number_key(8))
    settle(store)
    store.close()
    again = open_store(disk=disk, slabs=8)
    kept = [(int.from_bytes(e.key, "big"), e.kind) for e in again.entries()]
    KV, CHECKPOINT = RecordKind.KV, RecordKind.CHECKPOINT
    assert kept == [(4, KV), (8, KV), (4, CHECKPOINT), (8, CHECKPOINT)]
    assert again.recovery.losses == {LossReason.NO_KV: 1, LossReason.NO_CHECKPOINT: 2}
    again.close()
