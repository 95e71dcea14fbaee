"""A server that starts again on the same SSD: what its prompts find, where it goes in the tree, what gives way first."""

from __future__ import annotations

import random
import time
from array import array

import pytest

from sglang_histate.adapter.page_keys import PageKeys
from sglang_histate.adapter.recovered import Recovered, Stretch, by_worth
from sglang_histate.adapter.saving import Saving, save_for_restart
from sglang_histate.store import NO_PARENT, Entry, Key, RecordKind
from tests.store.fakes import FakeDisk

from .conftest import GPU
from .engine import PAGE, tokens
from .stores import fake_disk, wait_threads
from .test_kv_ssd import Bench, many

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")


def extent(*pages: bytes, parent: bytes = NO_PARENT, end: int = 0) -> Entry:
    keys = tuple(page * 32 for page in pages)
    return Entry(keys[-1], RecordKind.KV, end, parent, keys, bytes(16), 0, 1)


def checkpoint(page: bytes) -> Entry:
    return Entry(page * 32, RecordKind.CHECKPOINT, 64, NO_PARENT, (), bytes(16), 0, 1)


def restarted(bench: Bench, **changes) -> Bench:
    """A new process on what is on the disk now. The old one ends without a word, as after kill -9."""
    wait_threads(bench.store)
    disk = FakeDisk()
    disk.content = bytearray(fake_disk(bench.store).content)
    return Bench(disk, **changes)


def spilled(bench: Bench, count: int = 20) -> list[array]:
    sessions = many(bench, count)
    bench.settle()
    return sessions


def end_key(ids: array) -> bytes:
    return PageKeys(PAGE, None, None).at(ids, len(ids))


def on_ssd(bench: Bench, ids: array) -> bool:
    """Whether the SSD alone could resume `ids`."""
    ssd, tree = bench.ranking.ssd, bench.ranking.tree
    node, at = bench.core.root_node, 0
    radix = PageKeys(PAGE, None, None).radix_key(ids, len(ids))
    while at < len(ids):
        node = node.children.get(radix.child_key_at(at, PAGE))
        if node is None or not ssd.has_kv(node.id):
            return False
        at += tree.tokens(node.id)
    return bench.store.lookup(end_key(ids)) is not None


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.tier.close()


def test_every_durable_session_is_resumed_by_its_first_request(bench) -> None:
    sessions = spilled(bench)
    durable = [ids for ids in sessions if on_ssd(bench, ids)]
    assert len(durable) > 8
    again = restarted(bench)
    try:
        assert len(list(again.store.entries())) > 0 and again.dead() == 0
        for ids in random.Random(3).sample(durable, len(durable)):
            assert again.ask(ids) == len(ids)  # the bytes are checked too
        again.engine.check()
    finally:
        again.tier.close()


def test_a_rewrite_inside_an_extent_finds_its_pages(bench) -> None:
    """Headers name every page, so a prompt that leaves the old path anywhere resumes at the last checkpoint before."""
    base = tokens((1, 8 * PAGE))
    for end in (3, 8):
        bench.visit(base[: end * PAGE])
        bench.off_device()
    many_others = [tokens((seed, 512)) for seed in range(50, 70)]
    for ids in many_others:
        bench.visit(ids)
        bench.off_device()
        bench.settle()
    assert on_ssd(bench, base)
    again = restarted(bench)
    try:
        rewrite = base[: 5 * PAGE] + tokens((99, 3 * PAGE))
        assert again.ask(rewrite) == 3 * PAGE
        assert again.ask(base) == 8 * PAGE
        again.engine.check()
    finally:
        again.tier.close()


def test_what_is_computed_again_is_not_spilled_again(bench) -> None:
    """KV that a request computes although the SSD has it gets its place, and is clean at once."""
    sessions = spilled(bench)
    durable = [ids for ids in sessions if on_ssd(bench, ids)]
    again = restarted(bench)
    try:
        ids = durable[0]
        again.visit(ids)  # as if the read had not been worth it
        node = again.core.node_by_id(again.match(ids).last_device_node)
        assert again.ranking.ssd.has_kv(node.id)
        assert Key(end_key(ids)) not in again.ranking.ssd._homeless
        again.engine.check()
    finally:
        again.tier.close()


