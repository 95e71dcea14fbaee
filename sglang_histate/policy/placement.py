"""Where an evicted unit goes: one tier down, or nowhere.

One entry, one fate. A bundle's KV and state go to the same place. KV that no checkpoint can restore is not
worth a byte below, and neither is a checkpoint whose KV is gone.

    bundle on device                host, else ssd if it takes KV, else dropped
    bundle on host                  ssd if it takes KV, else dropped
    intermediate on device          ssd, else host, else dropped: historical ones only pass through host
    intermediate on host            ssd, else dropped
    superseded final checkpoint     as an intermediate, but it stays if it would be dropped: nothing evicts it
    anything on ssd                 dropped

What lies in a lower tier already is not written again, and a unit that is still above loses only this copy. A
bundle that is dropped and has no copy is gone, and its checkpoint with it: the caller removes every copy of
the state, on ssd too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.units import Kind


class Reason(StrEnum):
    """Why a unit goes where it goes."""

    DEMOTED = "demoted"
    """Written to the tier below."""
    COPY_BELOW = "copy-below"
    """A lower tier has it already: only this copy goes."""
    COPY_ABOVE = "copy-above"
    """A higher tier still has it: only this copy goes."""
    NO_CHECKPOINT = "no-checkpoint"
    """KV that no checkpoint can restore."""
    KV_GONE = "kv-gone"
    """A checkpoint with KV before it missing in every tier."""
    NO_ROOM = "no-room"
    """No lower tier is there that takes it and has room."""
    LAST_TIER = "last-tier"
    """There is nothing below ssd."""


@dataclass(frozen=True)
class Copies:
    """Which tiers hold the whole unit: all its KV, and its state if it has one."""

    device: bool = False
    host: bool = False
    ssd: bool = False


@dataclass(frozen=True)
class Room:
    """What the tiers take. Room that has to be made by evicting there counts as room."""

    host: bool = False
    ssd_state: bool = False
    """Checkpoints."""
    ssd_kv: bool = False
    """KV, and the checkpoint with it."""


NO_COPIES, NO_ROOM = Copies(), Room()


@dataclass(frozen=True)
class Placement:
    """The fate of a unit evicted from a tier; its copy there goes in any case."""

    to: Tier | None
    """Tier that keeps it, None: dropped here, and gone unless the reason is a copy above."""
    write: bool
    """Whether it has to be written there first."""
    reason: Reason


def place(
    kind: Kind, tier: Tier, restorable: bool, copies: Copies = NO_COPIES, room: Room = NO_ROOM
) -> Placement:
    """Return where a unit evicted from `tier` goes.

    Args:
        kind: a superseded final checkpoint is an intermediate.
        tier: where it is evicted.
        restorable: for a bundle, whether it ends in a checkpoint that some tier holds; for an intermediate,
            whether some tier still holds each piece of KV before it.
        copies: what other tiers hold; the entry for `tier` is not looked at.
        room: what other tiers would take.
    """
    if not restorable:
        return Placement(None, False, Reason.NO_CHECKPOINT if kind is Kind.BUNDLE else Reason.KV_GONE)
    if kind is Kind.BUNDLE:
        below = ((Tier.HOST, copies.host, room.host), (Tier.SSD, copies.ssd, room.ssd_kv))
    else:
        below = ((Tier.SSD, copies.ssd, room.ssd_state), (Tier.HOST, copies.host, room.host))
    for to, has_copy, _ in below:
        if to > tier and has_copy:
            return Placement(to, False, Reason.COPY_BELOW)
    if (tier > Tier.DEVICE and copies.device) or (tier > Tier.HOST and copies.host):
        return Placement(None, False, Reason.COPY_ABOVE)
    if tier is Tier.SSD:
        return Placement(None, False, Reason.LAST_TIER)
    for to, _, has_room in below:
        if to > tier and has_room:
            return Placement(to, True, Reason.DEMOTED)
    return Placement(None, False, Reason.NO_ROOM)
