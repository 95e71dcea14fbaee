"""Tenants: what one `cache_salt` or `extra_key` has stored is never a hit for another, in no tier, before and after a restart."""

from __future__ import annotations

import time
from itertools import permutations

import pytest

from sglang_histate.adapter.saving import Saving
from sglang_histate.store import NO_NAMESPACE, RecordKind, namespace_of

from .conftest import GPU
from .engine import tokens
from .test_kv_ssd import Bench
from .test_restart import restarted

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")

NOBODY: dict[str, str] = {}
TENANTS = [
    NOBODY,
    {"cache_salt": "one"},
    {"cache_salt": "two"},
    {"extra_key": "one"},
    {"extra_key": "one", "cache_salt": "two"},
]
PROMPT = tokens((5, 512))


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.tier.close()


def namespace(tenant: dict[str, str]) -> bytes:
    return namespace_of(tenant.get("extra_key"), tenant.get("cache_salt"))


def stored(bench: Bench) -> set[tuple[bytes, RecordKind]]:
    return {(entry.namespace, entry.kind) for entry in bench.store.entries()}


def crowd(bench: Bench, tenant: dict[str, str]) -> None:
    """Other prompts of the same tenant: what was there before goes to the SSD."""
    for seed in range(100, 120):
        bench.visit(tokens((seed, 512)), **tenant)
        bench.off_device()
        bench.settle()


@pytest.mark.parametrize(("owner", "other"), permutations(TENANTS, 2))
def test_a_prompt_in_memory_is_its_owners(bench, owner, other) -> None:
    bench.visit(PROMPT, **owner)
    assert bench.ask(PROMPT, **other) == 0
    assert bench.ask(PROMPT, **owner) == len(PROMPT)
    bench.off_device()  # now on host and SSD
    assert bench.ask(PROMPT, **other) == 0
    assert bench.ask(PROMPT, **owner) == len(PROMPT)


@pytest.mark.parametrize("owner", TENANTS, ids=str)
def test_a_prompt_on_the_ssd_is_its_owners_also_after_a_restart(bench, owner) -> None:
    bench.visit(PROMPT, **owner)
    bench.off_device()
    crowd(bench, owner)
    for other in TENANTS:
        if other != owner:
            assert bench.ask(PROMPT, **other) == 0
    again = restarted(bench)
    try:
        for other in TENANTS:
            if other != owner:
                assert again.ask(PROMPT, **other) == 0
        assert again.ask(PROMPT, **owner) == len(PROMPT)
        again.engine.check()
    finally:
        again.tier.close()


def test_every_record_carries_its_namespace(bench) -> None:
    """Captures, spills, and what is saved at the exit."""
    crowd(bench, {"cache_salt": "one"})
    assert stored(bench) == {(namespace_of(None, "one"), kind) for kind in RecordKind}
    crowd(bench, NOBODY)
    assert stored(bench) >= {(NO_NAMESPACE, kind) for kind in RecordKind}


def test_saving_keeps_the_namespace() -> None:
    bench = Bench(host_pages=96)
    tenant = {"extra_key": "adapter", "cache_salt": "one"}
    bench.visit(PROMPT, **tenant)
    bench.off_device()
    assert Saving(bench.tier, bench.engine.slots.read_into, time.monotonic() + 20).run().sessions == 1
    assert stored(bench) == {(namespace(tenant), kind) for kind in RecordKind}
    bench.tier.close()
    again = restarted(bench)
    try:
        assert again.ask(PROMPT) == 0 and again.ask(PROMPT, **tenant) == len(PROMPT)
    finally:
        again.tier.close()


def test_namespaces_differ_and_have_no_accidents() -> None:
    pairs = [(None, None), ("a", None), (None, "a"), ("a", "a"), ("aa", None), ("", None), ("", "a")]
    assert len({namespace_of(*pair) for pair in pairs}) == len(pairs)
    assert namespace_of(None, None) == namespace_of(None, "") == NO_NAMESPACE
    assert namespace_of(None, "tenant") == bytes.fromhex(
        "9f28741aefc75557c3f9c28976561c78"
    )  # golden: written into headers
