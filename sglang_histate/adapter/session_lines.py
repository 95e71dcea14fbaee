"""The latest sessions as lines from token 0 to the tip: where their KV lies, and where their checkpoints are.

A session is what a finished request left in the tree, until a later one goes on from there.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from sglang_histate.policy.prefix_nodes import TIERS, Tier
from sglang_histate.policy.prefix_tree import PrefixTree

MOST = 48


class SessionLines:
    """Scheduler thread only. A node of the tree keeps its id when it is split, as its lower part."""

    def __init__(self) -> None:
        self._ends: OrderedDict[Any, tuple[str, float]] = OrderedDict()  # node -> request, when it finished

    def ended(self, node: Any, rid: str, now_s: float) -> None:
        """A request has finished and its tokens end at `node`."""
        self._ends.pop(node, None)
        self._ends[node] = rid, now_s
        if len(self._ends) > MOST:
            self._ends.popitem(last=False)

    def clear(self) -> None:
        """The tree is empty."""
        self._ends.clear()

    def as_json(self, tree: PrefixTree) -> list[dict[str, Any]]:
        """Return the sessions that the tree still has, the latest first."""
        for node in [node for node in self._ends if node not in tree]:
            del self._ends[node]
        continued: set[Any] = set()
        lines = []
        for node, (rid, ended_s) in reversed(self._ends.items()):
            path = _path(tree, node)
            continued.update(path[:-1])
            if node not in continued:
                lines.append({"rid": rid, "ended_s": round(ended_s, 3), **_line(tree, path)})
        # A session that went on may have ended before the one that it came from, if that was asked again.
        return [line for line in lines if line.pop("node") not in continued]


def _path(tree: PrefixTree, node: Any) -> list[Any]:
    """Return the nodes from the first one below the root to `node`."""
    path = []
    above: Any = node
    while above is not None and above != tree.root:
        path.append(above)
        above = tree.parent(above)
    return path[::-1]


def _line(tree: PrefixTree, path: list[Any]) -> dict[str, Any]:
    kv: list[dict[str, Any]] = []
    checkpoints: list[dict[str, Any]] = []
    for node in path:
        start = tree.start(node)
        end = start + tree.tokens(node)
        tiers = [tier.name.lower() for tier in TIERS if tree.has_kv(node, tier)]
        if kv and kv[-1]["tiers"] == tiers:
            kv[-1]["end"] = end
        else:
            kv.append({"start": start, "end": end, "tiers": tiers})
        checkpoints += [
            {"at": start + offset, "tiers": [Tier(tier).name.lower() for tier in held]}
            for offset, held in tree.checkpoints(node)
            if held
        ]
    return {"node": path[-1], "tokens": kv[-1]["end"], "kv": kv, "checkpoints": checkpoints}
