"""POST /histate/purge: everything, or all of one namespace, goes from the device, the host and the SSD.

    route (HTTP process)    asks every scheduler, again and again for a while, until nothing is left
    purge (each scheduler)  drops what nothing uses, at once and the same on every rank of one cache

What a running request uses stays and is counted; so is what is being copied between tiers, which the next look finds
free. The request comes in the `rid` of SGLang's own question for the internal state: that reaches all ranks between
the same two steps, and its answer has room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import DriveHostEvictionResult

from sglang_histate.adapter.cache import HiStateCache
from sglang_histate.store import namespace_of
from sglang_histate.store.layout import NAMESPACE_BYTES

PREFIX = "histate-purge:"
PENDING = "histate-purge-pending"
_EVERYTHING = "all"
_TRIES, _PAUSE_S = 5, 1.0  # while something is in use
_LOOKS, _LOOK_PAUSE_S = 300, 0.1  # while a disk is being erased


def answer(tree_cache: Any, rid: str | None) -> dict[str, Any] | None:
    """Do what a request for the internal state asks for in its `rid`; None if that is nothing of ours."""
    if rid is None or not (rid == PENDING or rid.startswith(PREFIX)):
        return None
    if not isinstance(tree_cache, HiStateCache) or tree_cache.tier is None:
        return {"enabled": False}
    if rid == PENDING:
        return {"enabled": True, **_erasing(tree_cache.tier)}
    text = rid.removeprefix(PREFIX)
    return {"enabled": True, **purge(tree_cache, None if text == _EVERYTHING else bytes.fromhex(text))}


def purge(cache: HiStateCache, namespace: bytes | None) -> dict[str, Any]:
    """Drop what is of `namespace` (None: everything). Scheduler thread; every rank calls it in the same step.

    Returns:
        `ssd_entries` and `nodes` that went, nodes that are `in_use` and stay, and see `_erasing`.
    """
    tier = cache.tier
    assert tier is not None
    erasing = _erasing(tier) | {"pending": True}  # failures before this one
    ssd_entries = tier.store.purge(namespace)
    tier.verification.forget(namespace)
    tier.history.forget(namespace)
    if cache.explanations is not None:
        cache.explanations.forget(namespace)

    def wanted(node: Any) -> bool:
        return namespace is None or namespace_of(node.key.extra_key, node.key.cache_salt) == namespace

    before = _held(cache, wanted)
    _let_go(cache, wanted)
    left = _held(cache, wanted)
    tier.bury()
    return {"ssd_entries": ssd_entries, "nodes": before - left, "in_use": left, **erasing}


def _nodes(core: Any) -> list[Any]:
    """Return all nodes but the root, parents first."""
    nodes = list(core.root_node.children.values())
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


def _held(cache: HiStateCache, wanted: Callable[[Any], bool]) -> int:
    core = cache.tree_core
    return sum(wanted(node) and not core.is_dead(node) for node in _nodes(core))


def _let_go(cache: HiStateCache, wanted: Callable[[Any], bool]) -> None:
    """Evict each wanted node that nothing uses from device and host, deepest first. The SSD has none of them any more."""
    core = cache.tree_core
    for node in reversed([node for node in _nodes(core) if wanted(node)]):
        if node in core.evictable_device_leaves:
            cache._apply_eviction_result(core.evict_device_leaf(node.id, False))
        if node in core.evictable_host_leaves:
            result = DriveHostEvictionResult()
            core._evict_host_leaf(
                node, result.tracker, result.device_frees, result.host_frees, result.cache_actions
            )
            cache._apply_eviction_result(result)


def _erasing(tier: Any) -> dict[str, Any]:
    """Return whether a rank is still erasing (`pending`), and whether the disk of one failed since it was opened."""
    purges = tier.store.stats().purges
    least = tier.on_all_ranks([purges.done - purges.asked, -purges.failed])
    return {"pending": least[0] < 0, "failed": -least[1]}


def task_of(body: Any) -> str:
    """Return the `rid` for the body of a request: ``{"all": true}``, ``{"namespace": hex}``, or a tenant's values.

    Raises:
        ValueError: it is none of these; the text says what is wanted.
    """
    wanted = (
        'send {"all": true}, or "cache_salt" and "extra_key" as in requests, or "namespace" in hexadecimal'
    )
    if (
        not isinstance(body, dict)
        or not body
        or body.keys() - {"all", "namespace", "cache_salt", "extra_key"}
    ):
        raise ValueError(wanted)
    if "all" in body or "namespace" in body:
        if body == {"all": True}:
            return PREFIX + _EVERYTHING
        try:
            (name,) = body.values()
            if len(bytes.fromhex(name)) == NAMESPACE_BYTES:
                return PREFIX + name
        except (TypeError, ValueError):
            pass
        raise ValueError(wanted)
    if not all(value is None or isinstance(value, str) for value in body.values()):
        raise ValueError(wanted)
    return PREFIX + namespace_of(body.get("extra_key"), body.get("cache_salt")).hex()


async def run(ask: Callable[[str], Any], task: str) -> dict[str, Any]:
    """Purge on all schedulers; `ask(rid)` returns what each says. Takes some seconds while something is in use.

    Returns:
        What went, what is `in_use` at the end, and whether all of it is `erased` from the disks.
    """
    gone = {"ssd_entries": 0, "nodes": 0}
    in_use, failures = 0, None
    for look in range(_TRIES):
        await asyncio.sleep(_PAUSE_S * bool(look))
        found = await ask(task)
        if not all(one["enabled"] for one in found):
            return {"enabled": False}
        for name in gone:
            gone[name] += sum(one[name] for one in found)
        if failures is None:
            failures = sum(one["failed"] for one in found)
        in_use = sum(one["in_use"] for one in found)
        if not in_use:
            break
    for _ in range(_LOOKS):
        found = await ask(PENDING)
        if not any(one["pending"] for one in found):
            break
        await asyncio.sleep(_LOOK_PAUSE_S)
    pending = any(one["pending"] for one in found)
    erased = not pending and sum(one["failed"] for one in found) == failures
    return {"enabled": True, **gone, "in_use": in_use, "erased": erased}
