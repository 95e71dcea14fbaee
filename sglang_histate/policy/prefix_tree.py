"""A mirror of the cached prefixes: what is cached where, who last used it, and what each checkpoint is worth.

The adapter feeds it from SGLang's radix tree, the simulator from its own; neither hands over tokens or
tensors, only lengths. Leaves of the tree are trajectories (an agent session has one or more). Node ids are
the caller's.

    tree = PrefixTree()
    tree.add(1, parent=0, tokens=2048)              # a request computed 2048 tokens
    tree.set_kv(1, Tier.DEVICE, True)
    tree.set_checkpoint(1, 2048, Tier.DEVICE, True)
    tree.observe_hit(1, 2048)                       # when a request is matched, before its tokens are added
    tree.touch(1, 2048, now=17)                     # the same request's restored position, once per request

Times are ticks of a logical clock, one per request and the same on every rank. What is added counts as used
at the latest tick seen: the request that brought it is running. All changes take O(path), and those that
place or remove a checkpoint where trajectories branch off take O(region). Nothing is ever rebuilt.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_histate.policy.prefix_nodes import (
    CACHED,
    TIERS,
    Anchor,
    Checkpoint,
    Node,
    Tier,
    position,
    previous,
)
from sglang_histate.policy.recompute import (
    COST_SCALE,
    EndShare,
    close_region,
    open_region,
    price,
    shift_path,
    weight,
)


class PrefixTree:
    """The cached prefixes below `root`, which has no tokens and counts as a checkpoint at position 0.

    Setters are idempotent. All methods raise KeyError for an unknown node and ValueError, with one sentence
    that names the value, for what cannot be; the tree is unchanged then.
    """

    def __init__(self, root: int = 0) -> None:
        self.root = root
        self.end_share = EndShare()
        """q, see `recompute`."""
        self.clock = 0
        """The latest time seen."""
        self._sequence = 0
        self._nodes: dict[int, Node] = {root: Node(root, None, 0, 0, 0, 0)}
        self._nodes[root].checkpoints = [Checkpoint(self._nodes[root], 0, 0, 0)]
        self._changed: tuple[list[dict[int, Anchor]], ...] = tuple([] for _ in TIERS)
        self._all_changed: list[dict[int, Anchor]] = []

    # Changes of the tree

    def add(self, node: int, parent: int, tokens: int) -> None:
        """Add a leaf of `tokens` > 0 tokens, without KV. It continues a trajectory or starts one."""
        above = self._nodes[parent]
        if node in self._nodes:
            raise ValueError(f"node {node} exists already")
        if tokens <= 0:
            raise ValueError(f"node {node} cannot have {tokens} tokens")
        start = above.start + above.tokens
        share = weight(start + tokens)
        added = Node(node, above, start, tokens, self._next(), self.clock)
        added.weight = share
        if above.first is None and above.parent is not None:
            # One trajectory became longer: it weighs less per token, so everything on it got cheaper.
            self._mark_all(shift_path(above, share - weight(start), share * tokens, 0))
        else:
            shift_path(above, share, share * tokens, 1)
        above.attach(added)
        self._nodes[node] = added

    def split(self, node: int, upper: int, tokens: int) -> None:
        """Make `upper` the parent of `node`, with the first `tokens` of its tokens.

        Checkpoints at offsets <= tokens move to `upper`, KV is in the same tiers in both. Costs and units
        stay what they were.
        """
        lower = self._inner(node)
        if upper in self._nodes:
            raise ValueError(f"node {upper} exists already")
        if not 0 < tokens < lower.tokens:
            raise ValueError(f"node {node} of {lower.tokens} tokens cannot be split after {tokens}")
        above = lower.parent
        assert above is not None
        made = Node(upper, above, lower.start, tokens, self._next(), lower.used_to(tokens))
        made.weight, made.kv, made.cut = lower.weight, lower.kv, True
        if lower.read_to is not None:
            made.read_to = [entry for entry in lower.read_to if entry[0] < tokens] or None
            lower.read_to = [(to - tokens, at) for to, at in lower.read_to if to > tokens] or None
        above.detach(lower)
        above.attach(made)
        made.attach(lower)
        lower.start += tokens
        lower.tokens -= tokens
        for tier in TIERS:
            if made.kv >> tier & 1:
                above.count_kv_child(tier, node, -1)
                above.count_kv_child(tier, upper, 1)
                made.count_kv_child(tier, node, 1)
        cut = lower.index(tokens + 1)
        if cut:
            held = list(lower.checkpoints)
            made.checkpoints, lower.checkpoints = held[:cut], held[cut:] or ()
            for checkpoint in made.checkpoints:
                checkpoint.node = made
        for checkpoint in lower.checkpoints:
            checkpoint.offset -= tokens
        self._nodes[upper] = made

    def remove(self, node: int) -> None:
        """Remove a leaf, with its KV and its checkpoints if it still has any. Its trajectory gets shorter."""
        gone = self._inner(node)
        if gone.first is not None:
            raise ValueError(f"node {node} has children: only a leaf can be removed")
        while gone.checkpoints:
            self._drop(gone.checkpoints[-1])
        for tier in TIERS:
            if gone.kv >> tier & 1:
                self.set_kv(node, tier, False)
        above = gone.parent
        assert above is not None
        above.detach(gone)
        del self._nodes[node]
        share = gone.weight
        if above.first is None and above.parent is not None:
            path = shift_path(above, weight(gone.start) - share, -share * gone.tokens, 0)
            self._mark_all(path[:1])  # the others lost no tokens and their trajectory weighs more now
        else:
            self._mark_all(shift_path(above, -share, -share * gone.tokens, -1))

    def set_kv(self, node: int, tier: Tier, present: bool) -> None:
        """Say whether `tier` holds the node's KV. Any set of nodes may have it, also one with holes."""
        changed = self._inner(node)
        bit = 1 << tier
        if bool(changed.kv & bit) == present:
            return
        changed.kv ^= bit
        above = changed.parent
        assert above is not None
        count = above.count_kv_child(tier, node, 1 if present else -1)
        if not changed.kv_child_count(tier):
            self._mark_end(changed, tier)
        elif present:
            self._mark_bundle_through(changed, tier)
        if above.kv & bit:
            if count == present:  # it was the last KV of its trajectory, or is again
                self._mark_end(above, tier)
            elif count == 1:  # the child that is left need not share it any more
                self._mark_bundle_through(above, tier)

    def set_checkpoint(self, node: int, offset: int, tier: Tier, present: bool) -> None:
        """Say whether `tier` holds the state at `offset` tokens into the node, 0 < offset <= its tokens.

        A checkpoint exists while at least one tier holds it, also where no node ends.
        """
        within = self._inner(node)
        if not 0 < offset <= within.tokens:
            raise ValueError(f"node {node} of {within.tokens} tokens has no checkpoint at offset {offset}")
        checkpoint = within.checkpoint_at(offset)
        bit = 1 << tier
        if bool(checkpoint is not None and checkpoint.tiers & bit) == present:
            return
        if checkpoint is None:
            checkpoint = self._place(within, offset)
        if checkpoint.tiers == bit:
            self._drop(checkpoint)
        else:
            checkpoint.tiers ^= bit
            self._mark(checkpoint, tier)

    # Use

    def touch(self, node: int, offset: int, now: int) -> None:
        """Note a request at time `now` that was restored at `offset` tokens into the node, 0 <= offset.

        It used all KV before that position and the checkpoint there, if there is one. Time never goes back.
        """
        at = self._nodes[node]
        if not 0 <= offset <= at.tokens:
            raise ValueError(f"node {node} of {at.tokens} tokens has no offset {offset}")
        if now < self.clock:
            raise ValueError(f"time {now} lies before {self.clock}")
        self.clock = now
        if 0 < offset < at.tokens:
            later = [entry for entry in at.read_to or () if entry[0] > offset]
            at.read_to = [(offset, now), *later]
            above = at.parent
        else:
            above = at if offset else at.parent
        checkpoint = at.checkpoint_at(offset)
        if checkpoint is None and not offset and above is not None:
            checkpoint = above.end_checkpoint()  # a node's start is its parent's end
        if checkpoint is not None:
            checkpoint.accessed = max(checkpoint.accessed, now)  # it may be kept for longer
        # Nothing to tell the queues: later use only moves a unit back, and they find out when it comes first.
        while above is not None:
            above.read_to_end = now
            above.read_to = None
            above = above.parent

    def keep(self, node: int, offset: int, until: int) -> None:
        """Let the checkpoint at `offset` rank as if used at `until`, which may lie ahead, 0: not kept any more; nothing without one."""
        checkpoint = self._inner(node).checkpoint_at(offset)
        if checkpoint is not None:
            before = checkpoint.accessed
            checkpoint.accessed = max(until, min(before, self.clock))
            if checkpoint.accessed < before:
                self._mark_all([checkpoint])

    def forsake(self, node: int, start: int = 0) -> None:
        """Let what only the trajectory that ends in `node` has rank as if never used; nothing if the text goes on below.

        Up to where another one branches off or did, or is kept, and nothing before position `start`.
        """
        at = self._inner(node)
        if at.first is not None:
            return
        while True:
            if at.start + at.tokens <= start or any(one.accessed > self.clock for one in at.checkpoints):
                return
            self._forget_uses(at, start - at.start)
            if at.next is not None or at.previous is not None or at.parent is None:
                return
            at = at.parent
            if at.parent is None or at.cut:
                return

    def observe_hit(self, node: int, offset: int) -> None:
        """Count a hit served from that position into q: at a trajectory's last checkpoint, or an earlier one.

        Call it when the request is matched. A position without a checkpoint counts as an earlier one, the
        root does not count: nothing was hit.
        """
        if node == self.root:
            return
        checkpoint = self._nodes[node].checkpoint_at(offset)
        self.end_share.observe(checkpoint is not None and checkpoint.ends > 0)

    def watch(self, tier: Tier) -> dict[int, Anchor]:
        """Return a dict to which the tree adds what may have to go earlier than before, keyed by sequence.

        Everything there is now is in it. The reader clears it. Units that have to go later are not reported.
        """
        changed: dict[int, Anchor] = {}
        for node in self._nodes.values():
            changed[node.sequence] = node
            changed.update((checkpoint.sequence, checkpoint) for checkpoint in node.checkpoints)
        self._changed[tier].append(changed)
        self._all_changed.append(changed)
        return changed

    # For tests, explanations and status

    def __contains__(self, node: int) -> bool:
        return node in self._nodes

    def __len__(self) -> int:
        """Nodes, without the root."""
        return len(self._nodes) - 1

    def tokens(self, node: int) -> int:
        """Tokens of the node."""
        return self._nodes[node].tokens

    def start(self, node: int) -> int:
        """Position of the node's first token."""
        return self._nodes[node].start

    def parent(self, node: int) -> int | None:
        """Id of the node above, None for the root."""
        above = self._nodes[node].parent
        return None if above is None else above.id

    def parted(self, node: int | None, position: int) -> int | None:
        """Return where the text went on to that a request left at `position`, the end of `node`; None if that is not one place.

        What was one node before the match cut it there has one child. With more, another request parted here before. Where
        a request ended nobody parts: to go on there is what checkpoints at ends are for.
        """
        if node is None or node not in self or self.start(node) + self.tokens(node) != position:
            return None
        if not self._nodes[node].cut:
            return None
        below = self.children(node)
        if len(below) != 1 or not self._nodes[below[0]].kv & CACHED:
            return None  # where only the SSD has the rest, a match ends whatever the text
        return self.start(below[0]) + self.tokens(below[0])

    def children(self, node: int) -> tuple[int, ...]:
        """Ids of the nodes below, latest first."""
        found = []
        child = self._nodes[node].first
        while child is not None:
            found.append(child.id)
            child = child.next
        return tuple(found)

    def has_kv(self, node: int, tier: Tier) -> bool:
        """Whether `tier` holds the node's KV."""
        return bool(self._nodes[node].kv >> tier & 1)

    def checkpoints(self, node: int) -> tuple[tuple[int, tuple[Tier, ...]], ...]:
        """The node's checkpoints as (offset, tiers), ascending."""
        return tuple(
            (checkpoint.offset, tuple(tier for tier in TIERS if checkpoint.tiers >> tier & 1))
            for checkpoint in self._inner(node).checkpoints
        )

    def last_used(self, node: int, offset: int) -> int:
        """Time of the last request that used the KV up to `offset` tokens into the node (KeyError if there is none)."""
        return self._inner(node).used_to(offset)

    def cost_tokens(self, node: int, offset: int) -> float:
        """C of the checkpoint at that position, in tokens (KeyError if there is none)."""
        within = self._inner(node)
        checkpoint = within.checkpoint_at(offset)
        if checkpoint is None:
            raise KeyError((node, offset))
        distance = within.start + offset - position(previous(checkpoint))
        return price(checkpoint, distance, self.end_share.steps) / COST_SCALE

    # Inside

    def _inner(self, node: int) -> Node:
        if node == self.root:
            raise ValueError(f"node {node} is the root: it has no tokens, KV or checkpoints to change")
        return self._nodes[node]

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _place(self, node: Node, offset: int) -> Checkpoint:
        checkpoint = Checkpoint(node, offset, self._next(), self.clock)
        if isinstance(node.checkpoints, list):
            node.checkpoints.insert(node.index(offset), checkpoint)
        else:
            node.checkpoints = [checkpoint]
        deeper = open_region(checkpoint)
        self._mark_all(deeper)
        self._mark_all([previous(checkpoint)])
        if offset == node.tokens:
            self._mark_all([checkpoint, node])  # the KV that ends here hangs on the checkpoint now
        return checkpoint

    def _drop(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint from all tiers. The ones before and after it only become worth more."""
        node = checkpoint.node
        assert node is not None and isinstance(node.checkpoints, list)
        close_region(checkpoint)
        if len(node.checkpoints) > 1:
            node.checkpoints.remove(checkpoint)
        else:
            node.checkpoints = ()
        checkpoint.tiers, checkpoint.node = 0, None
        self._mark_all([checkpoint, node] if checkpoint.offset == node.tokens else [checkpoint])

    def _forget_uses(self, node: Node, offset: int) -> None:
        """Forget who used the node, but not what lies before `offset`."""
        held = [entry for entry in node.read_to or () if entry[0] < offset]
        if offset > 0 and (before := node.used_to(offset)):
            held.append((offset, before))
        node.read_to_end, node.read_to = 0, held or None
        for checkpoint in node.checkpoints:
            if checkpoint.offset > offset:
                checkpoint.accessed = 0
        self._mark_all([node, *node.checkpoints])

    def _mark(self, anchor: Anchor, tier: int) -> None:
        for changed in self._changed[tier]:
            changed[anchor.sequence] = anchor

    def _mark_all(self, anchors: Sequence[Anchor]) -> None:
        for changed in self._all_changed:
            for anchor in anchors:
                changed[anchor.sequence] = anchor

    def _mark_end(self, node: Node, tier: int) -> None:
        self._mark(node.end_checkpoint() or node, tier)

    def _mark_bundle_through(self, node: Node, tier: int) -> None:
        """Report the bundle of which `node` may have become a part: the one below, if it does not branch."""
        while (count := node.kv_child_count(tier)) == 1:
            assert node.kv_children is not None
            node = self._nodes[node.kv_children[tier + len(TIERS)]]
        if not count:
            self._mark_end(node, tier)
