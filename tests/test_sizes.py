"""Byte sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        (4096, 4096),
        ("1B", 1),
        ("512MiB", 512 << 20),
        ("1GiB", 1 << 30),
        ("2TiB", 2 << 40),
        ("1.5GiB", 3 << 29),
        ("0.5KiB", 512),
        (" 64 KiB ", 65536),
    ],
)
def test_sizes(text, size) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "512MB", "512mib", "512 M", "-1GiB", "1e9", "1,5GiB", "1GiB2", "0x10", "1.5", "0.3KiB", None],
)
def test_what_is_no_size_is_named(text) -> None:
    with pytest.raises(ValueError, match=r"is not a (size|whole number of bytes)") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@given(st.integers(0, 1 << 60))
def test_a_bare_number_is_bytes(size) -> None:
    assert parse_size(str(size)) == size or size > 1 << 53  # beyond that a float cannot hold every integer


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1.00KiB"),
        (1536 << 20, "1.50GiB"),
        (1 << 40, "1.00TiB"),
        (1 << 52, "4096.00TiB"),
    ],
)
def test_format(size, text) -> None:
    assert format_size(size) == text


@given(st.integers(0, 1 << 50))
def test_format_reads_back_within_one_percent(size) -> None:
    text = format_size(size)
    number = float(text.rstrip("BKMGTi"))
    unit = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}[
        text.lstrip("0123456789.")
    ]
    assert abs(number * unit - size) <= max(1, size * 0.01)
