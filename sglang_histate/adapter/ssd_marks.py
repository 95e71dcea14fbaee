"""Where in the radix tree the SSD's checkpoints belong: key to (node, offset) and back."""

from __future__ import annotations

from typing import Any


class SsdMarks:
    """Offsets are tokens from the start of a node, above 0 and at most its length."""

    def __init__(self) -> None:
        self._place: dict[bytes, tuple[Any, int]] = {}
        self._keys: dict[Any, dict[int, bytes]] = {}

    def __len__(self) -> int:
        return len(self._place)

    def place(self, key: bytes, node: Any, offset: int) -> None:
        """Put `key` at its place, away from an earlier one."""
        self.drop(key)
        self._place[key] = node, offset
        self._keys.setdefault(node, {})[offset] = key

    def find(self, key: bytes) -> tuple[Any, int] | None:
        return self._place.get(key)

    def key_at(self, node: Any, offset: int) -> bytes:
        """Return the key at a place.

        Raises:
            KeyError: there is none.
        """
        return self._keys[node][offset]

    def known_at(self, node: Any, offset: int) -> bytes | None:
        """Return the key at a place, None if there is none."""
        return self._keys.get(node, {}).get(offset)

    def drop(self, key: bytes) -> None:
        place = self._place.pop(key, None)
        if place is not None:
            node, offset = place
            del self._keys[node][offset]
            if not self._keys[node]:
                del self._keys[node]

    def split(self, node: Any, upper: Any, tokens: int) -> None:
        """The first `tokens` tokens of `node` belong to `upper` now."""
        moved = self._keys.pop(node, {})
        for key in moved.values():
            del self._place[key]
        for offset, key in moved.items():
            if offset <= tokens:
                self.place(key, upper, offset)
            else:
                self.place(key, node, offset - tokens)

    def removed(self, node: Any) -> list[tuple[int, bytes]]:
        """Forget a node; return what was in it, by offset."""
        gone = sorted(self._keys.get(node, {}).items())
        for _, key in gone:
            self.drop(key)
        return gone
