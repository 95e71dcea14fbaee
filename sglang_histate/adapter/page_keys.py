"""Keys of checkpoints: SGLang's own page-hash chain, cut at a page boundary.

The chain starts from the request's namespace (``extra_key``, ``cache_salt``), so tenants that may not share KV
cannot share checkpoints either. No second hash is invented: a key here equals the hash of the tree's page.
"""

from __future__ import annotations

from array import array

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed


class PageKeys:
    """The page hashes of one request's tokens, computed on demand and only once.

    The tokens may grow (decode appends), never change.
    """

    def __init__(self, page_size: int, extra_key: str | None, cache_salt: str | None) -> None:
        self.page_size = page_size
        self.extra_key = extra_key
        self.cache_salt = cache_salt or None
        self._seed = storage_namespace_seed(extra_key, self.cache_salt)
        self._hashes: list[bytes] = []

    def at(self, tokens: array, position: int) -> bytes:
        """Return the 32-byte key of ``tokens[:position]``. `position` is a positive multiple of the page size."""
        assert position > 0 and position % self.page_size == 0 and position <= len(tokens)
        known = len(self._hashes)
        wanted = position // self.page_size
        if wanted > known:
            prior = self._hashes[-1].hex() if known else self._seed
            fresh = get_hash_str(tokens[known * self.page_size : position], prior, page_size=self.page_size)
            self._hashes.extend(bytes.fromhex(digest) for digest in fresh)
            assert len(self._hashes) == wanted
        return self._hashes[wanted - 1]

    def radix_key(self, tokens: array, position: int) -> RadixKey:
        """Return the tree key of ``tokens[:position]``. The tokens stay an `array`: the tree asserts it."""
        return RadixKey(tokens[:position], self.extra_key, cache_salt=self.cache_salt)
