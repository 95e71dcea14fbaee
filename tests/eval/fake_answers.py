"""A tiny HTTP server that streams like SGLang's ``/generate``, and records without a server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from eval.internal_hits.client import Cached
from eval.internal_hits.records import Record


class Script:
    """What the fake does: tokens to give out, seconds before the first, and ways to misbehave."""

    def __init__(
        self, output: list[int], cached: int | None = 0, details: dict[str, Any] | None = None
    ) -> None:
        self.output = output
        self.cached = cached
        self.details = details
        self.delay_s = 0.0
        self.status = 200
        self.stop_after: int | None = None
        self.error: str | None = None
        self.bodies: list[dict[str, Any]] = []

    def events(self, prompt_tokens: int) -> Iterator[bytes]:
        for count in range(1, len(self.output) + 1):
            meta: dict[str, Any] = {"prompt_tokens": prompt_tokens, "cached_tokens_details": self.details}
            if self.cached is not None:
                meta["cached_tokens"] = self.cached
            event = {"output_ids": self.output[:count], "meta_info": meta}
            if self.error:
                event = {"error": {"message": self.error}}
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
            if self.stop_after == count:
                return
        yield b"data: [DONE]\n\n"


@contextmanager
def fake_server(script: Script) -> Iterator[int]:
    """Serve `script` on a free port and yield the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            script.bodies.append(body)
            self.send_response(script.status)
            self.end_headers()
            if script.status != 200:
                self.wfile.write(b"no")
                return
            time.sleep(script.delay_s)
            for event in script.events(len(body["input_ids"])):
                self.wfile.write(event)
                self.wfile.flush()
                time.sleep(0.01)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that gave up
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def record(system: str, **changes: Any) -> Record:
    values: dict[str, Any] = {
        "case": "b",
        "row": "A[:5000] + 200",
        "system": system,
        "repeat": 0,
        "step": 1,
        "prompt_tokens": 5200,
        "reusable": 4992,
        "cached": Cached(),
        "ttft_s": 0.5,
        "total_s": 0.6,
        "output_ids": (1, 2, 3),
    }
    return Record(**{**values, **changes})
