"""Keys of checkpoints: the page-hash chain of SGLang, with its namespaces."""

from __future__ import annotations

import shutil
from array import array
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sglang_histate.adapter import page_keys
from sglang_histate.adapter.page_keys import PageKeys

from .engine import PAGE, tokens

NAMESPACES = [
    (None, None),
    ("tenant", None),
    (None, "salt"),
    ("tenant", "salt"),
    ("", "salt"),
    ("tenantsalt", None),
]


@pytest.fixture(scope="module")
def native() -> None:
    """SGLang's own hash is a C++ extension that is compiled on first use."""
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("no C++ compiler: SGLang's own hash cannot be built here")
    try:
        get_storage_hash_str(RadixKey(array("q", range(PAGE))), page_size=PAGE)
    except Exception as error:  # missing OpenSSL headers, no ninja, ...
        pytest.skip(f"SGLang's own hash cannot be built here: {type(error).__name__}")


def stock(ids: array, extra_key: str | None, salt: str | None) -> list[bytes]:
    found = get_storage_hash_str(RadixKey(ids, extra_key, cache_salt=salt), page_size=PAGE)
    return [bytes.fromhex(digest) for digest in found]


@pytest.mark.parametrize(("extra_key", "salt"), NAMESPACES)
def test_equal_to_sglang(native, extra_key, salt) -> None:
    ids = tokens((3, 7 * PAGE))
    ids[2 * PAGE + 5] = 2**32 - 1  # the widest narrow id
    ids[4 * PAGE] = 2**32  # the narrowest wide one
    ids[5 * PAGE + 63] = 2**62 + 17
    keys = PageKeys(PAGE, extra_key, salt)
    assert [keys.at(ids, p) for p in range(PAGE, len(ids) + 1, PAGE)] == stock(ids, extra_key, salt)


@settings(max_examples=30)
@given(
    ids=st.lists(
        st.one_of(st.integers(0, 151_935), st.integers(0, 2**63 - 1)), min_size=PAGE, max_size=PAGE * 4
    )
)
def test_any_tokens_equal_to_sglang(native, ids) -> None:
    usable = array("q", ids[: len(ids) // PAGE * PAGE])
    keys = PageKeys(PAGE, None, None)
    assert [keys.at(usable, p) for p in range(PAGE, len(usable) + 1, PAGE)] == stock(usable, None, None)


def test_the_scheme_without_any_compiler() -> None:
    ids = tokens((1, 2 * PAGE))
    first = sha256(b"".join(i.to_bytes(4, "little") for i in ids[:PAGE])).digest()
    second = sha256(first + b"".join(i.to_bytes(4, "little") for i in ids[PAGE:])).digest()
    keys = PageKeys(PAGE, None, None)
    assert keys.at(ids, 2 * PAGE) == second and keys.at(ids, PAGE) == first


def test_namespaces_never_share_a_key() -> None:
    ids = tokens((1, PAGE))
    assert len({PageKeys(PAGE, *name).at(ids, PAGE) for name in NAMESPACES}) == len(NAMESPACES)


def test_an_empty_salt_is_no_salt() -> None:
    ids = tokens((1, PAGE))
    assert PageKeys(PAGE, None, "").at(ids, PAGE) == PageKeys(PAGE, None, None).at(ids, PAGE)


def test_narrow_and_wide_pages_differ() -> None:
    """Two ids of 32 bits and one of 64 bits may have the same bytes: the tag keeps the pages apart."""
    wide, narrow = array("q", [(7 << 32) + 5] * 2), array("q", [5, 7, 5, 7])
    assert PageKeys(2, None, None).at(wide, 2) != PageKeys(4, None, None).at(narrow, 4)


def test_pages_are_hashed_once_and_in_any_order(monkeypatch) -> None:
    ids = tokens((1, 8 * PAGE))
    keys = PageKeys(PAGE, None, None)
    whole = [PageKeys(PAGE, None, None).at(ids, p) for p in range(PAGE, len(ids) + 1, PAGE)]
    assert keys.at(ids, 3 * PAGE) == whole[2] and keys.at(ids, PAGE) == whole[0]
    ids.extend(tokens((9, PAGE)))  # decode appends
    assert keys.at(ids, 8 * PAGE) == whole[7]
    monkeypatch.setattr(page_keys, "sha256", None)
    assert keys.at(ids, 5 * PAGE) == whole[4]


@pytest.mark.parametrize("position", [0, 1, PAGE - 1, PAGE + 1, 3 * PAGE])
def test_positions_off_the_pages_are_refused(position) -> None:
    with pytest.raises(AssertionError):
        PageKeys(PAGE, None, None).at(tokens((1, 2 * PAGE)), position)


def test_the_tree_key_names_the_same_prefix() -> None:
    key = PageKeys(PAGE, "tenant", "salt").radix_key(tokens((1, 3 * PAGE)), 2 * PAGE)
    assert isinstance(key.token_ids, array) and len(key) == 2 * PAGE
    assert key.extra_key == "tenant" and key.cache_salt == "salt"


@given(known=st.integers(0, 5), end=st.integers(0, 5))
def test_a_look_ahead_is_not_remembered(known: int, end: int) -> None:
    ids = tokens((5, 5 * PAGE))
    keys, apart = PageKeys(PAGE, None, "salt"), PageKeys(PAGE, None, "salt")
    if known:
        keys.at(ids, known * PAGE)
    assert keys.peek(ids, end * PAGE) == [apart.at(ids, page * PAGE) for page in range(1, end + 1)]
    remembered = [keys.known(page * PAGE) is not None for page in range(1, 6)]
    assert remembered == [page <= known for page in range(1, 6)]
