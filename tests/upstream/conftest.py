"""A small stand-in for the installed sglang, with patches in two groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_histate.upstream import tree

HEADER = """Description: {description}
 More about it.
Why-not-a-subclass: there is no class
Upstream: not-needed
Last-Verified: 0.5.23

"""

SCHEDULER = """import os
import time

LIMIT = 3


class Scheduler:
    size = 4

    def __init__(self):
        self.queue = []

    def step(self, now):
        first = self.queue.pop()
        first.run(now)
        return first

    @property
    def depth(self):
        return len(self.queue)


def make():
    return Scheduler()
"""


@dataclass
class Fake:
    """Folders of one fake installation."""

    site: Path  # holds sglang/
    patches: Path
    stand_in: Path
    cache: Path

    @property
    def installed(self) -> Path:
        return self.site / "sglang"

    def add_patch(self, group: str, name: str, changes: dict[str, tuple[str, str]]) -> None:
        """Add a patch that replaces text in files as they are after the group's earlier patches."""
        from sglang_histate.upstream import series

        folder = self.patches / group
        folder.mkdir(parents=True, exist_ok=True)
        listed = folder / "series"
        if not listed.exists():
            listed.write_text("# order of application\n")
        current = tree.apply_series(series.read_group(group, self.patches), self.site)
        body = ""
        for path, (old, new) in changes.items():
            before = current[path][1] if path in current else (self.site / path).read_text()
            assert before.count(old) == 1
            body += tree.unified(path, before, before.replace(old, new))
        (folder / name).write_text(HEADER.format(description=f"Change for {name}.") + body)
        listed.write_text(listed.read_text() + name + "\n")

    def build(self, *groups: str):
        from sglang_histate.upstream import build_overlay

        return build_overlay(
            groups, installed=self.installed, patches=self.patches, stand_in=self.stand_in, cache=self.cache
        )


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """One group per kind, two patches on one file in the second, and a plain file that no one patches."""
    made = Fake(tmp_path / "site", tmp_path / "patches", tmp_path / "stand_in/sgl_kernel", tmp_path / "cache")
    for path, text in {
        "sglang/__init__.py": "import sglang.srt.scheduler\n",
        "sglang/lang/__init__.py": "",
        "sglang/lang/api.py": "VALUE = 1\n",
        "sglang/srt/__init__.py": "",
        "sglang/srt/scheduler.py": SCHEDULER,
        "sglang/srt/plain.py": "PLAIN = True\n",
        "sglang/srt/deep/__init__.py": "",
        "sglang/srt/deep/ops.py": "def op(x):\n    return x + 1\n",
        "sglang/data.txt": "data\n",
    }.items():
        (made.site / path).parent.mkdir(parents=True, exist_ok=True)
        (made.site / path).write_text(text)
    made.stand_in.mkdir(parents=True)
    (made.stand_in / "__init__.py").write_text("STAND_IN = True\n")
    made.patches.mkdir()
    (made.patches / "UPSTREAM").write_text(f"package: sglang\nversion: 0.5.23\nwheel: a.whl {'0' * 64}\n")
    made.add_patch("cpu", "cpu-op.patch", {"sglang/srt/deep/ops.py": ("x + 1", "x + 2")})
    made.add_patch("cpu", "cpu-limit.patch", {"sglang/srt/scheduler.py": ("LIMIT = 3", "LIMIT = 1")})
    made.add_patch(
        "histate",
        "step-hook.patch",
        {
            "sglang/srt/scheduler.py": (
                "        first.run(now)\n",
                "        first.run(now)\n        histate.stepped(first)\n",
            )
        },
    )
    made.add_patch(
        "histate",
        "make-hook.patch",
        {"sglang/srt/scheduler.py": ("    return Scheduler()", "    return histate.made(Scheduler())")},
    )
    return made
