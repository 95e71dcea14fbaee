"""docs/first-steps.md: its script prints what the page says, against a server with an empty cache."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from eval.servers import Server

pytestmark = pytest.mark.server
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "first-steps.md").read_text(encoding="utf-8")


def test_the_script_prints_what_the_page_says(main: Server) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    printed = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)[0]
    assert script.count("localhost:30000") == 1
    script = script.replace("localhost:30000", f"127.0.0.1:{main.port}")
    before = main.settle()["counters"]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout == printed, done.stderr
    after = main.settle()["counters"]
    said = re.findall(r"`(\w+_total)` \((\d+)[ :]", PAGE)
    assert len(said) == 3
    for name, count in said:
        assert after[name] - before[name] == int(count), name
