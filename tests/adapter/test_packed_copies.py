"""Output ends on a GPU in few bytes: what `pack` says of a record decides whether it may be stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.adapter.packed_copies import PackedCopies, slot_copies
from sglang_histate.adapter.page_keys import PageKeys
from sglang_histate.adapter.slot_copies import SlotCopies
from sglang_histate.config import CheckpointDtype
from sglang_histate.copy import CopyEngine, CopyError
from sglang_histate.copy.cuda_engine import LoopEngine
from sglang_histate.copy.kernels import NO_SUCH_SLOT, NOT_FINITE
from sglang_histate.copy.packing import Packing
from sglang_histate.store import DropReason, EntryState
from tests.copy.fake_device import DeviceKernels, FakeDevice, FakeDriver

from .conftest import GPU
from .copy_scenarios import packing_of
from .engine import PAGE, tokens
from .test_tier import Alone, Rank, finished

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")
LOSSY = (CheckpointDtype.BF16, CheckpointDtype.INT8)
KEY = PageKeys(PAGE, None, None).at(tokens((1, 512)), 512)


@pytest.fixture(autouse=True)
def chunk_of_64(monkeypatch) -> None:
    monkeypatch.setattr("sglang.srt.runtime_context.mamba_cache_chunk_size", lambda: PAGE)


class Flagging(DeviceKernels):
    """Packs sound records and says `flag` of them."""

    def __init__(self, flag: int) -> None:
        super().__init__("a test")
        self._says = flag

    def pack(self, *arguments: Any, flags: Any = None, **options: Any) -> Any:
        return super().pack(*arguments, flags=flags, **options).fill_(self._says)


class Nothing(CopyEngine):
    name = "nothing"

    def submit(self, copies: Any) -> None:
        pass


class Bench:
    """One rank whose slots lie on a device that remembers."""

    def __init__(
        self, encoding: CheckpointDtype, packing: Packing | None = None, engine: CopyEngine | None = None
    ) -> None:
        self.device = FakeDevice()
        self.rank = Rank(Alone(), encoding=encoding)
        self.store = self.rank.store
        self.pool = self.rank.engine.cache.req_to_token_pool.mamba_pool.mamba_cache
        self.copies = slot_copies(
            *(self.rank.engine.layout, self.pool.temporal, self.pool.conv[0]),
            packing=packing_of(encoding) if packing is None else packing,
            engine=LoopEngine(FakeDriver(self.device)) if engine is None else engine,
            records=self.store.records.total,
            records_pinned=True,
            forward_stream=self.device.Stream(),
            streams=self.device,
        )
        self.rank.tier.output_ends._copies = self.copies  # type: ignore[assignment]

    @property
    def slot(self) -> int:
        (node,) = self.rank.engine.nodes()
        return int(node.component_data[ComponentType.MAMBA].value[0])

    def take(self, req: Any) -> None:
        """The request's end is copied, and what became of it is seen by all."""
        self.rank.tier.output_ends.take(req)
        self.device.finish()
        self.rank.drain()


@pytest.mark.parametrize("encoding", list(CheckpointDtype))
def test_encoded_records_are_packed_and_native_ones_are_not(encoding) -> None:
    bench = Bench(encoding)
    wanted = SlotCopies if encoding is CheckpointDtype.NATIVE else PackedCopies
    assert type(bench.copies) is wanted
    bench.store.close()


@pytest.mark.parametrize("encoding", LOSSY)
def test_a_packed_record_is_the_one_that_a_thread_encodes(encoding) -> None:
    records = []
    for rank in (Bench(encoding).rank, Rank(Alone(), encoding=encoding)):
        rank.store.records.memory[:] = 0  # between parts `pack` writes zeros, the thread nothing
        req = finished(rank, tokens((1, 512)))
        states = rank.engine.cache.req_to_token_pool.mamba_pool.mamba_cache
        numbers = torch.Generator().manual_seed(5)
        for pool in (states.temporal, states.conv[0]):
            pool.copy_(torch.randn(pool.shape, generator=numbers))
        kept: list[Any] = []
        real = rank.store.put
        rank.store.put = lambda key, position, record, kept=kept, real=real, **rest: (
            kept.append(record.payload.copy()),
            real(key, position, record, **rest),
        )[1]
        rank.tier.output_ends.take(req)
        copies = rank.tier.output_ends._copies
        copies.drain() if isinstance(copies, SlotCopies) else copies._lane._streams.finish()
        rank.drain()
        records += kept
        assert rank.store.lookup(KEY).state is EntryState.LIVE
        rank.check_idle()
        rank.store.close()
    packed, encoded = records
    assert packed.any() and np.array_equal(packed, encoded)


@pytest.mark.parametrize("encoding", LOSSY)
def test_a_slot_is_held_until_its_record_has_arrived(encoding) -> None:
    bench = Bench(encoding)
    rank = bench.rank
    rank.tier.output_ends.take(finished(rank, tokens((1, 512))))
    rank.tier.tick()
    assert rank.tier.output_ends.reading and rank.published == []
    rank.engine.evict_states(1)
    assert bench.slot >= 0
    bench.device.finish()
    rank.drain()
    assert rank.published == [KEY] and not rank.tier.output_ends.reading
    rank.check_idle()
    bench.store.close()


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("encoding", LOSSY)
def test_a_flagged_record_is_never_stored_whatever_its_bytes_are(encoding, at_the_end) -> None:
    bench = Bench(encoding, Packing("flags", "a test", Flagging(NOT_FINITE)))
    rank = bench.rank
    req = finished(rank, tokens((1, 512)))
    if at_the_end:
        rank.tier.output_ends.take(req)
        rank.tier.land()
        rank.drain()
    else:
        bench.take(req)
    assert rank.published == [KEY] and bench.store.lookup(KEY) is None
    stats = bench.store.stats()
    assert stats.drops[DropReason.NOT_FINITE] == 1 and stats.bytes_written == 0
    (node,) = rank.engine.nodes()
    assert node.component_data[ComponentType.MAMBA].host_value is None, "nor is it copied to the host"
    rank.check_idle()
    bench.store.close()


@pytest.mark.parametrize("encoding", LOSSY)
def test_bytes_that_are_not_finite_are_never_stored_whatever_the_flag_says(encoding) -> None:
    bench = Bench(encoding, Packing("flags", "a test", Flagging(0)))
    req = finished(bench.rank, tokens((1, 512)))
    bench.pool.temporal[1, bench.slot, 0, 2, 1] = torch.nan
    bench.take(req)
    assert bench.store.lookup(KEY) is None
    assert bench.store.stats().drops[DropReason.NOT_FINITE] == 1
    bench.store.close()


def test_a_slot_that_is_not_there_ends_the_server() -> None:
    bench = Bench(CheckpointDtype.INT8, Packing("flags", "a test", Flagging(NO_SUCH_SLOT)))
    with pytest.raises(CopyError, match="slot that the device's pool does not have"):
        bench.take(finished(bench.rank, tokens((1, 512))))
    assert bench.rank.published == []
    bench.store.close()


@pytest.mark.parametrize("encoding", LOSSY)
def test_the_bytes_go_by_the_engine(encoding) -> None:
    bench = Bench(encoding, engine=Nothing())
    memory = bench.store.records.memory
    memory[:] = 0x33
    bench.rank.tier.output_ends.take(finished(bench.rank, tokens((1, 512))))
    assert (memory == 0x33).all()
    bench.store.close()
