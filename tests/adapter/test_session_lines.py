"""Lines from token 0 to the tip, from a mirror tree that grows, splits and shrinks."""

from __future__ import annotations

from sglang_histate.adapter.session_lines import MOST, SessionLines
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.prefix_tree import PrefixTree


def tree() -> PrefixTree:
    """0-1024 on the device, then 1: to 1536 on host and SSD, and 2: to 1280 nowhere but on the SSD."""
    made = PrefixTree()
    made.add(1, 0, 1024)
    made.add(2, 1, 512)
    made.add(3, 1, 256)
    made.set_kv(1, Tier.DEVICE, True)
    made.set_kv(2, Tier.HOST, True)
    made.set_kv(2, Tier.SSD, True)
    made.set_kv(3, Tier.SSD, True)
    made.set_checkpoint(1, 512, Tier.SSD, True)
    made.set_checkpoint(1, 1024, Tier.DEVICE, True)
    made.set_checkpoint(2, 512, Tier.HOST, True)
    made.set_checkpoint(2, 512, Tier.SSD, True)
    return made


def test_a_line_has_all_of_its_path() -> None:
    lines = SessionLines()
    lines.ended(2, "long", 10.0)
    (line,) = lines.as_json(tree())
    assert line == {
        "rid": "long",
        "ended_s": 10.0,
        "tokens": 1536,
        "kv": [
            {"start": 0, "end": 1024, "tiers": ["device"]},
            {"start": 1024, "end": 1536, "tiers": ["host", "ssd"]},
        ],
        "checkpoints": [
            {"at": 512, "tiers": ["ssd"]},
            {"at": 1024, "tiers": ["device"]},
            {"at": 1536, "tiers": ["host", "ssd"]},
        ],
    }


def test_what_went_on_is_one_session_and_branches_are_two() -> None:
    lines = SessionLines()
    lines.ended(1, "first turn", 1.0)
    lines.ended(2, "second turn", 2.0)
    lines.ended(3, "other second turn", 3.0)
    assert [line["rid"] for line in lines.as_json(tree())] == ["other second turn", "second turn"]
    lines.ended(1, "the first turn again", 4.0)
    assert [line["rid"] for line in lines.as_json(tree())] == ["other second turn", "second turn"]


def test_a_node_that_was_split_keeps_its_end() -> None:
    mirror, lines = tree(), SessionLines()
    lines.ended(2, "long", 1.0)
    mirror.split(2, 9, 192)
    (line,) = lines.as_json(mirror)
    assert line["tokens"] == 1536 and line["kv"][-1] == {"start": 1024, "end": 1536, "tiers": ["host", "ssd"]}


def test_what_the_tree_has_lost_is_no_session() -> None:
    mirror, lines = tree(), SessionLines()
    lines.ended(2, "long", 1.0)
    lines.ended(3, "short", 2.0)
    mirror.remove(3)
    assert [line["rid"] for line in lines.as_json(mirror)] == ["long"]
    lines.clear()
    assert lines.as_json(mirror) == []


def test_the_number_of_lines_is_bounded() -> None:
    mirror, lines = PrefixTree(), SessionLines()
    for node in range(1, MOST + 10):
        mirror.add(node, 0, 64)
        lines.ended(node, f"r{node}", float(node))
    found = lines.as_json(mirror)
    assert len(found) == MOST and found[0]["rid"] == f"r{MOST + 9}"
