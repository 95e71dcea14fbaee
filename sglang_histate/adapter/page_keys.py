"""Keys of checkpoints: SGLang's page-hash chain, cut at a page boundary.

The chain starts from the request's namespace (``extra_key``, ``cache_salt``), so tenants that may not share KV
cannot share checkpoints either. It is the scheme of ``sglang.srt.mem_cache.utils.get_storage_hash_str``, computed
with hashlib: SGLang's own function compiles a C++ extension on first use, which costs the first request many seconds
and fails where no compiler or no OpenSSL headers are installed.
"""

from __future__ import annotations

from array import array
from hashlib import sha256

import numpy as np
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import storage_namespace_seed

from sglang_histate.store import namespace_of

# Token ids are hashed as unsigned 32-bit little-endian integers. A page with a larger id (multimodal placeholders are
# content hashes) is hashed as 64-bit integers behind a tag, so that no two pages share their bytes.
_NARROW, _WIDE, _WIDE_TAG = np.dtype("<u4"), np.dtype("<u8"), b"\xff"


class PageKeys:
    """The page hashes of one request's tokens, computed on demand and only once.

    The tokens may grow (decode appends), never change.
    """

    def __init__(self, page_size: int, extra_key: str | None, cache_salt: str | None) -> None:
        self.page_size = page_size
        self.extra_key = extra_key
        self.cache_salt = cache_salt or None
        self.namespace = namespace_of(extra_key, self.cache_salt)
        seed = storage_namespace_seed(extra_key, self.cache_salt)
        self._seed = b"" if seed is None else bytes.fromhex(seed)
        self._hashes: list[bytes] = []

    def at(self, tokens: array, position: int) -> bytes:
        """Return the 32-byte key of ``tokens[:position]``. `position` is a positive multiple of the page size."""
        assert position > 0 and position % self.page_size == 0 and position <= len(tokens)
        self._hashes += self._beyond(tokens, position)
        return self._hashes[position // self.page_size - 1]

    def known(self, position: int) -> bytes | None:
        """Return the key at `position` if it was asked for before; an aborted request may have lost its tokens."""
        page = position // self.page_size
        return self._hashes[page - 1] if 0 < page <= len(self._hashes) else None

    def between(self, tokens: array, start: int, end: int) -> list[bytes]:
        """Return the keys of the pages from `start` to `end`, each a multiple of the page size, 0 <= start < end."""
        self.at(tokens, end)
        return self._hashes[start // self.page_size : end // self.page_size]

    def peek(self, tokens: array, end: int) -> list[bytes]:
        """Return the keys of all pages up to `end`, a multiple of the page size, without remembering new ones.

        For what one rank does alone: what is `known` has to be the same on all of them.
        """
        return self._hashes[: end // self.page_size] + self._beyond(tokens, end)

    def radix_key(self, tokens: array, position: int) -> RadixKey:
        """Return the tree key of ``tokens[:position]``. The tokens stay an `array`: the tree asserts it."""
        return RadixKey(tokens[:position], self.extra_key, cache_salt=self.cache_salt)

    def _beyond(self, tokens: array, end: int) -> list[bytes]:
        """Return the keys of the pages up to `end` that are not remembered."""
        start = len(self._hashes) * self.page_size
        if end <= start:
            return []
        pages = np.asarray(tokens[start:end], dtype=np.int64).astype(_WIDE).reshape(-1, self.page_size)
        wide = np.any(pages > np.iinfo(_NARROW).max, axis=1).tolist()
        narrow = pages.astype(_NARROW)
        prior = self._hashes[-1] if self._hashes else self._seed
        found = []
        for index in range(len(pages)):
            content = _WIDE_TAG + pages[index].tobytes() if wide[index] else narrow[index].tobytes()
            prior = sha256(prior + content).digest()
            found.append(prior)
        return found
