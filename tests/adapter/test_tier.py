"""One tick: two ranks with different disks publish the same keys in the same order; accounting; output ends."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.adapter.accounting import Accounting
from sglang_histate.adapter.capture import ForwardCapture
from sglang_histate.adapter.counters import Counters, Drop
from sglang_histate.adapter.egress import LayerEgress
from sglang_histate.adapter.fault_in import FaultIns
from sglang_histate.adapter.final_states import FinalStates
from sglang_histate.adapter.hinted import HintedSessions
from sglang_histate.adapter.history import HistoryTier
from sglang_histate.adapter.host_history import HostHistory
from sglang_histate.adapter.kept_sessions import KeptSessions
from sglang_histate.adapter.kv_spill import KvSpill
from sglang_histate.adapter.output_ends import OutputEnds
from sglang_histate.adapter.page_keys import PageKeys
from sglang_histate.adapter.planner import CapturePlanner
from sglang_histate.adapter.ranks import RankAgreement
from sglang_histate.adapter.request_state import state_of
from sglang_histate.adapter.slot_copies import SlotCopies
from sglang_histate.adapter.tier import SsdTier
from sglang_histate.adapter.trust import Trust
from sglang_histate.adapter.verification import Verification
from sglang_histate.policy.interval import parse_interval
from sglang_histate.policy.retention import Retention
from sglang_histate.policy.structure import Marker, Part, Structure
from sglang_histate.store.fault_plan import FaultPlan
from sglang_histate.store.faults import FaultyDisk
from tests.store.fakes import FakeDisk

from .conftest import GPU
from .engine import PAGE, build, request, tokens
from .stores import open_store, put, wait_threads

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")
MAMBA = ComponentType.MAMBA


class Agreement:
    """The minimum over ranks that run in threads of one process. All calls must come in the same order everywhere."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=10)
        self._lock = threading.Lock()
        self._values: list[list[int]] = []

    def minimum(self, values) -> list[int]:
        with self._lock:
            self._values.append(list(values))
        self._barrier.wait()
        gathered = list(self._values)
        assert len({len(one) for one in gathered}) == 1, f"ranks ask for different things: {gathered}"
        if self._barrier.wait() == 0:
            self._values.clear()
        self._barrier.wait()
        return [min(column) for column in zip(*gathered, strict=True)]


USER, ASSISTANT = 900, 901
"""Tokens that begin a message."""

STRUCTURE = Structure([Marker((USER,), Part.USER), Marker((ASSISTANT,), Part.ASSISTANT)])


class Alone:
    def minimum(self, values) -> list[int]:
        return list(values)


