"""Encoded records of slots: packed and copied, on a device that remembers and on a GPU, byte for byte as the codec has them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_histate.config import CheckpointDtype
from sglang_histate.copy import choose_engine, packing
from sglang_histate.copy.cuda_engine import LoopEngine
from sglang_histate.copy.kernels import NO_SUCH_SLOT, NOT_FINITE, PoolTable
from sglang_histate.copy.ordering import Rule, StreamLane
from sglang_histate.copy.packing import PIECE_BYTES, RecordPacker, choose_packing
from sglang_histate.copy.torch_engine import TorchEngine
from sglang_histate.copy.transfer import Copy
from tests.copy.fake_device import DeviceKernels, FakeDevice, FakeDriver, Watch

LOSSY = (CheckpointDtype.BF16, CheckpointDtype.INT8)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def pool_of(
    layers: int, slots: int, heads: int, rows: int, columns: int, gap: int = 0, seed: int = 1
) -> PoolTable:
    """Return random states and windows, `gap` numbers between slots."""
    numbers = torch.Generator().manual_seed(seed)
    temporal = torch.randn((layers, slots, heads * rows * columns + gap), generator=numbers)
    conv = torch.randn((layers, slots, 15 + gap), generator=numbers).to(torch.bfloat16)
    return PoolTable(
        temporal[..., : heads * rows * columns].unflatten(-1, (heads, rows, columns)),
        conv[..., :15].unflatten(-1, (5, 3)),
    )


def by_the_codec(pool: PoolTable, slot: int, encoding: CheckpointDtype) -> torch.Tensor:
    """Return the record of `slot`, part by part, as captures and threads make it."""
    form = pool.form(encoding)
    record = torch.zeros(form.record_bytes, dtype=torch.uint8)
    for layer in range(pool.layers):
        parts = [part[0] for part in form.codec.encode(pool.temporal[layer, slot : slot + 1])]
        for part, offset in zip((*parts, pool.conv[layer, slot]), form.part_offsets, strict=True):
            start = layer * form.segment_bytes + offset
            found = part.contiguous().flatten().view(torch.uint8)
            record[start : start + len(found)] = found
    return record


class Counting(LoopEngine):
    """Writes down how many copies each call has."""

    def __init__(self, driver: FakeDriver) -> None:
        super().__init__(driver)
        self.calls: list[int] = []

    def submit(self, copies: Sequence[Copy]) -> None:
        self.calls.append(len(copies))
        super().submit(copies)


class Packed:
    """A packer on a device that remembers, with the waits that its user makes."""

    def __init__(self, pool: PoolTable, encoding: CheckpointDtype) -> None:
        self.device = FakeDevice()
        self.engine = Counting(FakeDriver(self.device))
        self.lane = StreamLane(CPU, self.device)
        kernels = DeviceKernels("on a device that remembers")
        self.packer = RecordPacker(pool, encoding, kernels, self.engine, self.lane)
        self.device.on_device(pool.temporal, pool.conv, self.packer._staged, self.packer._flag)

    def send(self, numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Pack slots one behind the other; return records and flags once all are there."""
        records = torch.full((len(numbers), self.packer.record_bytes), 0xA5, dtype=torch.uint8)
        flags = torch.full((len(numbers),), -1, dtype=torch.int32)
        slots = torch.tensor(numbers)
        self.device.on_device(slots)
        with Watch(self.device):
            self.lane.follow_current(Rule.STATE)
            marks = [
                self.packer.send(slots[i : i + 1], records[i], flags[i : i + 1]) for i in range(len(numbers))
            ]
            assert not marks[0].reached(Rule.HANDOVER)
        self.device.finish()
        assert all(mark.reached(Rule.HANDOVER) for mark in marks)
        self.device.host_reads(records, "the store writes records")
        assert self.device.races == [] and self.device.host_waits == []
        return records, flags


