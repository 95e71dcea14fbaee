"""KV on the SSD: spilled ahead of need, its nodes dead but remembered, brought back with the checkpoint that needs it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

import pytest
import torch
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.adapter.counters import Miss
from sglang_histate.adapter.kv_extents import Piece
from sglang_histate.adapter.page_keys import PageKeys
from sglang_histate.adapter.request_state import state_of
from sglang_histate.policy.scarcity import Scarcity
from sglang_histate.store import DropReason, Key, RecordKind
from tests.store.fakes import FakeDisk

from .conftest import GPU
from .engine import PAGE, request, tokens
from .stores import put, wait_threads
from .test_tier import Alone, Rank

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")


class Bench(Rank):
    """A rank whose host arena is small. Each KV token and each state carries numbers by which it is known again."""

    def __init__(self, disk: FakeDisk | None = None, **changes) -> None:
        super().__init__(
            Alone(),
            disk,
            **(dict(slabs=400, buffers=24, kv_tokens=2048, host_pages=48, temporal=(8, 16, 12)) | changes),
        )
        self.core, self.ranking = self.engine.cache.tree_core, self.engine.ranking
        self.kv = self.engine.kv.get_kvcache().full_kv_pool

    def visit(self, ids: array, **tenant: str) -> None:
        """A finished request over `ids`, whose checkpoint is on the SSD too."""
        engine = self.engine
        self.ranking.admitted(self.core.node_by_id(self.match(ids, **tenant).best_match_node))
        while True:
            try:
                engine.insert(ids, **tenant)
                break
            except MemoryError:
                engine.evict_kv(len(ids))
                engine.evict_states(4)
                engine.settle()
        node = self.core.node_by_id(self.match(ids, **tenant).best_match_node)
        self.write(ids, **tenant)
        engine.settle()
        req = request(ids + tokens((9, 1)), **tenant)
        req.last_node, req.kv.cache_protected_len = node.id, len(ids)
        keys = state_of(req, PAGE).keys
        key = keys.at(ids, len(ids))
        if self.store.lookup(key) is None:
            put(self.store, engine.layout, key, len(ids), float(sum(ids) % 1000), keys.namespace)
        self.tier.published(req)
        self.drain()

    def write(self, ids: array, **tenant: str) -> None:
        """Fill the device KV of `ids` with their token ids."""
        path, node = [], self.core.node_by_id(self.match(ids, **tenant).last_device_node)
        while node.parent is not None:
            path.append(node.component_data[ComponentType.FULL].value)
            node = node.parent
        slots = torch.cat(path[::-1])
        values = torch.tensor(ids[: len(slots)], dtype=torch.float32)[:, None, None]
        self.kv.k_buffer[0][slots] = values.expand(-1, *self.kv.k_buffer[0].shape[1:])
        self.kv.v_buffer[0][slots] = -values.expand(-1, *self.kv.v_buffer[0].shape[1:])

    def match(self, ids: array, **tenant: str):
        return self.engine.match(request(ids + tokens((9, 1)), **tenant))

    def off_device(self) -> None:
        self.engine.evict_kv(1 << 20)
        self.engine.settle()

    def settle(self) -> None:
        """Let the spill do all it wants to do."""
        for _ in range(200):
            self.tier.tick()
            self.drain()

    def ask(self, ids: array, **tenant: str) -> int:
        """A new request over `ids`: waits until it may be admitted; returns the tokens it resumes from."""
        req = request(ids + tokens((9, 1)), **tenant)
        for _ in range(100):
            if self.engine.cache.request_ready(req):
                break
            wait_threads(self.store)
            self.tier.tick()
        else:
            raise AssertionError("the request waits for ever")
        match = self.engine.match(req)
        depth, node = 0, self.core.node_by_id(match.best_match_node)
        last = node
        while node.parent is not None:
            depth, node = depth + len(node.key), node.parent
        self.check_kv(last, ids[:depth])
        self.tier.fault_ins.admitted(req.cache_request_handle)
        self.drain()
        return depth

    def check_kv(self, node, ids: array) -> None:
        """The host (or device) KV from the root to `node` is that of `ids`, bit for bit."""
        end, arena = len(ids), self.engine.arena
        while node.parent is not None:
            start = end - len(node.key)
            full = node.component_data[ComponentType.FULL]
            if full.host_value is not None:
                for at in range(0, len(node.key), PAGE):
                    page = int(full.host_value[at]) // PAGE
                    raw = arena.memory[page * arena.page_bytes : (page + 1) * arena.page_bytes]
                    rows = torch.from_numpy(raw.copy()).view(torch.float32).view(2, PAGE, -1)
                    wanted = torch.tensor(ids[start + at : start + at + PAGE], dtype=torch.float32)
                    assert torch.equal(rows[0][:, 0], wanted) and torch.equal(rows[1][:, -1], -wanted)
            node, end = node.parent, start

    def dead(self) -> int:
        nodes, found = list(self.core.root_node.children.values()), 0
        for node in nodes:
            nodes.extend(node.children.values())
            found += self.core.is_dead(node)
        return found


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.tier.close()


def many(bench: Bench, count: int, length: int = 512) -> list[array]:
    """Visit sessions until the host has seen more than it can hold, spilling as it goes."""
    sessions = [tokens((seed, length)) for seed in range(1, count + 1)]
    for ids in sessions:
        bench.visit(ids)
        bench.off_device()
        bench.settle()
    return sessions


def test_every_session_comes_back_from_host_or_ssd(bench) -> None:
    sessions = many(bench, 20)  # 160 pages of KV, on a host of 48
    bench.engine.check()
    assert bench.dead() > 5 and bench.counters.kv_spilled_pages > 80
    assert bench.engine.arena.used_pages(next(iter(bench.engine.arena._used))) <= 48
    for ids in sessions:
        assert bench.ask(ids) == len(ids)
        bench.settle()
        bench.engine.check()
    assert bench.counters.kv_restores > 5
    fates = bench.ranking.as_json()["evictions_by_reason_total"]
    assert fates["copy-below"] > 20 and fates["no-room"] == 0, fates
    bench.check_idle()


def test_an_append_and_a_rewrite_of_kv_on_the_ssd(bench) -> None:
    first, *_ = many(bench, 20)
    assert bench.core.is_dead(next(iter(node for node in all_nodes(bench) if matches(node, first))))
    assert bench.ask(first + tokens((77, 200))) == len(first)
    second = tokens((2, 512))
    key = PageKeys(PAGE, None, None).at(second, 256)
    put(bench.store, bench.engine.layout, key, 256, 3.0)  # a checkpoint inside the session
    bench.drain()
    node = next(node for node in all_nodes(bench) if matches(node, second))
    bench.ranking.placed(key, node, 256, True)
    assert bench.core.is_dead(node)
    assert bench.ask(second[:300] + tokens((78, 200))) == 256
    bench.engine.check()
    assert bench.ask(second) == len(second), "the rest is still on the SSD"
    bench.engine.check()
    bench.check_idle()


def all_nodes(bench: Bench) -> list:
    nodes = list(bench.core.root_node.children.values())
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


def matches(node, ids: array) -> bool:
    return node.key.token_ids[:PAGE] == ids[:PAGE] and node.parent.parent is None


def test_computing_it_again_revives_a_dead_node(bench) -> None:
    first, *_ = many(bench, 20)
    node = next(node for node in all_nodes(bench) if matches(node, first))
    assert bench.core.is_dead(node)
    bench.visit(first)
    assert not bench.core.is_dead(node)
    bench.engine.check()
    bench.off_device()
    bench.settle()
    bench.engine.check()
    assert bench.ask(first) == len(first)


def test_kv_that_cannot_be_read_is_a_miss_and_its_node_goes() -> None:
    bench = Bench()
    first, *_ = many(bench, 20)
    disk = bench.store._roots[0].disk
    assert isinstance(disk, FakeDisk)
    node = next(node for node in all_nodes(bench) if matches(node, first))
    key = bench.ranking.ssd.extents.keys(node.id)[1]
    entry = bench.store.lookup(key, RecordKind.KV)
    slab = bench.store.layout.slab_offset(entry.slab) + bench.store.layout.header_bytes
    disk.content[slab : slab + 8] = bytes(8)
    used = bench.engine.arena.free_pages
    assert bench.ask(first) == 0
    assert bench.counters.missed[Miss.READ_FAILED] == 1
    bench.settle()
    assert node.id not in bench.ranking.tree, "a node without KV anywhere does not stay"
    bench.engine.check()
    assert bench.engine.arena.free_pages >= used
    bench.check_idle()
    bench.tier.close()


def test_an_aborted_request_leaves_the_kv_on_the_host(bench) -> None:
    first, *_ = many(bench, 20)
    req = request(first + tokens((9, 1)))
    assert bench.engine.cache.request_ready(req) is False
    bench.engine.cache.release_aborted_request(req.cache_request_handle)
    bench.drain()
    bench.engine.check()
    assert bench.ask(first) == len(first)
    bench.check_idle()


def test_a_waiting_request_whose_kv_leaves_the_host_looks_again(bench) -> None:
    sessions = many(bench, 20)
    last = sessions[-1]
    req = request(last + tokens((9, 1)))
    while not bench.engine.cache.request_ready(req):
        bench.drain()
    assert bench.engine.match(req).full_kv_hit_length == len(last)
    bench.tier.fault_ins.admitted(
        req.cache_request_handle
    )  # not pinned any more, as if nothing had been read for it
    bench.ranking.clock += 1000
    for ids in sessions[:-1]:
        bench.ask(ids)  # the others come back and push it out
        bench.settle()
    bench.engine.cache.evict_host(1 << 20)
    assert bench.engine.match(req).full_kv_hit_length == 0
    bench.tier.tick()
    assert bench.engine.cache.request_ready(req) is False, "its KV is on its way from the SSD"
    bench.drain()
    assert bench.engine.cache.request_ready(req) and bench.engine.match(req).full_kv_hit_length == len(last)
    bench.tier.fault_ins.admitted(req.cache_request_handle)
    bench.check_idle()


def test_a_flush_while_kv_is_read_and_spilled(bench) -> None:
    first, *_ = many(bench, 20)
    assert bench.engine.cache.request_ready(request(first + tokens((9, 1)))) is False
    bench.engine.cache.reset()
    bench.engine.kv.clear()
    bench.engine.states.clear()
    bench.drain()
    bench.check_idle()
    assert bench.engine.arena.free_pages == bench.engine.arena.total_pages
    assert bench.dead() == 0 and bench.ask(first) == 0


def test_a_small_ssd_keeps_its_budget_and_forgets_whole_sessions() -> None:
    bench = Bench(slabs=40)
    sessions = many(bench, 24)
    bench.engine.check()
    stats = bench.store.stats()
    assert stats.slabs_used <= 40
    resumed = [bench.ask(ids) for ids in sessions]
    assert set(resumed) <= {0, 512} and resumed.count(512) > 6, resumed
    bench.settle()
    bench.engine.check()
    bench.tier.close()


def test_the_reserve_outlasts_a_prompt_that_is_large_next_to_the_host(bench) -> None:
    """An eighth of the host would do for small ones; the next prompt of this size takes twenty pages at once."""
    for seed in (1, 2):
        bench.visit(tokens((seed, 20 * PAGE)))
        bench.off_device()
        bench.settle()
    reserve = bench.engine.arena.free_pages + bench.ranking.clean_pages
    assert bench.engine.arena.total_pages == 48 and reserve >= 30, reserve


def test_the_device_lets_go_of_copies_where_the_host_could_give_up_nothing_else(bench) -> None:
    """A step took 14 pages, so 21 should be free or able to go: with each session after the first, one has to leave the device."""
    sessions = [tokens((seed, 14 * PAGE)) for seed in (1, 2, 3)]
    for number, ids in enumerate(sessions, 1):
        bench.visit(ids)
        bench.engine.check()
        evicted = bench.ranking.evictions["device_bundle"]
        assert evicted == number - 1
    nodes = [next(node for node in all_nodes(bench) if matches(node, ids)) for ids in sessions]
    assert [node.evicted for node in nodes] == [True, True, False], "the last one used stays"
    assert bench.engine.arena.free_pages + bench.ranking.host_only_pages >= 21
    assert [bench.ask(ids) for ids in sessions] == [len(ids) for ids in sessions], "nothing was lost"


def test_a_session_whose_last_pages_the_ssd_has_is_copied_to_its_beginning(bench) -> None:
    ids = turns(bench, 1, [9, 9, 9])
    bench.off_device()
    leaf = min((node for node in all_nodes(bench) if not node.children), key=lambda node: node.id)
    bench.tier.kv_spill._start([leaf.id], 9)
    bench.drain()
    bench.visit(tokens((2, 14 * PAGE)))
    bench.settle()
    assert bench.ranking.ssd.has_kv(leaf.parent.id), (
        "its own checkpoint is on the SSD already, what is above follows"
    )
    bench.engine.check()
    assert bench.ask(ids) == len(ids)


@pytest.mark.parametrize("worth", [True, False])
def test_kv_that_is_worth_less_than_what_the_ssd_gives_up_for_it_is_not_copied(
    bench, worth: bool, monkeypatch
) -> None:
    asked = []

    def answer(_, cost_tokens: float, size_bytes: int, age: int, fill: float, ahead: bool = False) -> bool:
        asked.append((cost_tokens, size_bytes, age, fill, ahead))
        return worth

    monkeypatch.setattr(Scarcity, "worth_copying", answer)
    for seed in (1, 2, 3):
        bench.visit(tokens((seed, 14 * PAGE)))
    bench.settle()
    assert asked and all(
        cost >= 0 < size and age >= 0 and 0 < fill <= 1 for cost, size, age, fill, _ in asked
    )
    assert (extents(bench) > 0) is worth


def turns(bench: Bench, seed: int, lengths: list[int]) -> array:
    """Visit a session turn by turn, each so many pages longer; return its tokens."""
    ids = array("q")
    for number, pages in enumerate(lengths):
        ids = ids + tokens((seed * 1000 + number, PAGE * pages))
        bench.visit(ids)
    return ids


def extents(bench: Bench) -> int:
    return bench.store.stats().kinds[RecordKind.KV].slabs_used


def test_short_turns_share_their_slabs(bench) -> None:
    """One page a turn and four pages a slab: nine turns take three slabs, and each is read once."""
    assert bench.store.layout.pages_per_extent == 4
    ids = turns(bench, 1, [1] * 9)
    bench.off_device()
    leaf, *above = (node.id for node in reversed(all_nodes(bench)))
    assert len(above) == 8
    assert bench.tier.kv_spill._start([leaf, *above], 9) == 9
    bench.drain()
    bench.engine.check()
    assert extents(bench) == 3 and bench.ranking.clean_pages == 9
    bench.engine.cache.evict_host(1 << 20)
    assert bench.dead() == 9
    reads = bench.store.stats().reads_ok
    assert bench.ask(ids) == len(ids)  # and its KV is right, bit for bit
    assert bench.store.stats().reads_ok == reads + 3 + 1, "three extents and the checkpoint"
    bench.engine.check()
    bench.check_idle()


def test_what_a_turn_shares_with_the_one_before_goes_with_that(bench) -> None:
    """Three turns of three pages, slabs of four: the first two turns share one, and so do the others."""
    ids = turns(bench, 1, [3, 3, 3])
    bench.off_device()
    nodes = [node.id for node in reversed(all_nodes(bench))]
    bench.tier.kv_spill._start(nodes, 9)
    bench.drain()
    bench.engine.cache.evict_host(1 << 20)
    bench.engine.check()
    assert extents(bench) == 3 and bench.dead() == 3
    checkpoints = bench.store.stats().entries - 3
    resumed, kinds = [], []
    while (name := bench.ranking._ssd_victim()) is not None:
        bench.store.drop(name.hash, DropReason.EVICTED, kind=name.kind)
        kinds.append(name.kind)
        bench.tier.tick()
        bench.engine.check()
        resumed.append(bench.ask(ids))
        bench.engine.cache.evict_host(1 << 20)
        bench.engine.check()
    assert kinds.count(RecordKind.KV) == 3 and kinds.count(RecordKind.CHECKPOINT) == checkpoints
    assert resumed == sorted(resumed, reverse=True) and set(resumed) >= {6 * PAGE, 0}, resumed
    assert set(resumed) <= {9 * PAGE, 6 * PAGE, 3 * PAGE, 0}
    assert extents(bench) == 0 and not all_nodes(bench)
    bench.check_idle()


def test_kv_that_the_ssd_has_in_part_gives_its_slabs_up_when_nothing_else_can(bench) -> None:
    """The host still has the whole node; what is left of it on the SSD belongs to no unit of the ranking."""
    ids = tokens((1, 12 * PAGE))
    bench.visit(ids)
    bench.off_device()
    (node,) = all_nodes(bench)
    bench.tier.kv_spill._start([node.id], 12)
    bench.drain()
    lost = bench.ranking.ssd.extents.keys(node.id)[1]
    bench.store.drop(lost, DropReason.EVICTED, kind=RecordKind.KV)
    kinds = []
    while (name := bench.ranking._ssd_victim()) is not None:
        bench.store.drop(name.hash, DropReason.EVICTED, kind=name.kind)
        kinds.append(name.kind)
        bench.engine.check()
    assert kinds == [RecordKind.CHECKPOINT, RecordKind.KV, RecordKind.KV] and extents(bench) == 0
    assert len(ids) == bench.match(ids).full_kv_hit_length, "the host lost nothing"
    bench.check_idle()


def test_turns_of_any_length_on_a_small_ssd() -> None:
    """What it gives up is always the end of a session: what comes back is a turn's end, and right."""
    draw = random.Random(5)
    bench = Bench(slabs=30)
    sessions, ends = [], []
    for seed in range(1, 16):
        lengths = [draw.randrange(1, 5) for _ in range(draw.randrange(1, 5))]
        sessions.append(turns(bench, seed, lengths))
        ends.append({PAGE * sum(lengths[:count]) for count in range(len(lengths) + 1)})
        bench.off_device()
        bench.settle()
        bench.engine.check()
    assert bench.store.stats().slabs_used <= 30
    resumed = [bench.ask(ids) for ids in sessions]
    assert all(length in some for length, some in zip(resumed, ends, strict=True))
    assert sum(length > 0 for length in resumed) > 5, resumed
    assert bench.ranking.evictions["ssd_bundle"] > 5
    bench.settle()
    bench.engine.check()
    bench.check_idle()
    bench.tier.close()


