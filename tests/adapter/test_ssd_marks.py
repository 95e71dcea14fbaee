import random

import pytest

from sglang_histate.adapter.ssd_marks import SsdMarks


def test_a_key_has_one_place_and_a_place_its_key() -> None:
    marks = SsdMarks()
    marks.place(b"a", 1, 64)
    marks.place(b"b", 1, 128)
    assert marks.find(b"a") == (1, 64) and marks.key_at(1, 128) == b"b"
    marks.place(b"a", 2, 64)
    assert marks.find(b"a") == (2, 64) and len(marks) == 2
    with pytest.raises(KeyError):
        marks.key_at(1, 64)
    marks.drop(b"a")
    marks.drop(b"unknown")
    assert marks.find(b"a") is None and len(marks) == 1


def test_a_split_moves_the_first_ones_up() -> None:
    marks = SsdMarks()
    for offset in (64, 128, 192, 256):
        marks.place(b"%d" % offset, 1, offset)
    marks.split(1, 2, 128)
    assert [marks.find(b"%d" % offset) for offset in (64, 128, 192, 256)] == [
        (2, 64),
        (2, 128),
        (1, 64),
        (1, 128),
    ]
    assert marks.removed(1) == [(64, b"192"), (128, b"256")]
    assert marks.removed(1) == [] and len(marks) == 2


def test_positions_survive_any_splits() -> None:
    draw = random.Random(1)
    for _ in range(50):
        marks, length = SsdMarks(), 40 * 64
        positions = {b"%d" % p: p * 64 for p in draw.sample(range(1, 41), 12)}
        starts = {0: (0, length)}  # node -> start, end
        for key, position in positions.items():
            marks.place(key, 0, position)
        for upper in range(1, 10):
            node = draw.choice(sorted(starts))
            start, end = starts[node]
            if end - start < 128:
                continue
            at = draw.randrange(1, (end - start) // 64) * 64
            marks.split(node, upper, at)
            starts[upper], starts[node] = (start, start + at), (start + at, end)
        for key, position in positions.items():
            node, offset = marks.find(key)  # type: ignore[misc]
            start, end = starts[node]
            assert start + offset == position and start < position <= end
