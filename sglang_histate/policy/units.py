"""What can be evicted at once from a pool: an intermediate checkpoint alone, or a bundle.

A *bundle* is the end of a trajectory as far as a tier holds it. It hangs on a KV leaf, a node with KV in the
tier none of whose children has KV there. It consists of the KV from that leaf upwards that no other child
with KV in the tier shares, back to the deepest checkpoint (of any tier) before the leaf's end, and of the
state at the leaf's end if there is a checkpoint and the tier holds it. KV after the last checkpoint is a
bundle without one: nothing can be restored from it, so losing it costs nothing. Once a bundle is gone, the
checkpoint before it is the trajectory's last one in the tier, and the KV between it and the one before is the
next bundle.

An *intermediate* is any other checkpoint whose state the tier holds.

A bundle's last access is the last request that used it to its end. An intermediate's is the last one restored
from it or, unless the mode is lru, from anything below it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from sglang_histate.policy.prefix_nodes import Node, Tier


class Kind(StrEnum):
    """What goes together."""

    INTERMEDIATE = "intermediate"
    BUNDLE = "bundle"


@dataclass(frozen=True)
class Pool:
    """One budget of bytes, and what it holds.

    A pool of states only has `kv_token_bytes` 0, a pool of KV only has `state_bytes` 0, a unified pool has
    both. A device with a fixed split is two pools of tier DEVICE.

    Raises:
        ValueError: a negative size, or neither of the two.
    """

    tier: Tier
    state_bytes: int
    """Bytes of one checkpoint here."""
    kv_token_bytes: int
    """Bytes of KV per token here."""

    def __post_init__(self) -> None:
        if self.state_bytes < 0 or self.kv_token_bytes < 0 or not (self.state_bytes or self.kv_token_bytes):
            raise ValueError(
                f"a pool with {self.state_bytes} bytes per state and {self.kv_token_bytes} per token of KV "
                "holds nothing: neither may be negative, and one must be positive"
            )


class Unit(NamedTuple):
    """A candidate for eviction, as it is now: the next change of the tree makes it out of date."""

    kind: Kind
    tier: Tier
    checkpoint: tuple[int, int] | None
    """(node, offset), None for KV after a trajectory's last checkpoint."""
    has_state: bool
    """Whether the tier holds the checkpoint's state."""
    nodes: tuple[int, ...]
    """Whose KV goes, leaf first; empty for an intermediate. A pool without KV names them too."""
    cut: tuple[int, int] | None
    """(node, offset): the last of `nodes` goes only after this offset and has to be split there first."""
    bytes: int
    """What the pool gets back."""
    cost_tokens: float
    """C: expected tokens to compute again."""
    last_access: int
    """Tick of the logical clock."""
    score: float
    """H, in ticks."""


def has_tail(node: Node, tier: int) -> bool:
    """Whether a bundle without a checkpoint hangs on `node`: a KV leaf with no checkpoint at its end."""
    return node.is_kv_leaf(tier) and node.end_checkpoint() is None


def bundle_top(leaf: Node, tier: int, limit: int) -> Node:
    """The highest node of the bundle at a KV leaf, `limit` the position of the checkpoint before its end.

    Where the limit lies inside it, its first part is not in the bundle. O(nodes of the bundle).
    """
    top = leaf
    while top.start > limit:
        above = top.parent
        # KV that a second child shares stays. The root has no KV, so `above` is never None here.
        if above is None or not above.kv >> tier & 1 or above.kv_child_count(tier) > 1:
            break
        top = above
    return top


def bundle_tokens(leaf: Node, tier: int, limit: int) -> int:
    """Tokens of KV in the bundle at a KV leaf; arguments as in `bundle_top`."""
    top = leaf if leaf.start <= limit else bundle_top(leaf, tier, limit)
    return leaf.start + leaf.tokens - max(limit, top.start)


def bundle_nodes(leaf: Node, top: Node) -> tuple[int, ...]:
    """Ids from `leaf` up to `top`."""
    ids = [leaf.id]
    while leaf is not top:
        assert leaf.parent is not None
        leaf = leaf.parent
        ids.append(leaf.id)
    return tuple(ids)
