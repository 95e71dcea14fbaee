"""Nothing outside `copy/` moves the bytes of a state or a page: read from the sources, call by call.

`cpu/` computes and `demo/` makes weights; neither knows records, the arena or the device's pools. The store moves bytes
between a record and a disk, and writes its own headers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "sglang_histate"
FREE = {"copy", "cpu", "demo", "upstream", "policy"}
CALLS = {
    *("copy_", "index_copy_", "index_add_", "index_put_", "put_", "scatter_", "masked_scatter_", "set_"),
    *("copyto", "putmask", "memmove", "memcpy", "_foreach_copy_"),
}
# Slices that are no state and no page, each with what it is.
KNOWN = {
    "adapter/hooks.py": ["starts[1:]"],  # numbers of checkpoints in a batch
    "adapter/prompt_memory.py": ["self._heads[row, :len(first)]"],  # token ids of prompts
    "adapter/token_spans.py": ["begins[:len(here)]"],  # where the spans of a prompt begin
    "cli/size/__init__.py": ["lines[-1:]"],
    "store/block_zero.py": ["self._page[:]", "self._page[:]"],  # the first page of a file
    "store/disk.py": ["buffer[:]", "buffer[:]"],  # a disk in memory and an erased page
    "store/erase.py": ["header[:]"],
    "store/writer.py": ["record.header[:]"],
    "store/faults.py": ["buffer[start:start + PAGE_BYTES]", "damaged[:]"],  # a disk that lies
    "store/wrong_states.py": [  # and one that gives other states
        "copy[:]",
        "copy[:layout.header_bytes]",
        "np.frombuffer(first, dtype=np.uint8)[3::4]",
    ],
}


def moves(root: Path) -> Iterator[tuple[str, str, int]]:
    """Yield (file, what, line) of every call and assignment that may move bytes in place."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.partition("/")[0] in FREE:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if called in CALLS or "emcpy" in called:
                    yield name, f"{called}()", node.lineno
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AugAssign):
                targets = [node.target]
            for target in targets:
                if isinstance(target, ast.Subscript) and any(
                    isinstance(one, ast.Slice) for one in ast.walk(target.slice)
                ):
                    yield name, ast.unparse(target), node.lineno


def unexpected(root: Path) -> list[str]:
    known = {name: list(targets) for name, targets in KNOWN.items()}
    found = []
    for name, what, line in moves(root):
        if what in known.get(name, []):
            known[name].remove(what)
        else:
            found.append(f"{name}:{line} {what}")
    return found


def test_only_the_copy_package_moves_states_and_pages() -> None:
    assert unexpected(ROOT) == []


def test_what_is_known_is_still_there() -> None:
    found = [(name, what) for name, what, _ in moves(ROOT)]
    assert sorted(found) == sorted((name, what) for name, all_of in KNOWN.items() for what in all_of)


@pytest.mark.parametrize(
    "source",
    [
        "target.copy_(source, non_blocking=True)",
        "rows.index_copy_(0, index, packed)",
        "memory[page * size : (page + 1) * size] = record.kv_pages[at]",
        "payload[:] = image",
        "np.copyto(target, source)",
        "ctypes.memmove(a, b, n)",
        "runtime.cudaMemcpyAsync(a, b, n, kind, stream)",
        "pool[:, slot] += 1",
    ],
)
def test_a_move_is_found(tmp_path: Path, source: str) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/a.py").write_text(f"def f():\n    {source}\n")
    assert len(unexpected(tmp_path)) == 1
    (tmp_path / "copy").mkdir()
    (tmp_path / "adapter/a.py").rename(tmp_path / "copy/a.py")
    assert unexpected(tmp_path) == []
