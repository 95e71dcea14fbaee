"""Short lives of copies on a device that remembers (`tests.copy.fake_device`): what the ordering contract is checked on.

Each scenario runs the adapter's own code; what the model, the store and the tree would do with the same memory is said by
the scenario itself. It ends with the bytes compared, for waits whose lack is no race but a copy that goes astray.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache import l2_transfer
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.adapter.arena_face import ArenaFace
from sglang_histate.adapter.capture import CaptureRow, ForwardCapture
from sglang_histate.adapter.egress import LayerEgress
from sglang_histate.adapter.packed_copies import PackedCopies, slot_copies
from sglang_histate.adapter.tree_attach import Attach, attach_host_state
from sglang_histate.config import CheckpointDtype
from sglang_histate.copy.cuda_engine import BatchEngine, LoopEngine
from sglang_histate.copy.packing import Packing
from sglang_histate.store.records import RecordPool
from tests.copy.fake_device import DeviceKernels, FakeDevice, FakeDriver, Watch

from .engine import PAGE, Engine, build, request, tokens
from .test_capture import LAYERS, LAYOUT, Forward, state
from .test_kv_ssd import Bench
from .test_tier import Alone, Rank, finished

MAMBA, FULL = ComponentType.MAMBA, ComponentType.FULL
CPU = torch.device("cpu")
LOST = 0xEE  # what a record holds once it belongs to nobody
Scenario = Callable[[FakeDevice, Any], None]


class _Lengths(Forward):
    """A forward pass whose layers write the same buffers, as memory is used again on a device."""

    def __init__(self, device: FakeDevice, lengths: list[int], seed: int, on_device: bool) -> None:
        super().__init__(lengths, None, seed)
        self.device, self.stream = device, device.Stream()
        self.values = {
            layer: (self.inputs(layer), self.chunk_states(layer), self.pool(layer)) for layer in LAYERS
        }
        self.buffers = [one.clone() for one in self.values[LAYERS[0]]]
        if on_device:
            device.on_device(*self.buffers, self.slots)

    def run(self, capture: ForwardCapture) -> None:
        from sglang_histate.adapter import hooks

        batch = self.batch(capture)
        raw, h, pool = self.buffers
        with self.device.stream(self.stream):
            for layer in LAYERS:
                found = _Layer(layer)
                values = self.values[layer]
                raw.copy_(values[0])
                hooks.capture_inputs(self.backend, found, batch, raw)
                h.copy_(values[1])
                pool.copy_(values[2])
                hooks.capture_states(found, batch, h, pool, self.slots)
            hooks.finish_capture(batch)


@dataclasses.dataclass
class _Layer:
    layer_id: int


def captures(
    device: FakeDevice,
    monkeypatch: Any,
    encoding: CheckpointDtype = CheckpointDtype.NATIVE,
    flush: bool = False,
    on_device: bool = True,
) -> None:
    """Two forward passes through a ring that holds less than one of them, published or flushed."""
    monkeypatch.setattr("sglang.srt.runtime_context.mamba_cache_chunk_size", lambda: PAGE)
    layout = dataclasses.replace(LAYOUT, encoding=encoding)
    if on_device:
        engine = BatchEngine(FakeDriver(device))
        egress = LayerEgress(CPU, layout.codec, engine, stage_bytes=1200, streams=device)
        device.on_device(egress._ring._memory)
    else:
        device.patch(monkeypatch)
        egress = LayerEgress(CPU, layout.codec, LoopEngine(FakeDriver(device, on_host=True)))
    places = [(0, 64), (0, 192), (1, 64), (2, 128)]
    pool = RecordPool(layout.record_layout(), 2 * len(places))
    pool.memory[:] = 0
    forward = _Lengths(device, [300, 64, 200], 3, on_device)
    started: list[ForwardCapture] = []

    def publish() -> None:
        while started and started[0].done():
            for row in started.pop(0).rows:
                check_record(layout, row)
                device.host_reads(row.record.payload, "the store writes a record")
                give_away(device, row.record.payload)

    with Watch(device):
        for _ in range(2):
            records = [pool.acquire() for _ in places]
            rows = [
                CaptureRow(row, offset, offset, bytes(32), record)  # type: ignore[arg-type]
                for (row, offset), record in zip(places, records, strict=True)
            ]
            started.append(ForwardCapture(rows, layout, egress))
            forward.run(started[-1])
            publish()
        if flush:
            taken = [row.record.payload for capture in started for row in capture.rows]
            with device.may_wait():
                for capture in started:
                    capture.drain()
            for payload in taken:
                give_away(device, payload)
            device.finish()
            assert all((payload == LOST).all() for payload in taken)
            return
    device.finish()
    publish()
    assert not started


def check_record(layout: Any, row: CaptureRow) -> None:
    for index, views in enumerate(layout.record_views(row.record.payload)):
        wanted = torch.full(layout.temporal_shape, state(LAYERS[index], row.batch_row, row.offset))
        parts = [part[0] for part in layout.codec.encode(wanted[None])]
        assert all(torch.equal(found, part) for found, part in zip(views.temporal, parts, strict=True))


def give_away(device: FakeDevice, payload: Any) -> None:
    """The memory belongs to somebody else from now on."""
    device.host_writes(payload, "a record is used again")
    payload[:] = LOST


def packing_of(encoding: CheckpointDtype) -> Packing:
    """Return what a GPU has for records of that encoding."""
    if encoding is CheckpointDtype.NATIVE:
        return Packing("none", "native")
    kernels = DeviceKernels("on a device that remembers")
    return Packing(kernels.name, kernels.reason, kernels)


def output_ends(
    device: FakeDevice,
    monkeypatch: Any,
    encoding: CheckpointDtype = CheckpointDtype.NATIVE,
    end: str = "tick",
) -> None:
    """Two finished requests, whose states are published, flushed or landed before the exit."""
    monkeypatch.setattr("sglang.srt.runtime_context.mamba_cache_chunk_size", lambda: PAGE)
    rank = Rank(Alone(), encoding=encoding)
    cache, store = rank.engine.cache, rank.store
    states = cache.req_to_token_pool.mamba_pool.mamba_cache
    temporal, conv = states.temporal, states.conv[0]
    forward = device.Stream()
    copies = slot_copies(
        *(rank.engine.layout, temporal, conv),
        packing=packing_of(encoding),
        engine=BatchEngine(FakeDriver(device)),
        records=store.records.total,
        records_pinned=True,
        forward_stream=forward,
        streams=device,
    )
    if isinstance(copies, PackedCopies):
        device.on_device(copies._packer._staged, copies._packer._flag)
    rank.tier.output_ends._copies = copies
    device.on_device(temporal, conv)
    slots: dict[Any, int] = {}
    lost: list[Any] = []
    real_put, real_release, real_unlock = store.put, store.release_record, cache.dec_lock_ref

    def put(key: bytes, position: int, record: Any, **namespace: Any) -> Any:
        device.host_reads(record.payload, "the store writes a record")
        layout = rank.engine.layout
        wanted = layout.codec.encode(torch.full((1, *layout.temporal_shape), 1.0 + len(rank.published)))
        for index, views in enumerate(layout.record_views(record.payload)):
            assert (views.conv == position + index).all(), "not the state that was to be stored"
            assert all(torch.equal(a, b[0]) for a, b in zip(views.temporal, wanted, strict=True))
        return real_put(key, position, record, **namespace)

    def release(record: Any) -> None:
        give_away(device, record.payload)
        lost.append(record.payload)
        real_release(record)

    def unlock(node_id: Any, receipt: Any) -> Any:
        for tensor in (temporal, conv) if node_id in slots else ():
            for layer in tensor:
                device.host_writes(layer[slots[node_id]], "a slot is used again")
        return real_unlock(node_id, receipt)

    monkeypatch.setattr(store, "put", put)
    monkeypatch.setattr(store, "release_record", release)
    monkeypatch.setattr(cache, "dec_lock_ref", unlock)
    for seed in (1, 2):
        req = finished(rank, tokens((seed, 512)))
        slot = cache.tree_core.get_component_device_value(req.last_node, MAMBA)
        slots[req.last_node] = row = int(slot[0])
        device.on_device(slot)
        device.kernel("the tree takes a slot", writes=[slot])
        # The last forward pass wrote the state, the scheduler's own stream the window.
        with device.stream(forward):
            device.kernel("decode", writes=list(temporal[:, row]))
        device.kernel("the scheduler moves a window", writes=list(conv[:, row]))
        temporal[:, row] = float(seed)
        for layer in range(len(conv)):
            conv[layer, row] = 512 + layer
        with Watch(device):
            rank.tier.output_ends.take(req)
            rank.tier.tick()
        if seed == 2 and end != "tick":
            break  # its number is still on its way, or the record
        device.finish()
        with Watch(device):
            rank.tier.tick()  # the number has come and the copy is queued, or a packed record has arrived
    if end == "reset":
        with device.may_wait(), Watch(device):
            rank.tier.output_ends.reset()
        device.finish()
        with Watch(device):
            rank.tier.output_ends.done_count()
        on_their_way = 2 if encoding is CheckpointDtype.NATIVE else 1
        assert len(lost) == on_their_way and all((payload == LOST).all() for payload in lost)
    elif end == "land":
        with device.may_wait(), Watch(device):
            rank.tier.land()
        assert len(rank.published) == 2
    else:
        device.finish()
        with Watch(device):
            rank.tier.tick()
        assert len(rank.published) == 2 and not rank.tier.output_ends
    store.close()


class Transfers:
    """SGLang's own controller on the device: KV and a state there and back."""

    def __init__(self, device: FakeDevice, monkeypatch: Any) -> None:
        l2_transfer._timing_events_supported()  # remembers the answer for good: ask before anything is replaced
        monkeypatch.setattr(l2_transfer, "device_module", device)
        monkeypatch.setattr(cache_controller, "device_module", device)
        self.device = device
        self.engine: Engine = build(copies=BatchEngine(FakeDriver(device)))
        self.engine.host_kv.shared.host_engine = LoopEngine(FakeDriver(device, on_host=True))
        self.cache = self.engine.cache
        controller = self.cache.cache_controller
        self.forward = device.Stream()
        controller.load_fence_stream = controller.write_fence_stream = self.forward
        kv = self.engine.kv.get_kvcache().full_kv_pool
        self.kv = [*kv.k_buffer, *kv.v_buffer]
        states = self.cache.req_to_token_pool.mamba_pool.mamba_cache
        self.states = [*states.temporal, *states.conv[0]]
        device.on_device(*self.kv, states.temporal, states.conv[0])
        real = ArenaFace.prepare_transfer_indices

        def prepare(face: Any, host: Any, rows: Any, backend: str) -> Any:
            forward = self.forward.actor.name
            before = device.host.clock.get(forward, 0)
            device.fetch(rows)
            if device.host.clock.get(forward, 0) > before:
                device.host_waits.append("the scheduler thread waits for the forward pass")
            return real(face, host, rows, backend)

        monkeypatch.setattr(ArenaFace, "prepare_transfer_indices", prepare)
        for allocator in (self.engine.kv, self.engine.states):
            monkeypatch.setattr(allocator, "alloc", partial(self._alloc, allocator.alloc))

    def _alloc(self, real: Any, *arguments: Any) -> Any:
        """Numbers of rows are made by the scheduler's own stream."""
        rows = real(*arguments)
        if rows is not None:
            self.device.kernel("an allocation", writes=[rows])
        return rows

    def forward_writes(self, what: str, *tensors: torch.Tensor) -> None:
        with self.device.stream(self.forward):
            self.device.kernel(what, writes=tensors)

    def arena_is_given_away(self) -> None:
        self.device.host_writes(self.engine.arena.memory, "the arena is emptied")

    def acknowledge(self) -> None:
        self.engine.settle()
        self.device.finish()
        self.engine.settle()


