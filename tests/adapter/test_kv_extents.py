import random

from sglang_histate.adapter.kv_extents import KvExtents, Piece
from sglang_histate.adapter.page_names import PageNames


def test_pieces_cover_a_node_or_leave_runs() -> None:
    extents = KvExtents()
    extents.add(1, Piece(b"b", 0, 4, 2))
    extents.add(1, Piece(b"a", 0, 0, 2))
    assert extents.missing(1, 8) == [(2, 2), (6, 2)] and not extents.covered(1, 8)
    extents.add(1, Piece(b"c", 0, 2, 2))
    assert extents.covered(1, 6) and extents.keys(1) == [b"a", b"c", b"b"]
    assert extents.missing(2, 3) == [(0, 3)]


def test_a_split_inside_an_extent_gives_both_a_piece() -> None:
    extents = KvExtents()
    extents.add(1, Piece(b"a", 0, 0, 4))
    extents.split(1, 2, 1)
    assert extents.pieces(2) == [Piece(b"a", 0, 0, 1)] and extents.pieces(1) == [Piece(b"a", 1, 0, 3)]
    assert extents.removed(1) == [] and b"a" in extents
    assert extents.removed(2) == [b"a"] and b"a" not in extents


def test_a_lost_extent_is_lost_for_all() -> None:
    extents = KvExtents()
    extents.add(1, Piece(b"a", 0, 0, 4))
    extents.add(1, Piece(b"b", 0, 4, 4))
    extents.split(1, 2, 2)
    assert sorted(extents.gone(b"a")) == [1, 2]
    assert extents.pieces(2) == [] and extents.keys(1) == [b"b"] and not extents.covered(2, 2)
    assert extents.gone(b"a") == []


def test_random_splits_keep_every_page_in_its_place() -> None:
    draw = random.Random(3)
    for _ in range(100):
        extents, pages = KvExtents(), 60
        where, at = {}, 0  # page of the path -> (extent, its page)
        while at < pages:
            count = min(draw.randrange(1, 6), pages - at)
            if draw.random() < 0.8:
                extents.add(0, Piece(b"%d" % at, 0, at, count))
                where.update({at + i: (b"%d" % at, i) for i in range(count)})
            at += count
        spans = {0: (0, pages)}
        for upper in range(1, 12):
            node = draw.choice(sorted(spans))
            start, end = spans[node]
            if end - start > 1:
                cut = draw.randrange(1, end - start)
                extents.split(node, upper, cut)
                spans[upper], spans[node] = (start, start + cut), (start + cut, end)
        found = {}
        for node, (start, end) in spans.items():
            for piece in extents.pieces(node):
                for i in range(piece.pages):
                    found[start + piece.at + i] = piece.key, piece.skip + i
            covered = sum(start <= page < end for page in where) == end - start
            assert extents.covered(node, end - start) == covered
        assert found == where


def test_names_follow_splits() -> None:
    names = PageNames()
    names.set(1, [b"a", b"b", b"c"])
    names.split(1, 2, 1)
    names.split(7, 8, 1)
    assert names.of(2) == [b"a"] and names.of(1) == [b"b", b"c"] and 7 not in names and 8 not in names
    names.removed(1)
    names.removed(7)
    assert 1 not in names