def test_the_host_lets_go_of_what_the_ssd_has_before_what_it_will_have(bench) -> None:
    older, newer = tokens((1, 512)), tokens((2, 512))
    bench.visit(older)
    bench.visit(newer)
    bench.off_device()
    node = next(node for node in all_nodes(bench) if matches(node, newer))
    bench.tier.kv_spill._start([node.id], 8)
    bench.drain()
    assert bench.ranking.clean_pages == 8
    bench.engine.cache.evict_host(512)
    bench.engine.check()
    assert bench.core.is_dead(node)
    assert bench.ask(newer) == len(newer), "it comes back from the SSD"
    assert bench.ask(older) == len(older), "the SSD did not have it yet"
    bench.engine.cache.evict_host(1 << 20)
    bench.engine.check()
    assert bench.engine.arena.free_pages == bench.engine.arena.total_pages, "a reserve is no condition"


def test_clean_kv_above_kv_that_only_the_host_has_is_no_reserve(bench) -> None:
    whole = tokens((1, 512 + PAGE))
    bench.visit(whole[:512])
    bench.off_device()
    node = next(node for node in all_nodes(bench) if matches(node, whole))
    bench.tier.kv_spill._start([node.id], 8)
    bench.drain()
    assert bench.ranking.clean_pages == 8
    bench.visit(whole)
    bench.off_device()
    bench.engine.check()
    assert bench.ranking.clean_pages == 0, "the last page would have to go first"
    (leaf,) = node.children.values()
    bench.tier.kv_spill._start([leaf.id], 1)
    bench.drain()
    bench.engine.check()
    assert bench.ranking.clean_pages == 9
    bench.engine.cache.evict_host(PAGE)
    bench.engine.check()
    assert bench.core.is_dead(leaf) and bench.ranking.clean_pages == 8