class Rank:
    """Tree, store and tier of one rank."""

    def __init__(
        self,
        agreement,
        disk=None,
        *,
        number: int = 0,
        verify_rate: float = 0.0,
        buffers: int = 12,
        slabs: int = 24,
        min_gain: int = PAGE,
        limits=None,
        kept_bytes: int = 1 << 20,
        structure: Structure | None = STRUCTURE,
        cheapest: bool = False,
        **engine,
    ) -> None:
        self.number = number
        self.engine = build(**engine)
        self.store = open_store(
            self.engine.layout,
            disk=disk,
            buffers=buffers,
            slabs=slabs,
            kv_page_bytes=self.engine.arena.page_bytes,
            ranking=self.engine.ranking,
            limits=limits,
        )
        self.counters = Counters()
        cache, layout = self.engine.cache, self.engine.layout
        states = cache.req_to_token_pool.mamba_pool.mamba_cache
        cpu = torch.device("cpu")
        trust = Trust(self.store, (), Alone())
        hinted = HintedSessions(
            cache.tree_core,
            self.engine.ranking,
            KeptSessions(self.engine.ranking, Retention(kept_bytes), token_bytes=64, state_bytes=100),
            self.counters,
            structure=structure,
            page_size=PAGE,
            grid=PAGE,
        )
        history = None
        if cheapest:
            cache.components[MAMBA].keeps_host_only = True
            history = HistoryTier(
                self.engine.ranking,
                self.store,
                self.engine.arena,
                state_bytes=layout.image_bytes,
                stored_bytes=layout.stored_bytes,
                journal=engine.get("journal"),
            )
        self.tier = SsdTier(
            store=self.store,
            hinted=hinted,
            planner=CapturePlanner(
                interval=parse_interval("fixed:256"),
                state_tokens=100.0,
                ranking=self.engine.ranking,
                page_size=PAGE,
                grid=PAGE,
                layout=layout,
                store=self.store,
                egress=LayerEgress(cpu, layout.codec),
                counters=self.counters,
                absences=self.engine.ranking.absences,
                hinted=hinted,
                history=history,
            ),
            accounting=Accounting(
                self.store,
                self.engine.ranking.absences,
                trust,
                self.counters,
                page_size=PAGE,
                min_gain_tokens=min_gain,
            ),
            fault_ins=FaultIns(
                cache,
                self.store,
                self.engine.slots,
                kv_face=self.engine.host_kv,
                page_size=PAGE,
                min_gain_tokens=min_gain,
                counters=self.counters,
            ),
            output_ends=OutputEnds(
                cache,
                self.store,
                layout,
                copies=SlotCopies(layout, states.temporal, states.conv[0]),
                grid=PAGE,
                page_size=PAGE,
                end_share=self.engine.ranking.end_share,
                counters=self.counters,
            ),
            final_states=FinalStates(cache, self.store, self.engine.slots),
            history=HostHistory(cache, self.store, self.engine.slots, self.counters),
            kv_spill=KvSpill(cache, self.engine.ranking, self.store, self.engine.host_kv, self.counters),
            verification=Verification(
                rate=verify_rate,
                store=self.store,
                layout=layout,
                trust=trust,
                agreement=agreement,
                counters=self.counters,
                page_size=PAGE,
            ),
            agreement=agreement,
            counters=self.counters,
            cache=cache,
            page_size=PAGE,
        )
        cache.tier = self.tier
        self.published: list[bytes] = []
        real = self.store.put

        def noted(key, position, record, **namespace):
            self.published.append(key)
            return real(key, position, record, **namespace)

        self.store.put = noted

    def prefill(self, req, start: int, end: int, done_after: int = 0) -> ForwardCapture | None:
        """One forward pass over req[start:end]. Its copies arrive after `done_after` looks."""
        req.prefix_len, req.extend_end = start, end
        capture = self.engine.cache.plan_capture([req])
        if capture is not None:
            for row in capture.rows:
                for views in self.engine.layout.views(row.record.payload):
                    views.temporal.fill_(row.position + self.number / 2)
                    views.conv.fill_(row.position)
            looks = iter(range(done_after))
            capture.done = lambda: next(looks, None) is None
        return capture

    def idle(self) -> bool:
        return not (
            self.tier._captures
            or self.tier.output_ends
            or self.tier.kv_spill
            or self.tier.history
            or self.store.outstanding
        )

    def drain(self) -> None:
        while not self.idle():
            wait_threads(self.store)
            self.tier.tick()

    def check_idle(self) -> None:
        assert self.idle() and len(self.tier.fault_ins) == 0
        assert self.store.records.free == self.store.records.total
        self.engine.check()


@pytest.fixture
def rank():
    made = Rank(Alone())
    yield made
    made.store.close()


def test_a_capture_is_published_when_its_copies_have_arrived(rank) -> None:
    req = request(tokens((1, 600)))
    rank.prefill(req, 0, 600, done_after=2)
    for published in (0, 0, 3):
        rank.tier.tick()
        assert len(rank.published) == published
    assert rank.counters.captured == rank.counters.planned == 3
    keys = PageKeys(PAGE, None, None)
    assert rank.published == [keys.at(req.full_untruncated_fill_ids, p) for p in (256, 512, 576)]
    assert rank.store.lookup(rank.published[0]).at_token == 256
    rank.drain()
    rank.check_idle()


