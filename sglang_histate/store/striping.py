"""How the slabs of a store lie in the files of its roots: slab i is number i // n in the file of root i % n."""

from __future__ import annotations

from dataclasses import dataclass

from .layout import SUPERBLOCK_BYTES, RecordLayout


@dataclass(frozen=True)
class Striping:
    """`slab_count` slabs in `n_roots` files, each with a superblock of its own."""

    layout: RecordLayout
    slab_count: int
    n_roots: int = 1

    @classmethod
    def of(cls, layout: RecordLayout, size_bytes: int, n_roots: int) -> Striping:
        """Return what fits into `size_bytes` for all files together."""
        return cls(layout, layout.slab_count(size_bytes - (n_roots - 1) * SUPERBLOCK_BYTES), n_roots)

    def root(self, slab: int) -> int:
        return slab % self.n_roots

    def offset(self, slab: int) -> int:
        """Return where `slab` starts in the file of its root, bytes."""
        return self.layout.slab_offset(slab // self.n_roots)

    def slab(self, root: int, number: int) -> int:
        """Return the slab that is `number` in the file of `root`."""
        return number * self.n_roots + root

    def slabs_in(self, root: int) -> int:
        return len(range(root, self.slab_count, self.n_roots))

    def file_bytes(self, root: int) -> int:
        return self.layout.file_bytes(self.slabs_in(root))

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(map(self.file_bytes, range(self.n_roots)))