def test_a_session_of_many_turns_is_not_too_deep() -> None:
    """As many nodes as turns on one path, all clean: what happens at its end reaches up to its beginning."""
    turns = 600
    bench = Bench(kv_tokens=PAGE * (turns + 1), host_pages=turns + 32)
    ids = tokens((1, PAGE * turns))
    bench.engine.insert(ids)
    bench.engine.settle()
    for turn in reversed(range(1, turns)):
        bench.match(ids[: PAGE * turn])
    bench.off_device()
    nodes = all_nodes(bench)
    assert len(nodes) == turns
    ssd = bench.ranking.ssd
    for node in nodes:
        ssd.place_extent(b"%032d" % node.id, node.id, Piece(b"%032d" % node.id, 0, 0, 1))
    assert bench.ranking.clean_pages == turns
    leaf = nodes[-1]
    ssd.gone(Key(b"%032d" % leaf.id, RecordKind.KV), False, 1)
    assert bench.ranking.clean_pages == 0
    ssd.incomplete.clear()
    ssd.place_extent(b"%032d" % leaf.id, leaf.id, Piece(b"%032d" % leaf.id, 0, 0, 1))
    assert bench.ranking.clean_pages == turns
    bench.engine.cache.evict_host(1 << 20)
    assert bench.dead() == turns
    ssd.gone(Key(b"%032d" % nodes[0].id, RecordKind.KV), False, 1)
    bench.tier.tick()
    assert not all_nodes(bench), "what comes after lost KV is of no use"
    bench.engine.check()
    bench.tier.close()


