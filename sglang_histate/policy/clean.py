"""KV of the host that could leave it at once and would cost nothing but a read: *clean* KV.

The SSD has it too and the device has not. What lies above KV of device or host that is not clean does not count: that
would have to go first.
"""

from __future__ import annotations

from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.prefix_tree import PrefixTree


class CleanKv:
    """Keeps count for one tree. Each change takes time for the nodes for which it changes something, no recursion."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tokens = 0
        """Of all clean nodes."""
        self.host_only_tokens = 0
        """Of all nodes that the host has and the device has not: what can leave the host at all, clean or not."""
        self._tree = tree
        self._clean: dict[int, int] = {}
        self._host_only: dict[int, int] = {}
        self._blocks: dict[int, int] = {}  # node that has to go before its parent and would be lost -> parent
        self._blocked: dict[int, int] = {}  # how many of those it has below itself

    def by_node(self) -> dict[int, int]:
        """Return the clean nodes and their tokens."""
        return dict(self._clean)

    def changed(self, node: int) -> None:
        """The tree has just been told where the KV of `node` is, or has split it; call it for both parts then."""
        changed = [node]
        while changed:
            one = changed.pop()
            on_device, on_host = (self._tree.has_kv(one, tier) for tier in (Tier.DEVICE, Tier.HOST))
            clean = (
                on_host and not on_device and self._tree.has_kv(one, Tier.SSD) and one not in self._blocked
            )
            only = self._tree.tokens(one) if on_host and not on_device else 0
            self.host_only_tokens += only - self._host_only.pop(one, 0)
            if only:
                self._host_only[one] = only
            tokens = self._tree.tokens(one) if clean else 0
            self.tokens += tokens - self._clean.pop(one, 0)
            if clean:
                self._clean[one] = tokens
            keeps = (on_device or on_host) and not clean
            changed += self._block(one, self._tree.parent(one) if keeps else None)

    def removed(self, node: int) -> None:
        """`node` is about to leave the tree."""
        self.tokens -= self._clean.pop(node, 0)
        self.host_only_tokens -= self._host_only.pop(node, 0)
        for other in self._block(node, None):
            self.changed(other)

    def _block(self, node: int, parent: int | None) -> list[int]:
        """Say which parent `node` keeps from going, None for none; return the nodes for which that changes something."""
        before = self._blocks.get(node)
        if before == parent:
            return []
        if parent is None:
            del self._blocks[node]
        else:
            self._blocks[node] = parent
            self._blocked[parent] = self._blocked.get(parent, 0) + 1
        if before is not None:
            self._blocked[before] -= 1
            if not self._blocked[before]:
                del self._blocked[before]
        tree = self._tree
        return [one for one in (before, parent) if one is not None and one != tree.root and one in tree]