def test_captures_are_published_in_the_order_of_their_forwards(rank) -> None:
    first, second = request(tokens((1, 300))), request(tokens((2, 300)))
    rank.prefill(first, 0, 300, done_after=1)
    rank.prefill(second, 0, 300)
    rank.tier.tick()
    assert rank.published == [], "the second does not overtake the first"
    rank.drain()
    keys = [PageKeys(PAGE, None, None).at(r.full_untruncated_fill_ids, 256) for r in (first, second)]
    assert rank.published == keys


def test_at_the_end_nothing_is_published_whose_forward_pass_never_ran(rank) -> None:
    ran, planned = request(tokens((1, 300))), request(tokens((2, 300)))
    rank.prefill(ran, 0, 300)
    planned.prefix_len, planned.extend_end = 0, 300
    capture = rank.engine.cache.plan_capture([planned])
    assert capture is not None and not capture.done()
    rank.tier.land()
    assert rank.published == [PageKeys(PAGE, None, None).at(ran.full_untruncated_fill_ids, 256)]
    assert rank.counters.dropped[Drop.CACHE_RESET] == len(capture.rows)
    rank.drain()
    rank.check_idle()


def test_a_tick_with_nothing_under_way_asks_nobody(rank) -> None:
    rank.tier._agreement = None
    rank.tier.tick()


def test_an_aborted_request_leaves_a_good_checkpoint(rank) -> None:
    """Its forward ran: the state is that of its tokens, whatever became of the request."""
    req = request(tokens((1, 300)))
    rank.prefill(req, 0, 300)
    rank.engine.cache.release_aborted_request(req.cache_request_handle)
    rank.drain()
    assert len(rank.store._index) == 1
    rank.check_idle()


def test_flush_drops_what_is_under_way(rank) -> None:
    rank.engine.insert(tokens((1, 1024)))
    rank.engine.settle()
    rank.prefill(request(tokens((2, 600))), 0, 600, done_after=100)
    put(rank.store, rank.engine.layout, PageKeys(PAGE, None, None).at(tokens((1, 1024)), 512), 512, 1.0)
    rank.tier.fault_ins.version += 1
    assert rank.engine.cache.request_ready(request(tokens((1, 700)))) is False
    rank.engine.cache.reset()
    rank.engine.kv.clear()
    rank.engine.states.clear()
    assert rank.counters.dropped[Drop.CACHE_RESET] == 3 and len(rank.store._index) == 0
    rank.drain()
    rank.check_idle()


