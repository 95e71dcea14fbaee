"""`histate store` against a running server: it looks without disturbing, and purges through the server, on all ranks."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from eval.servers import Server
from sglang_histate.cli import main as histate
from sglang_histate.store import namespace_of
from sglang_histate.store.survey import SlabFile, survey

from .conftest import MAIN, Servers, Spec
from .tools import cached, random_tokens

pytestmark = [pytest.mark.server, pytest.mark.timeout(1800)]

PROMPTS = [random_tokens(1000, f"purge-{number}") for number in range(6)]
TENANTS = ("one", "two", None)
TWO = Spec("purged-ranks", (*MAIN.arguments, "--tp-size", "2"))
KEYED = Spec("keyed", (*MAIN.arguments, "--api-key", "user", "--admin-api-key", "admin"))


def ask(server: Server, salt: str | None) -> list[int]:
    fields = {} if salt is None else {"cache_salt": salt}
    found = [cached(server.generate(prompt, **fields)) for prompt in PROMPTS]
    server.settle()
    return found


def headers(root: Path, namespace: bytes) -> list[int]:
    """Return how many headers of `namespace` each rank's file has."""
    counts = []
    for path in survey(root).files:
        with SlabFile.open(root, path) as file:
            found = [slab.header for slab in file.headers()]
        counts.append(sum(header is not None and header.namespace == namespace for header in found))
    return counts


@pytest.mark.parametrize("spec", [MAIN, TWO], ids=lambda spec: spec.name)
def test_one_tenant_is_purged_and_the_others_are_served_on(servers: Servers, spec: Spec, capsys) -> None:
    server, root = servers.get(spec), servers.ssd_dir(spec)
    for salt in TENANTS:
        assert not any(ask(server, salt)), "nobody gets what another tenant has"
    of_one = namespace_of(None, "one")
    assert all(headers(root, of_one))
    assert histate(["store", "verify", "--ssd-dir", str(root)]) == 0
    purge = ["store", "purge", "--ssd-dir", str(root), "--salt", "one"]
    assert histate(purge) == 1 and "give --url" in capsys.readouterr().err
    assert histate([*purge, "--url", server.url]) == 0, capsys.readouterr().err
    assert not any(headers(root, of_one)) and all(headers(root, namespace_of(None, None)))
    assert cached(server.generate(PROMPTS[0], cache_salt="one")) == 0
    assert sum(ask(server, "two")) > 0 and server.status()["eviction"]["ranks_agree"]
    assert histate(["store", "purge", "--ssd-dir", str(root), "--url", server.url]) == 0
    assert not any(headers(root, namespace_of(None, "two")))
    assert not any(ask(server, "two")) and server.status()["eviction"]["ranks_agree"]


def test_only_the_admin_may_purge_and_read_words(servers: Servers, capsys, monkeypatch) -> None:
    # The test's own server asks without a key; it only has to start.
    argv = ["store", "purge", "--ssd-dir", str(servers.ssd_dir(KEYED)), "--url"]
    log = servers.folder / "keyed.log"
    servers.stop()
    with Server(
        ["--demo", *KEYED.arguments, "--histate-ssd-dir", argv[3], *KEYED.sizes, "--hicache-ratio", "2"], log
    ) as server:
        server.wait_ready()
        for key, code in ((None, 401), ("user", 401), ("admin", 200)):
            request = urllib.request.Request(server.url + "/histate/purge", b'{"all": true}')
            if key is not None:
                request.add_header("Authorization", f"Bearer {key}")
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    assert code == 200 and json.load(answer)["erased"]
            except urllib.error.HTTPError as error:
                assert error.code == code
        words = b"the quick brown fox " * 20
        for name, end in (("first", b"jumps"), ("second", b"sleeps")):
            body = {"text": (words + end).decode(), "sampling_params": {"max_new_tokens": 1}, "rid": name}
            request = urllib.request.Request(server.url + "/generate", json.dumps(body).encode())
            request.add_header("Authorization", "Bearer user")
            request.add_header("Content-Type", "application/json")
            urllib.request.urlopen(request, timeout=60).close()
        for path in ("/histate/status", "/histate/activity", "/histate/explain?rid=second&text=1"):
            for key, code in ((None, 401), ("user", 401), ("admin", 200)):
                request = urllib.request.Request(server.url + path)
                if key is not None:
                    request.add_header("Authorization", f"Bearer {key}")
                try:
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        found = json.load(answer)
                        assert code == 200, (path, key)
                except urllib.error.HTTPError as error:
                    assert error.code == code, (path, key)
        assert "fox sleeps" in found["text"]["now"] and "fox jumps" in found["text"]["before"]
        monkeypatch.delenv("HISTATE_ADMIN_API_KEY", raising=False)
        assert histate([*argv, server.url]) == 1 and "refuses the key" in capsys.readouterr().err
        assert histate([*argv, server.url, "--admin-api-key", "admin"]) == 0
        assert os.listdir(argv[3]), "the server goes on with its file"