def transfers(device: FakeDevice, monkeypatch: Any, flush: bool = False) -> None:
    """KV is backed up and evicted; it and a state from elsewhere are loaded for a request, whose forward pass runs."""
    life = Transfers(device, monkeypatch)
    engine, cache = life.engine, life.cache
    ids = tokens((1, 512))
    life.forward_writes("the prefill", *life.kv, *life.states)
    engine.insert(ids)
    engine.settle()
    if flush:
        with device.may_wait():
            cache.reset()
        life.arena_is_given_away()
        return
    life.acknowledge()
    device.host_reads(engine.arena.memory, "a spill reads the host's KV")
    slot = engine.slots.alloc()
    assert slot is not None
    engine.fill_host_state(slot, 3.5, 1.25)
    device.host_writes(engine.arena.memory, "a reader fills the host")
    assert attach_host_state(cache, RadixKey(ids[:256]), slot)[0] is Attach.ATTACHED
    life.acknowledge()
    engine.evict_kv(4096)
    life.forward_writes("others in the same rows", *life.kv)
    req = request(tokens((1, 700)))
    req.init_next_round_input(cache)
    loaded, req.last_node = cache.init_load_back(
        InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req)
    )
    assert loaded == 256
    row = int(req.kv.mamba_pool_idx)
    device.kernel("the scheduler clears the request's slot", writes=[layer[row] for layer in life.states])
    consumer = cache.ready_to_load_host_cache()
    counter = cache.cache_controller.layer_done_counter
    counter.set_consumer(consumer)
    with device.stream(life.forward):
        for layer in range(cache.cache_controller.transfer_layer_id_max):
            counter.wait_until(layer)
        device.kernel("the next forward pass", writes=[*life.kv, *life.states])
    life.acknowledge()
    life.arena_is_given_away()
    states = cache.req_to_token_pool.mamba_pool.mamba_cache
    assert (states.temporal[:, req.kv.mamba_pool_idx] == 3.5).all()