@pytest.mark.parametrize("encoding", LOSSY)
@settings(max_examples=20, deadline=None)
@given(
    shape=st.tuples(*(st.integers(1, most) for most in (4, 5, 3, 20, 20))),
    gap=st.sampled_from([0, 4, 12]),
    piece=st.sampled_from([1024, PIECE_BYTES]),
    data=st.data(),
)
def test_records_are_those_of_the_codec(encoding, shape, gap, piece, data) -> None:
    pool = pool_of(*shape, gap)
    slots = data.draw(st.lists(st.integers(0, shape[1] - 1), min_size=1, max_size=4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "PIECE_BYTES", piece)
        packed = Packed(pool, encoding)
        records, flags = packed.send(slots)
    for slot, record in zip(slots, records, strict=True):
        assert torch.equal(record, by_the_codec(pool, slot, encoding))
    assert flags.tolist() == [0] * len(slots)
    # One run of bytes, in as many calls as it has pieces, and the flag with the last.
    calls = -(-packed.packer.record_bytes // piece)
    assert packed.engine.calls == [*[1] * (calls - 1), 2] * len(slots)


@pytest.mark.parametrize("encoding", LOSSY)
def test_what_must_not_be_stored_is_flagged(encoding) -> None:
    pool = pool_of(2, 4, 2, 3, 4)
    pool.temporal[1, 2, 0, 1, 1] = torch.inf
    _, flags = Packed(pool, encoding).send([0, 2, 4, 1, -1])
    assert flags.tolist() == [0, NOT_FINITE, NO_SUCH_SLOT, 0, NO_SUCH_SLOT]


def test_nothing_is_packed_without_a_gpu_nor_natively(monkeypatch) -> None:
    def load(device: torch.device) -> DeviceKernels:
        return DeviceKernels("no compiler")

    monkeypatch.setattr(packing, "load", load)
    for device, encoding in [(CPU, CheckpointDtype.INT8), (CUDA, CheckpointDtype.NATIVE)]:
        found = choose_packing(device, encoding)
        assert found.kernels is None and found.name == "none" and not found.is_slow
    found = choose_packing(CUDA, CheckpointDtype.INT8)
    assert found.kernels is not None and found.is_slow
    assert found.as_json() == {"name": "torch", "reason": "no compiler"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("encoding", LOSSY)
def test_on_a_gpu(encoding) -> None:
    """With the engine and the kernels that a server here would have; slots are written again behind the mark."""
    host = pool_of(24, 6, 4, 128, 128)
    found = choose_packing(CUDA, encoding)
    assert found.kernels is not None
    wanted = [by_the_codec(host, slot, encoding) for slot in range(6)]
    for engine in (choose_engine(CUDA).engine, TorchEngine()):
        pool = PoolTable(host.temporal.to(CUDA), host.conv.to(CUDA))
        lane = StreamLane(CUDA)
        packer = RecordPacker(pool, encoding, found.kernels, engine, lane)
        records = torch.full((6, packer.record_bytes), 0xA5, dtype=torch.uint8).pin_memory()
        flags = torch.full((6,), -1, dtype=torch.int32).pin_memory()
        slots = torch.arange(6, device=CUDA)
        lane.follow_current(Rule.STATE)
        marks = [packer.send(slots[i : i + 1], records[i], flags[i : i + 1]) for i in range(6)]
        lane.hold_current(marks[-1], Rule.RESTAGE)
        pool.temporal.fill_(torch.nan)
        pool.conv.fill_(torch.nan)
        lane.drain(Rule.QUIET)
        assert all(mark.reached(Rule.HANDOVER) for mark in marks)
        assert flags.tolist() == [0] * 6
        assert all(torch.equal(record, one) for record, one in zip(records, wanted, strict=True))
        lane.follow_current(Rule.STATE)
        packer.send(slots[:1], records[0], flags[:1])
        lane.drain(Rule.QUIET)
        assert flags.tolist() == [NOT_FINITE, 0, 0, 0, 0, 0]