@pytest.mark.parametrize("seed", range(6))
def test_any_history_keeps_every_invariant(seed: int) -> None:
    draw = random.Random(seed)
    bench = Bench(slabs=draw.choice([20, 60, 400]), buffers=draw.choice([8, 24]))
    sessions: list[array] = []
    for _ in range(120):
        action = draw.random()
        if action < 0.3 or not sessions:
            sessions.append(tokens((draw.randrange(10_000), PAGE * draw.randrange(1, 12))))
            bench.visit(sessions[-1])
        elif action < 0.5:
            index = draw.randrange(len(sessions))
            if len(sessions[index]) < 1600:
                sessions[index] = sessions[index] + tokens(
                    (draw.randrange(10_000), PAGE * draw.randrange(1, 5))
                )
            bench.visit(sessions[index])
        elif action < 0.65:
            whole = draw.choice(sessions)
            cut = PAGE * draw.randrange(1, len(whole) // PAGE + 1)
            sessions.append(whole[:cut] + tokens((draw.randrange(10_000), PAGE)))
            bench.visit(sessions[-1])
        elif action < 0.85:
            whole = draw.choice(sessions)
            bench.ask(whole[: PAGE * draw.randrange(1, len(whole) // PAGE + 1)])
        elif action < 0.95:
            bench.off_device()
        else:
            bench.engine.cache.evict_host(PAGE * draw.randrange(1, 30))
        for _tick in range(draw.randrange(4)):
            bench.tier.tick()
        bench.engine.check()
    bench.settle()
    bench.off_device()
    bench.engine.cache.evict_host(1 << 20)
    bench.tier.tick()
    bench.engine.check()
    bench.check_idle()
    bench.tier.close()