def spills(device: FakeDevice, monkeypatch: Any, end: str = "tick") -> None:
    """KV of the host goes into an extent; its pages are used again when it is there, or when all is emptied."""
    device.patch(monkeypatch)
    bench = Bench()
    shared = bench.engine.host_kv.shared
    shared.host_engine = LoopEngine(FakeDriver(device, on_host=True))
    ids = tokens((1, 512))
    bench.visit(ids)
    bench.off_device()
    arena = bench.engine.arena
    real_put, real_unlock = bench.store.put_extent, bench.engine.cache.dec_host_lock_ref
    real_release = bench.store.release_record
    stored, lost = [], []

    def put_extent(keys: Any, at_token: int, record: Any, **rest: Any) -> Any:
        device.host_reads(record.kv_pages, "the store writes an extent")
        stored.append(at_token)
        return real_put(keys, at_token, record, **rest)

    def unlock(node_id: Any, receipt: Any) -> Any:
        full = bench.core.node_by_id(node_id).component_data[FULL]
        result = real_unlock(node_id, receipt)
        for page in (full.host_value[::PAGE] // PAGE).tolist() if full.host_lock_ref == 0 else ():
            device.host_writes(
                arena.memory[page * arena.page_bytes :][: arena.page_bytes], "a page is used again"
            )
        return result

    def release(record: Any) -> None:
        device.host_writes(record.kv_pages, "a record is used again")
        lost.append(record)
        real_release(record)

    monkeypatch.setattr(bench.store, "put_extent", put_extent)
    monkeypatch.setattr(bench.store, "release_record", release)
    monkeypatch.setattr(bench.engine.cache, "dec_host_lock_ref", unlock)
    nodes = [node.id for node in bench.engine.nodes()]
    bench.tier.kv_spill.copy(nodes)
    assert len(bench.tier.kv_spill) > 0
    if end == "reset":
        with device.may_wait():
            bench.tier.kv_spill.reset()
        assert lost
    elif end == "land":
        with device.may_wait():
            bench.tier.kv_spill.finish(len(bench.tier.kv_spill))
        assert stored
    else:
        bench.tier.kv_spill.finish(bench.tier.kv_spill.done_count())
        device.finish()
        bench.tier.kv_spill.finish(bench.tier.kv_spill.done_count())
        assert stored and len(lost) == 0 and len(bench.tier.kv_spill) == 0
    bench.tier.close()


SCENARIOS: dict[str, Scenario] = {
    "captures": captures,
    "captures in int8": partial(captures, encoding=CheckpointDtype.INT8),
    "captures in bf16": partial(captures, encoding=CheckpointDtype.BF16),
    "captures that are flushed": partial(captures, flush=True),
    "captures on the CPU engine": partial(captures, encoding=CheckpointDtype.INT8, on_device=False),
    "captures on the CPU engine that are flushed": partial(
        captures, encoding=CheckpointDtype.INT8, on_device=False, flush=True
    ),
    "output ends": output_ends,
    "output ends in int8": partial(output_ends, encoding=CheckpointDtype.INT8),
    "output ends in bf16": partial(output_ends, encoding=CheckpointDtype.BF16),
    "output ends that are flushed": partial(output_ends, end="reset"),
    "output ends before the exit": partial(output_ends, end="land"),
    "output ends in int8 that are flushed": partial(output_ends, encoding=CheckpointDtype.INT8, end="reset"),
    "output ends in int8 before the exit": partial(output_ends, encoding=CheckpointDtype.INT8, end="land"),
    "backup and restore": transfers,
    "a backup that is flushed": partial(transfers, flush=True),
    "spills": spills,
    "spills that are flushed": partial(spills, end="reset"),
    "spills before the exit": partial(spills, end="land"),
}
