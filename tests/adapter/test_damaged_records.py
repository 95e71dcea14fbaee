"""Whatever became of a record on the disk: it never counts as a hit, and the request goes on as if it were not there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sglang_histate.adapter.counters import Miss
from sglang_histate.adapter.request_state import state_of
from sglang_histate.store import EntryState, MissReason

from .conftest import GPU
from .engine import PAGE
from .test_fault_in import MAMBA, Bench, rewrite

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")


class Damage:
    """The store file of a bench, and where the records at 256 and 512 lie in it."""

    def __init__(self, bench: Bench) -> None:
        self.content = bench.disk.content
        self.layout = bench.store.layout
        self._keys = {entry.at_token: entry for entry in bench.store.entries()}

    def slab(self, position: int) -> slice:
        start = self.layout.slab_offset(self._keys[position].slab)
        return slice(start, start + self.layout.slab_bytes)

    def flip(self, position: int, offset: int, bit: int = 0) -> None:
        self.content[self.slab(position).start + offset] ^= 1 << bit


def flip_header(damage: Damage) -> None:
    damage.flip(512, 20)


def flip_sum(damage: Damage) -> None:
    damage.flip(512, 200, 7)


def flip_first_layer(damage: Damage) -> None:
    damage.flip(512, damage.layout.header_bytes + 5, 6)


def flip_last_layer(damage: Damage) -> None:
    damage.flip(512, damage.layout.header_bytes + damage.layout.payload_bytes - 1, 3)


def truncate(damage: Damage) -> None:
    del damage.content[damage.slab(512).start + damage.layout.header_bytes + 10 :]


def zero_length(damage: Damage) -> None:
    damage.content.clear()


def zeros(damage: Damage) -> None:
    damage.content[damage.slab(512)] = bytes(damage.layout.slab_bytes)


def swap(damage: Damage) -> None:
    first, second = damage.slab(256), damage.slab(512)
    damage.content[first], damage.content[second] = damage.content[second], damage.content[first]


def other_payload(damage: Damage) -> None:
    """The header is right, the payload is that of another record."""
    first, second = damage.slab(256).start, damage.slab(512).start
    header, end = damage.layout.header_bytes, damage.layout.slab_bytes
    damage.content[second + header : second + end] = damage.content[first + header : first + end]


def replace_file(damage: Damage) -> None:
    """Another file of the same size is in the place of this one."""
    noise = np.random.default_rng(0).integers(0, 256, len(damage.content), dtype=np.uint8)
    damage.content[:] = noise.tobytes()


KINDS = (
    flip_header, flip_sum, flip_first_layer, flip_last_layer, truncate, zero_length, zeros, swap, other_payload, replace_file,
)  # fmt: skip
BOTH_GONE = (zero_length, swap, replace_file)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_damage_on_the_disk(kind: Callable[[Damage], None]) -> None:
    bench = Bench()
    bench.put(256)
    bench.put(512)
    kind(Damage(bench))
    req = rewrite(700)
    assert bench.faults.ready(req) is False
    bench.pump()
    # The first read failed: nothing is attached, and the checkpoint before it is tried.
    assert bench.counters.missed[Miss.READ_FAILED] == 1 and state_of(req, PAGE).attached is None
    if bench.faults.ready(req) is False:
        bench.pump()
        assert bench.faults.ready(req) is True
    state = state_of(req, PAGE)
    if kind in BOTH_GONE:
        assert bench.counters.missed[Miss.READ_FAILED] == 2 and state.attached is None
        assert state.restorable == 0 and bench.host_state(256) is None
        assert not list(bench.store.entries()), "what cannot be read is not found again"
    else:
        assert state.attached == 256 and bench.host_state(256) == 256.0
        assert [entry.at_token for entry in bench.store.entries()] == [256]
    assert bench.host_state(512) is None
    stats = bench.store.stats()
    assert sum(stats.misses.values()) == bench.counters.missed[Miss.READ_FAILED]
    bench.check_idle()
    bench.store.close()


def test_a_header_of_an_earlier_record_in_the_slab() -> None:
    """The write of the new record never reached the disk although the disk said so: the old one is still there."""
    bench = Bench()
    key = bench.put(512, 1.0)
    slab = next(bench.store.entries()).slab
    bench.store.drop(key)
    bench.disk.write_faults.append(("tear", 0))
    bench.put(512, 2.0)
    (entry,) = bench.store.entries()
    assert entry.slab == slab and entry.state is EntryState.LIVE
    req = rewrite(700)
    assert bench.faults.ready(req) is False
    bench.pump()
    assert bench.faults.ready(req) is True and bench.host_state(512) is None
    assert bench.store.stats().misses[MissReason.WRONG_GENERATION] == 1
    bench.check_idle()
    bench.store.close()


@pytest.mark.parametrize("sectors", [1, 3, 7, 8])
def test_a_torn_write(sectors: int) -> None:
    bench = Bench()
    bench.disk.write_faults.append(("tear", sectors))
    bench.put(512)
    req = rewrite(700)
    assert bench.faults.ready(req) is False
    bench.pump()
    assert bench.faults.ready(req) is True and bench.host_state(512) is None
    assert bench.counters.missed[Miss.READ_FAILED] == 1 and state_of(req, PAGE).attached is None
    assert all(node.component_data[MAMBA].host_lock_ref == 0 for node in bench.engine.nodes())
    bench.check_idle()
    bench.store.close()
