"""`histate size` says of the demo model what a server of it counts with."""

from __future__ import annotations

import json

import pytest

from eval.servers import Server
from sglang_histate.cli import main as histate
from sglang_histate.demo import ensure_demo_model
from sglang_histate.sizes import parse_size

from .conftest import MAIN

pytestmark = pytest.mark.server


def test_sizes_are_those_of_the_running_server(main: Server, capsys) -> None:
    status = main.status()
    ssd = MAIN.sizes[MAIN.sizes.index("--histate-ssd-size") + 1]
    argv = ["size", "--model", str(ensure_demo_model()), "--dtype", "float32", "--conv-dtype", "float32"]
    assert histate([*argv, "--device", "1GiB", "--host", "1GiB", "--ssd", ssd, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rank = found["per_rank"]
    assert rank["kv_token_bytes"] == status["kv_bytes_per_token"]
    assert rank["checkpoint_bytes"] == status["checkpoint_bytes"]
    assert rank["checkpoint_in_kv_tokens"] == status["checkpoint_in_kv_tokens"]
    assert found["tiers"]["ssd"]["checkpoints"] == status["tiers"]["ssd"]["checkpoints"]["total"]
    assert found["tiers"]["ssd"]["size_bytes"] <= parse_size(ssd)
