from itertools import product

import pytest

from sglang_histate.policy.placement import Copies, Placement, Reason, Room, place
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.units import Kind

BUNDLE, SINGLE = Kind.BUNDLE, Kind.INTERMEDIATE
DEVICE, HOST, SSD = Tier
EVERYWHERE = Room(host=True, ssd_state=True, ssd_kv=True)


@pytest.mark.parametrize(
    ("kind", "tier", "copies", "room", "to", "write", "reason"),
    [
        (BUNDLE, DEVICE, Copies(host=True), Room(), HOST, False, Reason.COPY_BELOW),
        (BUNDLE, DEVICE, Copies(), EVERYWHERE, HOST, True, Reason.DEMOTED),
        (BUNDLE, DEVICE, Copies(), Room(ssd_kv=True), SSD, True, Reason.DEMOTED),
        (BUNDLE, DEVICE, Copies(), Room(ssd_state=True), None, False, Reason.NO_ROOM),
        (BUNDLE, DEVICE, Copies(ssd=True), Room(host=True), SSD, False, Reason.COPY_BELOW),
        (SINGLE, DEVICE, Copies(ssd=True), EVERYWHERE, SSD, False, Reason.COPY_BELOW),
        (SINGLE, DEVICE, Copies(host=True), EVERYWHERE, HOST, False, Reason.COPY_BELOW),
        (SINGLE, DEVICE, Copies(), EVERYWHERE, SSD, True, Reason.DEMOTED),
        (SINGLE, DEVICE, Copies(), Room(host=True), HOST, True, Reason.DEMOTED),
        (SINGLE, DEVICE, Copies(), Room(ssd_kv=True), None, False, Reason.NO_ROOM),
        (SINGLE, HOST, Copies(), EVERYWHERE, SSD, True, Reason.DEMOTED),
        (SINGLE, HOST, Copies(device=True), EVERYWHERE, None, False, Reason.COPY_ABOVE),
        (BUNDLE, HOST, Copies(), EVERYWHERE, SSD, True, Reason.DEMOTED),
        (BUNDLE, HOST, Copies(), Room(ssd_state=True), None, False, Reason.NO_ROOM),
        (BUNDLE, HOST, Copies(ssd=True), Room(), SSD, False, Reason.COPY_BELOW),
        (BUNDLE, HOST, Copies(device=True), Room(ssd_state=True), None, False, Reason.COPY_ABOVE),
        (BUNDLE, SSD, Copies(), EVERYWHERE, None, False, Reason.LAST_TIER),
        (SINGLE, SSD, Copies(host=True), EVERYWHERE, None, False, Reason.COPY_ABOVE),
    ],
)
def test_fate(
    kind: Kind, tier: Tier, copies: Copies, room: Room, to: Tier | None, write: bool, reason: Reason
) -> None:
    assert place(kind, tier, True, copies, room) == Placement(to, write, reason)


def test_kv_without_a_checkpoint_and_a_checkpoint_without_kv_go_nowhere() -> None:
    everywhere = Copies(True, True, True)
    for tier in Tier:
        assert place(BUNDLE, tier, False, everywhere, EVERYWHERE).reason is Reason.NO_CHECKPOINT
        assert place(SINGLE, tier, False, everywhere, EVERYWHERE).reason is Reason.KV_GONE
        assert place(SINGLE, tier, False, everywhere, EVERYWHERE).to is None


def test_a_fate_is_always_below_and_written_only_where_there_is_room_and_no_copy() -> None:
    bits = (False, True)
    for kind, tier, restorable in product(Kind, Tier, bits):
        for held, takes in product(product(bits, repeat=3), product(bits, repeat=3)):
            copies, room = Copies(*held), Room(*takes)
            fate = place(kind, tier, restorable, copies, room)
            if fate.to is None:
                assert not fate.write
                continue
            assert restorable and fate.to > tier
            copy = {HOST: copies.host, SSD: copies.ssd}[fate.to]
            takes_it = {HOST: room.host, SSD: room.ssd_kv if kind is BUNDLE else room.ssd_state}[fate.to]
            assert fate.write == (not copy)
            assert copy or takes_it
