"""Who may use a record, as 16 bytes: a digest of the request's `cache_salt` and `extra_key`.

It is kept in the header of each record, so that all of one tenant can be found and purged without knowing any
prompt. Keys of pages are seeded with the same two values, so a record is never found under another namespace;
this digest is not what keeps tenants apart. It is keyed by nothing secret: whoever reads the file can try likely
salts.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256

from .layout import NAMESPACE_BYTES, NO_NAMESPACE

_TAG = b"histate-namespace-v1"


@lru_cache(maxsize=4096)
def namespace_of(extra_key: str | None, cache_salt: str | None) -> bytes:
    """Return the namespace of requests with these values; NO_NAMESPACE without either. An empty salt is none."""
    cache_salt = cache_salt or None
    if extra_key is None and cache_salt is None:
        return NO_NAMESPACE
    digest = sha256(_TAG)
    # Presence and length are part of it, so that no two pairs share their bytes.
    for part in (extra_key, cache_salt):
        if part is None:
            digest.update(b"\0")
        else:
            text = part.encode()
            digest.update(b"\1" + len(text).to_bytes(8, "little") + text)
    return digest.digest()[:NAMESPACE_BYTES]
