"""`histate explain` against a made-up server: what it asks, what it prints, how it fails."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sglang_histate.cli import main

FOUND = {
    "enabled": True, "rid": "r1", "admitted_s": 1.0, "prompt_tokens": 5200, "output_tokens": 4,
    "cached": {"device": 1024, "host": 3000, "ssd": 72}, "computed_tokens": 1104, "checkpoint": 4096,
    "checkpoint_tier": "ssd", "kv_found": 4992, "restorable": 4096, "replayed": 896,
    "replayed_because": [
        {"why": "write_budget", "start": 4096, "end": 4608}, {"why": "not_captured", "start": 4608, "end": 4992},
    ],
    "captures": [4608, 5184],
    "prefix_break": {
        "position": 5000, "place": "assistant turn 3", "before": "thinking of assistant turn 3", "against": "r0",
        "alike_after": 120,
    },
}  # fmt: skip
COLD = {
    **FOUND, "rid": "a-longer-name", "output_tokens": None, "checkpoint": 0, "checkpoint_tier": None, "replayed": 0,
    "replayed_because": [], "captures": [], "prefix_break": None,
}  # fmt: skip


class Server:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str | None]] = []
        self.code = 200
        self.body: Any = {}
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.seen.append((self.path, self.headers["Authorization"]))
                self.send_response(owner.code)
                self.end_headers()
                text = owner.body if isinstance(owner.body, str) else json.dumps(owner.body)
                self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["explain", *argv])
    return code, *capsys.readouterr()


def test_one_request_in_sentences(server: Server, capsys, monkeypatch) -> None:
    monkeypatch.delenv("HISTATE_ADMIN_API_KEY", raising=False)
    server.body = FOUND
    code, out, _ = run(capsys, "r1", "--url", server.url)
    assert code == 0 and server.seen == [("/histate/explain?rid=r1", None)]
    for words in (
        "request r1: prompt 5200 tokens, output 4 tokens",
        "reused    4096 tokens, from the checkpoint there, which was on the ssd; their KV: 1024 on the device, "
        "3000 on the host, 72 on the SSD",
        "computed  1104 tokens, 896 of them although their KV was there",
        "4096 to 4608: write budget",
        "4608 to 4992: not captured",
        "found     KV up to 4992, restorable up to 4096",
        "captured  at 4608, 5184",
        "break     token 5000, assistant turn 3",
        "against r0, which goes on with thinking of assistant turn 3",
        "120 more are alike again",
    ):
        assert words in out, words


def test_a_cold_request(server: Server, capsys) -> None:
    server.body = COLD
    _, out, _ = run(capsys, "a-longer-name", "--url", server.url)
    assert "reused    nothing" in out and "captured  at no position" in out and "break     none" in out


def test_words_are_asked_for_with_the_key(server: Server, capsys, monkeypatch) -> None:
    monkeypatch.setenv("HISTATE_ADMIN_API_KEY", "secret")
    server.body = FOUND | {"text": {"now": "line\none", "before": "line\ntwo"}}
    code, out, _ = run(capsys, "odd id&x=1", "--text", "--url", server.url + "/")
    assert code == 0 and server.seen == [("/histate/explain?rid=odd+id%26x%3D1&text=1", "Bearer secret")]
    assert "now       'line\\none'" in out and "before    'line\\ntwo'" in out


def test_the_latest_ones_in_a_table(server: Server, capsys) -> None:
    server.body = {"enabled": True, "requests": [FOUND, COLD]}
    code, out, _ = run(capsys, "--last", "7", "--url", server.url)
    head, first, second = out.splitlines()
    assert code == 0 and server.seen[0][0] == "/histate/explain?last=7"
    assert head.split() == ["request", "prompt", "reused", "replayed", "from", "prefix", "break"]
    assert first.split() == ["r1", "5200", "4096", "896", "ssd", "token", "5000,", "assistant", "turn", "3"]
    assert second.split() == ["a-longer-name", "5200", "0", "0", "-", "none"]
    server.body = {"enabled": True, "requests": []}
    assert run(capsys, "--url", server.url)[1] == "no request yet\n"


def test_json_is_what_the_server_says(server: Server, capsys) -> None:
    server.body = FOUND
    assert json.loads(run(capsys, "r1", "--json", "--url", server.url)[1]) == FOUND


@pytest.mark.parametrize(
    ("code", "body", "sentence"),
    [
        (404, {"error": "nothing is known of request x"}, "nothing is known of request x"),
        (403, {"error": "text=1 shows words"}, "text=1 shows words"),
        (401, {"error": "Unauthorized"}, "refuses the key"),
        (404, {"detail": "Not Found"}, "answered 404"),
        (500, "no json", "answered 500: no json"),
        (200, {"enabled": False}, "serves without HiState"),
        (200, "no json", "cannot be asked"),
    ],
)
def test_failures_are_one_sentence(server: Server, capsys, code: int, body: Any, sentence: str) -> None:
    server.code, server.body = code, body
    exit_code, out, err = run(capsys, "x", "--url", server.url)
    assert exit_code == 1 and out == "" and sentence in err and err.count("\n") == 1


def test_no_server(capsys) -> None:
    code, _, err = run(capsys, "x", "--url", "http://127.0.0.1:1")
    assert code == 1 and "cannot be asked" in err


def test_an_id_that_a_client_made_up_does_not_move_the_cursor(server: Server, capsys) -> None:
    evil = "\x1b[2Jx\n"
    broken = {**FOUND["prefix_break"], "against": evil}
    for argv, body in (
        (["r"], {**FOUND, "rid": evil, "prefix_break": broken}),
        ([], {"enabled": True, "requests": [{**FOUND, "rid": evil}, COLD]}),
    ):
        server.body = body
        code, out, _ = run(capsys, *argv, "--url", server.url)
        assert code == 0 and "\x1b" not in out and ascii(evil) in out
    assert len(out.splitlines()) == 3


def test_an_address_that_is_none_and_a_port_that_speaks_something_else(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            talk, _ = other.accept()
            talk.sendall(b"SSH-2.0-x\r\n")
            talk.close()

        threading.Thread(target=greet, daemon=True).start()
        port = other.getsockname()[1]
        for url in ("http://127.0.0.1:abc", "http://a b", f"http://127.0.0.1:{port}"):
            code, out, err = run(capsys, "--url", url)
            assert (code, out) == (1, "") and "cannot be asked" in err and len(err.splitlines()) == 1
