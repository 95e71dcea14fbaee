"""The parts of the mirror tree: nodes, checkpoints, and the two walks everything else is built on.

Plain slotted objects, no decisions. `prefix_tree.PrefixTree` is the only writer; `recompute`, `units` and
`queue` read. Every position and length is in tokens, every time is in ticks of the caller's logical clock.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import IntEnum
from operator import attrgetter


class Tier(IntEnum):
    """Where an entry lies, fastest first."""

    DEVICE = 0
    HOST = 1
    SSD = 2


TIERS = tuple(Tier)
CACHED = 1 << Tier.DEVICE | 1 << Tier.HOST
"""Bits of the tiers that a match reads from; what only the SSD has must come to the host first."""

_OFFSET = attrgetter("offset")


class Checkpoint:
    """A saved recurrent state at `offset` tokens into `node`, in every tier whose bit is set in `tiers`.

    Its region is what only it serves: everything below it up to the next checkpoints, or to the ends of the
    trajectories. `region` is the region's tokens, each token times the weight of the trajectories through it
    (`recompute.weight`); `ends` is how many trajectories end in it. `accessed` is the last request restored
    from this very checkpoint. `node` is None once the checkpoint is gone from every tier.
    """

    __slots__ = ("accessed", "ends", "node", "offset", "region", "sequence", "tiers")

    def __init__(self, node: Node, offset: int, sequence: int, accessed: int) -> None:
        self.node: Node | None = node
        self.offset = offset
        self.tiers = 0
        self.sequence = sequence
        self.accessed = accessed
        self.region = 0
        self.ends = 0

    def used(self) -> int:
        """Time of the last request restored from it or from anything below it. It must not be gone."""
        node = self.node
        assert node is not None
        below = node.read_to_end if node.read_to is None else node.used_to(self.offset)
        return below if below > self.accessed else self.accessed


class Node:
    """A run of `tokens` tokens from position `start`, below `parent`; children are a linked list of siblings.

    A node without children is the end of a trajectory, the root excepted. `weight` is the sum of the weights
    of all trajectories through the node. `kv` has a bit for each tier that holds the node's KV.
    `kv_children`, None until a child has KV, is three counts followed by three sums of ids, one per tier: how
    many children have KV there, and the sum of their ids, which names the child where there is just one.
    `read_to_end` is the last request that used the whole node. `read_to` lists later requests that used only
    a part, as (offset, time) with ascending offsets and descending times; None if there are none. `cut`: it ends where
    longer text was split, not where a request did.
    """

    __slots__ = (
        "checkpoints",
        "cut",
        "first",
        "id",
        "kv",
        "kv_children",
        "next",
        "parent",
        "previous",
        "read_to",
        "read_to_end",
        "sequence",
        "start",
        "tokens",
        "weight",
    )

    def __init__(
        self, node: int, parent: Node | None, start: int, tokens: int, sequence: int, accessed: int
    ) -> None:
        self.id = node
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.sequence = sequence
        self.read_to_end = accessed
        self.read_to: list[tuple[int, int]] | None = None
        self.weight = 0
        self.kv = 0
        self.cut = False
        self.kv_children: list[int] | None = None
        # One shared empty tuple for the many nodes without a checkpoint.
        self.checkpoints: list[Checkpoint] | tuple[Checkpoint, ...] = ()
        self.first: Node | None = None
        self.next: Node | None = None
        self.previous: Node | None = None

    def attach(self, child: Node) -> None:
        """Make `child` the first child."""
        child.parent, child.previous, child.next = self, None, self.first
        if self.first is not None:
            self.first.previous = child
        self.first = child

    def detach(self, child: Node) -> None:
        """Take `child` out of the list of children."""
        if child.previous is None:
            self.first = child.next
        else:
            child.previous.next = child.next
        if child.next is not None:
            child.next.previous = child.previous
        child.parent = child.previous = child.next = None

    def count_kv_child(self, tier: int, child: int, change: int) -> int:
        """Note that `child` got (change 1) or lost (-1) its KV in `tier`; return how many have it now."""
        counts = self.kv_children
        if counts is None:
            counts = self.kv_children = [0, 0, 0, 0, 0, 0]
        counts[tier] += change
        counts[tier + 3] += child * change
        return counts[tier]

    def kv_child_count(self, tier: int) -> int:
        """How many children have KV in `tier`."""
        return 0 if self.kv_children is None else self.kv_children[tier]

    def is_kv_leaf(self, tier: int) -> bool:
        """Whether the node has KV in `tier` and no child has."""
        return bool(self.kv >> tier & 1) and (self.kv_children is None or not self.kv_children[tier])

    def used(self) -> int:
        """Time of the last request that used the whole node."""
        return self.read_to_end

    def used_to(self, offset: int) -> int:
        """Time of the last request restored at or below `offset` tokens into this node."""
        for to, time in self.read_to or ():
            if to >= offset:
                return time
        return self.read_to_end

    def index(self, offset: int) -> int:
        """How many of the node's checkpoints lie before `offset`."""
        return bisect_left(self.checkpoints, offset, key=_OFFSET)

    def checkpoint_at(self, offset: int) -> Checkpoint | None:
        """The checkpoint exactly at `offset`, or None."""
        checkpoints = self.checkpoints
        if not checkpoints:
            return None
        if checkpoints[-1].offset == offset:  # most are asked for at a node's end
            return checkpoints[-1]
        index = bisect_left(checkpoints, offset, key=_OFFSET)
        if index < len(checkpoints) and checkpoints[index].offset == offset:
            return checkpoints[index]
        return None

    def end_checkpoint(self) -> Checkpoint | None:
        """The checkpoint at the node's last token, or None."""
        checkpoints = self.checkpoints
        return checkpoints[-1] if checkpoints and checkpoints[-1].offset == self.tokens else None


Anchor = Checkpoint | Node
"""What a unit of eviction hangs on: its checkpoint, or the last node of KV that ends without one."""


def position(checkpoint: Checkpoint) -> int:
    """Tokens before the checkpoint, from the start of the sequence. It must not be gone."""
    assert checkpoint.node is not None
    return checkpoint.node.start + checkpoint.offset


def previous(checkpoint: Checkpoint) -> Checkpoint:
    """The deepest checkpoint before this one, which is not gone nor the root's: the root's if no other."""
    node = checkpoint.node
    assert node is not None
    held = node.checkpoints
    if held[0] is not checkpoint:
        return held[held.index(checkpoint) - 1]
    return last_above(node)


def last_above(node: Node) -> Checkpoint:
    """The deepest checkpoint before the first token of a node other than the root: the root's if no other."""
    above = node.parent
    while above is not None:
        if above.checkpoints:
            return above.checkpoints[-1]
        above = above.parent
    raise ValueError("nothing lies before the root")