def together(work: list[Callable[[], object]]) -> None:
    """Call all of `work` at the same time, each on its own thread."""
    errors: list[BaseException] = []

    def run(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a rank hangs"
    assert not errors, errors


def run_ticks(ranks: list[Rank]) -> None:
    together([rank.tier.tick for rank in ranks])


def same(values: list):
    assert all(value == values[0] for value in values), values
    return values[0]


@pytest.mark.parametrize(("fault_rate", "seed"), [(0.0, 1), (0.0, 2), (0.3, 3)])
def test_two_ranks_with_different_disks_stay_alike(fault_rate, seed) -> None:
    agreement = Agreement(2)
    disks = [
        FaultyDisk(FakeDisk(), FaultPlan(), seed=f"tp{number}", delay_s=delay_s)
        for number, delay_s in enumerate((0.0002, 0.006))
    ]
    ranks = [Rank(agreement, disk, number=number, slabs=10) for number, disk in enumerate(disks)]
    for disk in disks:
        disk.plan = FaultPlan.bad_reads(fault_rate)
    draw = random.Random(seed)
    bases = [tokens((base, 1024)) for base in (1, 2, 3)]
    waiting: list[list] = []
    for step in range(160):
        action, base = draw.random(), draw.choice(bases)
        if action < 0.25:
            cut, tail, delays = (
                draw.randrange(1, 1025),
                draw.randrange(40, 60),
                [draw.randrange(6), draw.randrange(6)],
            )
            reqs = [request(base[:cut] + tokens((tail, 130))) for _ in ranks]
            end = len(reqs[0].full_untruncated_fill_ids)
            captures = [r.prefill(req, 0, end, d) for r, req, d in zip(ranks, reqs, delays, strict=True)]
            same([c and [(row.key, row.record.buffer_id) for row in c.rows] for c in captures])
        elif action < 0.35 and same([r.engine.kv.available_size() >= 1024 for r in ranks]):
            if same([r.engine.states.available_size() for r in ranks]):
                for r in ranks:
                    r.engine.insert(base)
                    r.engine.settle()
        elif action < 0.6:
            ids = base[: draw.randrange(65, 1025)] + tokens((draw.randrange(60, 80), 70))
            reqs = [request(ids) for _ in ranks]
            same([r.engine.cache.request_ready(req) for r, req in zip(ranks, reqs, strict=True)])
            waiting.append(reqs)
        elif action < 0.65 and waiting:
            for r, req in zip(ranks, waiting.pop(draw.randrange(len(waiting))), strict=True):
                r.engine.cache.release_aborted_request(req.cache_request_handle)
        elif action < 0.7:
            tokens_out = 64 * draw.randrange(1, 9)
            for r in ranks:
                r.engine.evict_kv(tokens_out)
        elif action < 0.72:
            for r in ranks:
                r.engine.cache.reset()
                r.engine.kv.clear()
                r.engine.states.clear()
        run_ticks(ranks)
        time.sleep(0.001)
        for reqs in list(waiting):
            if same([r.engine.cache.request_ready(req) for r, req in zip(ranks, reqs, strict=True)]):
                waiting.remove(reqs)
        same([r.published for r in ranks])
        same([r.store.logical_state() for r in ranks])
        same([r.tier.fault_ins.version for r in ranks])
        same([sorted(r.tier.fault_ins._by_key) for r in ranks])
        same([r.engine.host_states.available_size() for r in ranks])
        # A read on its way holds a host slot that is not in the tree yet.
        if step % 5 == 0 and not any(len(r.tier.fault_ins) + len(r.tier.final_states) for r in ranks):
            for r in ranks:
                r.engine.check()
    for reqs in waiting:
        for r, req in zip(ranks, reqs, strict=True):
            r.engine.cache.release_aborted_request(req.cache_request_handle)
    while not all(r.idle() for r in ranks):
        for r in ranks:
            wait_threads(r.store)
        run_ticks(ranks)
    assert len(ranks[0].published) > 20 and ranks[0].counters.fault_ins > 3
    for r in ranks:
        r.check_idle()
        r.store.close()


def test_one_rank_needs_no_collective() -> None:
    assert RankAgreement(SimpleNamespace(tp_world_size=1, attn_cp_group=None, attn_tp_group=None)).minimum(
        [3, 0, 7]
    ) == [3, 0, 7]


def test_several_ranks_reduce_once() -> None:
    seen = []

    def reduce(tensor, op) -> None:
        seen.append((tensor.tolist(), op))
        tensor.copy_(torch.minimum(tensor, torch.tensor([1, 9, 2])))

    cache = SimpleNamespace(
        tp_world_size=2,
        tp_group="tp",
        attn_cp_group=None,
        attn_tp_group=None,
        _all_reduce_attn_groups=reduce,
    )
    assert RankAgreement(cache).minimum([3, 0, 7]) == [1, 0, 2]
    assert seen == [([3, 0, 7], torch.distributed.ReduceOp.MIN)]


def test_ranks_that_evicted_otherwise_do_not_agree(rank) -> None:
    assert rank.tier.ranks_agree()
    rank.tier.ranking.digest = 7
    assert rank.tier.ranks_agree()
    rank.tier._agreement = SimpleNamespace(minimum=lambda mine: [min(mine[0], 5), min(mine[1], -5)])
    assert not rank.tier.ranks_agree()


# Accounting


def account(rank, **values):
    req = request(tokens((1, 800)))
    req.prefix_len, req.extend_end = values.pop("prefix_len"), 800
    state = state_of(req, PAGE)
    for name, value in values.items():
        setattr(state, name, value)
    req.last_node = rank.engine.cache.tree_core.root_node.id
    rank.tier._account(req)
    return req, state


@pytest.mark.parametrize(
    ("values", "device", "host", "ssd"),
    [
        (dict(prefix_len=0), 0, 0, 0),
        (dict(prefix_len=512), 512, 0, 0),
        (dict(prefix_len=512, attached=512), 512, 0, 512),
        (dict(prefix_len=512, attached=512, kv_loaded=128), 384, 128, 512),
        (dict(prefix_len=512, attached=512, kv_loaded=512), 0, 512, 512),
        (dict(prefix_len=512, attached=256), 512, 0, 0),
        (dict(prefix_len=128, kv_loaded=512), 0, 128, 0),
    ],
)
def test_what_a_request_resumed_from(rank, values, device, host, ssd) -> None:
    req, state = account(rank, **values)
    assert (req.cached_tokens_device, req.cached_tokens_host, state.restored_from_ssd) == (device, host, ssd)
    assert rank.counters.restored_tokens == ssd and rank.counters.restored_requests == (ssd > 0)


def test_a_request_is_accounted_for_once(rank) -> None:
    req, state = account(rank, prefix_len=512, attached=512)
    req.prefix_len = 640  # its next chunk
    rank.tier._account(req)
    assert state.restored_from_ssd == 512 and rank.counters.restored_requests == 1


# Output ends


def finished(rank, ids, *, position: int | None = None):
    """A request whose state at `ids` is in the tree, as `checkpoint_into_tree` leaves it."""
    rank.engine.insert(ids, state=float(len(ids)))
    rank.engine.settle()
    req = request(ids + tokens((9, 3)))
    req.init_next_round_input(rank.engine.cache, cow_mamba=False)
    assert req.prefix_len == len(ids)
    req.kv.cache_protected_len = len(ids) if position is None else position
    return req


def test_the_state_at_the_end_of_an_output_is_stored(rank) -> None:
    ids = tokens((1, 512))
    req = finished(rank, ids)
    rank.tier.output_ends.take(req)
    assert rank.engine.cache.mamba_protected_size() == 1, "the slot stays until its bytes have arrived"
    rank.engine.evict_states(1)
    assert rank.engine.nodes()[0].component_data[MAMBA].value is not None
    rank.drain()
    key = PageKeys(PAGE, None, None).at(ids, 512)
    assert rank.published == [key] and rank.store.lookup(key).at_token == 512
    ticket = rank.store.begin_read(key)
    wait_threads(rank.store)
    rank.store.poll()
    for views in rank.engine.layout.views(ticket.record.payload):
        assert (views.temporal == 512.0).all()
    rank.store.release(ticket)
    assert rank.engine.cache.mamba_protected_size() == rank.engine.cache.full_protected_size() == 0
    rank.check_idle()


def test_the_end_of_an_output_is_on_the_host_too(rank) -> None:
    """Its next turn needs no read when the device has forgotten it."""
    ids = tokens((1, 512))
    rank.tier.output_ends.take(finished(rank, ids))
    rank.drain()
    (node,) = rank.engine.nodes()
    slot = node.component_data[MAMBA].host_value
    for views in rank.engine.layout.views(rank.engine.host_states.read(int(slot[0]))):
        assert (views.temporal == 512.0).all()
    rank.engine.evict_kv(4096)
    rank.check_idle()
    before = rank.store.stats().reads_ok
    req = request(ids + tokens((9, 3)))
    assert rank.engine.cache.request_ready(req) and rank.engine.match(req).mamba_host_hit_length == 1
    assert rank.store.stats().reads_ok == before


def test_no_room_on_the_host_costs_nothing_but_the_copy(rank) -> None:
    ids = tokens((1, 512))
    req = finished(rank, ids)
    rank.engine.slots.alloc = lambda: None
    rank.tier.output_ends.take(req)
    rank.drain()
    assert rank.engine.nodes()[0].component_data[MAMBA].host_value is None
    assert rank.store.lookup(PageKeys(PAGE, None, None).at(ids, 512)) is not None
    rank.check_idle()


def test_a_flush_while_a_final_state_is_copied_to_the_host(rank) -> None:
    rank.tier.output_ends.take(finished(rank, tokens((1, 512))))
    rank.tier.tick()
    rank.engine.cache.reset()
    rank.engine.kv.clear()
    rank.engine.states.clear()
    rank.drain()
    assert rank.engine.host_states.held == 0
    rank.check_idle()


def test_an_output_end_is_taken_once(rank) -> None:
    ids = tokens((1, 512))
    req = finished(rank, ids)
    rank.tier.output_ends.take(req)
    rank.tier.output_ends.take(req)
    assert len(rank.tier.output_ends) == 1
    rank.drain()
    rank.tier.output_ends.take(req)
    assert len(rank.tier.output_ends) == 0 and rank.counters.output_ends == 1
    rank.check_idle()


def test_an_answer_that_fills_no_page_has_its_state_on_the_host_too(rank) -> None:
    """The state at the prompt's end is its final one; the forward pass has put it into the store."""
    ids = tokens((1, 512))
    req = finished(rank, ids)
    key = PageKeys(PAGE, None, None).at(ids, 512)
    put(rank.store, rank.engine.layout, key, 512, 7.0)
    rank.published.clear()
    rank.tier.output_ends.take(req)
    rank.drain()
    assert rank.published == [] and rank.counters.output_ends == 0, "nothing is copied or stored again"
    slot = rank.engine.nodes()[0].component_data[MAMBA].host_value
    for views in rank.engine.layout.views(rank.engine.host_states.read(int(slot[0]))):
        assert (views.temporal == 7.0).all()
    rank.tier.output_ends.take(req)
    assert len(rank.tier.output_ends) == 0, "it is there already"
    rank.engine.evict_kv(4096)
    rank.check_idle()


def test_a_flush_while_a_stored_end_waits_for_its_tick(rank) -> None:
    ids = tokens((1, 512))
    req = finished(rank, ids)
    put(rank.store, rank.engine.layout, PageKeys(PAGE, None, None).at(ids, 512), 512, 7.0)
    rank.tier.output_ends.take(req)
    assert len(rank.tier.output_ends) == 1
    rank.engine.cache.reset()
    rank.engine.kv.clear()
    rank.engine.states.clear()
    assert rank.counters.dropped[Drop.CACHE_RESET] == 0
    rank.drain()
    rank.check_idle()


def test_no_output_end_without_a_state_a_page_or_a_record(rank) -> None:
    ids = tokens((1, 512))
    req = finished(rank, ids, position=0)
    rank.tier.output_ends.take(req)
    req.kv.cache_protected_len = 500
    rank.tier.output_ends.take(req)
    req.kv.cache_protected_len = 512
    taken = [rank.store.acquire_record() for _ in range(rank.store.records.total)]
    rank.tier.output_ends.take(req)
    assert len(rank.tier.output_ends) == 0 and rank.counters.dropped[Drop.NO_RECORD] == 1
    for record in taken:
        rank.store.release_record(record)
    rank.engine.insert(tokens((1, 512), (2, 64)))
    rank.engine.settle()
    rank.engine.evict_states(1)  # the state at 512 is gone, its KV stays
    rank.tier.output_ends.take(req)
    assert len(rank.tier.output_ends) == 0
    rank.check_idle()


def test_flush_while_an_output_end_is_copied(rank) -> None:
    req = finished(rank, tokens((1, 512)))
    rank.tier.output_ends.take(req)
    rank.engine.cache.reset()
    rank.engine.kv.clear()
    rank.engine.states.clear()
    assert rank.counters.dropped[Drop.CACHE_RESET] == 1
    rank.check_idle()


def test_status_names_every_counter() -> None:
    counters = Counters()
    counters.drop(Drop.NO_RECORD, 2)
    found = counters.as_json()
    assert found["checkpoints_dropped_total"] == {
        "no_inflight_buffer": 2,
        "chunk_not_on_grid": 0,
        "cache_reset": 0,
        "ssd_refused": 0,
        "ssd_refused_host_too_dear": 0,
        "ssd_refused_no_place_on_host": 0,
        "not_copied_to_host": 0,
        "request_aborted": 0,
    }
    assert set(found["ssd_misses_total"].values()) == {0}