def test_what_nobody_asks_for_gives_way_oldest_session_first() -> None:
    first = [extent(b"a", b"b", end=128), extent(b"c", parent=b"b" * 32, end=192), checkpoint(b"c")]
    second = [extent(b"x", end=64), checkpoint(b"x")]
    order = by_worth([*first, *second])
    assert order == [entry.name for entry in (first[2], first[1], first[0], second[1], second[0])]
    # The older one is used again: it goes last now, and still from its end.
    order = by_worth([first[1], *second, first[0], first[2]])
    assert order == [entry.name for entry in (second[1], second[0], first[2], first[1], first[0])]


def test_recovered_pages_are_found_once_and_in_runs() -> None:
    found = Recovered()
    assert not found
    found.add(extent(b"a", b"b", b"c"))
    found.add(extent(b"b", b"c", b"d", parent=b"a" * 32))
    names = [page * 32 for page in (b"a", b"b", b"c", b"d", b"e")]
    assert found.take_pages(names) == [Stretch(b"c" * 32, 0, 0, 3), Stretch(b"d" * 32, 2, 3, 1)]
    assert found.take_pages(names) == [] and not found


def test_an_extent_that_is_gone_is_not_found() -> None:
    found = Recovered()
    found.add(extent(b"a", b"b"))
    found.add(extent(b"b", b"c", parent=b"a" * 32))
    found.add(checkpoint(b"b"))
    found.gone(Key(b"b" * 32, RecordKind.KV))
    names = [page * 32 for page in (b"a", b"b", b"c")]
    assert [found.has_page(name) for name in names] == [False, True, True]
    found.gone(Key(b"c" * 32, RecordKind.KV))
    assert not any(found.has_page(name) for name in names) and found
    found.gone(Key(b"b" * 32))
    assert not found and list(found.take_checkpoints(names)) == []


def test_a_small_ssd_after_a_restart_serves_on(bench) -> None:
    """The recovered records are the first to go when slabs are needed, and nothing trips over them."""
    sessions = spilled(bench)
    again = restarted(bench)
    try:
        for seed in range(100, 140):
            again.visit(tokens((seed, 512)))
            again.off_device()
            again.settle()
        for ids in sessions:
            assert again.ask(ids) in range(0, len(ids) + 1)
        again.engine.check()
    finally:
        again.tier.close()


def test_a_graceful_exit_saves_what_only_the_host_has() -> None:
    bench = Bench(host_pages=96)
    sessions = [tokens((seed, 512)) for seed in range(1, 7)]
    for ids in sessions:
        bench.visit(ids)
    bench.off_device()
    assert not any(on_ssd(bench, ids) for ids in sessions)
    saved = Saving(bench.tier, bench.engine.slots.read_into, time.monotonic() + 20).run()
    assert (saved.sessions, saved.left) == (6, 0) and saved.kv_pages == 6 * 512 // PAGE
    bench.tier.close()
    again = restarted(bench)
    try:
        for ids in sessions:
            assert again.ask(ids) == len(ids)
    finally:
        again.tier.close()


def test_no_time_to_save_is_no_reason_to_hang() -> None:
    bench = Bench(host_pages=96)
    for seed in range(1, 7):
        bench.visit(tokens((seed, 512)))
    bench.off_device()
    start = time.monotonic()
    saved = Saving(bench.tier, bench.engine.slots.read_into, start).run()
    assert saved.sessions == 0 and saved.left == 6 and time.monotonic() - start < 2
    bench.tier.close()


def test_a_full_ssd_keeps_what_was_saved_first() -> None:
    """Room for three of six sessions: the latest three, whole, and not pieces of six."""
    bench = Bench(host_pages=96)
    per_session = -(-512 // PAGE // bench.store.layout.pages_per_extent) + 1
    bench.tier.close()
    bench = Bench(host_pages=96, slabs=3 * per_session + 1)
    sessions = [tokens((seed, 512)) for seed in range(1, 7)]
    for ids in sessions:
        bench.visit(ids)
    bench.off_device()
    save_for_restart(bench.tier, bench.engine.slots.read_into, 20)
    bench.tier.close()
    again = restarted(bench, slabs=3 * per_session + 1)
    try:
        found = [again.ask(ids) == len(ids) for ids in sessions]
        assert found[-1] and 2 <= sum(found) <= 3, found
    finally:
        again.tier.close()


def test_a_saving_that_fails_ends_the_server_all_the_same(bench, caplog) -> None:
    many(bench, 3)

    def broken(slot, record):
        raise OSError("made to fail")

    bench.tier.land = lambda: broken(None, None)
    save_for_restart(bench.tier, broken, 1)
    assert "saving for a restart failed" in caplog.text
