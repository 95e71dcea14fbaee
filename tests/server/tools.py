"""What the server tests share: prompts, answers, comparisons, requests on their own thread."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from eval.servers import Server

from .slabs import Stored, last_generation, read_slabs, slab_files

PAGE = 64
LOGPROB_TOLERANCE = 1e-4
BF16_LOGPROB_BOUND = 0.5
"""Of the next tokens after one restore from bf16: ten times the worst of docs/results/checkpoint_dtype.md."""


def random_tokens(count: int, seed: int | str) -> list[int]:
    """Return `count` printable byte tokens that no other seed shares."""
    source = random.Random(str(seed))
    return [source.randrange(32, 256) for _ in range(count)]


def floor_page(length: int) -> int:
    return length // PAGE * PAGE


def cached(answer: dict[str, Any]) -> int:
    return int(answer["meta_info"]["cached_tokens"])


def details(answer: dict[str, Any]) -> dict[str, int]:
    """Return the cached tokens by origin; all zero where nothing was cached."""
    found = answer["meta_info"].get("cached_tokens_details") or {}
    return {"device": 0, "host": 0, "storage": 0, "ssd_checkpoint": 0, **found}


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def difference(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Return the largest difference of the log probabilities of two equally long answers."""
    return max(abs(a - b) for a, b in zip(logprobs(first), logprobs(second), strict=True))


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first["output_ids"] == second["output_ids"]
    assert difference(first, second) <= LOGPROB_TOLERANCE


def cold_run(server: Server, prompt: list[int], max_new_tokens: int = 16, **fields: Any) -> dict[str, Any]:
    """Return the answer of a server whose cache is empty."""
    server.flush()
    answer = server.generate(prompt, max_new_tokens, **fields)
    assert cached(answer) == 0
    return answer


def warm_equals_cold(server: Server, prompt: list[int], warm: dict[str, Any]) -> None:
    """Compare `warm` with a run after a flush."""
    assert_same(warm, cold_run(server, prompt, len(warm["output_ids"])))


class Checkpoints:
    """The checkpoints that a server writes between `mark` and `written`, by key."""

    def __init__(self, server: Server, ssd_dir: Path, rank: int = 0) -> None:
        self._server = server
        self._ssd_dir = ssd_dir
        self._rank = rank
        self._mark = 0

    def mark(self) -> None:
        self._server.settle()
        self._mark = last_generation(self._file())

    def written(self) -> dict[bytes, Stored]:
        self._server.settle()
        return read_slabs(self._file(), self._mark)

    def _file(self) -> Path:
        return slab_files(self._ssd_dir)[self._rank]


class Pending(threading.Thread):
    """One streamed ``/generate`` on its own thread. `hang_up` closes the connection without a word."""

    def __init__(self, server: Server, prompt: list[int], max_new_tokens: int = 4, **fields: Any) -> None:
        super().__init__(daemon=True)
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        body = {
            "input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "stream": True, **fields,
        }  # fmt: skip
        self._body = json.dumps(body).encode()
        self._port = server.port
        self._socket: socket.socket | None = None
        self._hung_up = False
        self._asked = threading.Event()
        self.status = 0
        self.first_token = threading.Event()
        self.last: dict[str, Any] | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        try:
            connection.connect()
            self._socket = connection.sock
            connection.request("POST", "/generate", self._body, {"Content-Type": "application/json"})
            self._asked.set()
            answer = connection.getresponse()
            self.status = answer.status
            for line in answer:
                if line.startswith(b"data: {"):
                    self.last = json.loads(line[6:])
                    self.first_token.set()
            if self.status != 200 and not self._hung_up:
                raise RuntimeError(f"the server answered {self.status}")
        except Exception as error:  # kept for the test to look at
            if not self._hung_up:
                self.error = error
        finally:
            self._asked.set()
            connection.close()

    def hang_up(self) -> None:
        """Close the connection, at the earliest when the request was sent."""
        self._asked.wait(60)
        self._hung_up = True
        with contextlib.suppress(OSError):  # the answer was complete
            assert self._socket is not None
            self._socket.shutdown(socket.SHUT_RDWR)

    def result(self, timeout_s: float = 300.0) -> dict[str, Any]:
        self.join(timeout_s)
        assert not self.is_alive(), "no answer in time"
        if self.error is not None:
            raise self.error
        assert self.last is not None
        return self.last

    @property
    def aborted(self) -> bool:
        """True if the answer says that the request was aborted."""
        self.join(300)
        if self.status >= 400:
            return True
        finish = (self.last or {}).get("meta_info", {}).get("finish_reason") or {}
        return finish.get("type") == "abort"


def abort(server: Server, request_id: str) -> None:
    """``POST /abort_request``; its answer has no body."""
    request = urllib.request.Request(
        server.url + "/abort_request",
        json.dumps({"rid": request_id}).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=30).close()


def in_use(status: dict[str, Any]) -> dict[str, int]:
    """Return everything that must be back at its start value once the server is idle and flushed."""
    tiers, flying = status["tiers"], status["inflight"]
    return {
        "device kv": tiers["device"]["kv"]["used"],
        "device states": tiers["device"]["states"]["used"],
        "host kv": tiers["host"]["kv"]["used"],
        "host states": tiers["host"]["states"]["used"],
        "ssd slabs": tiers["ssd"]["checkpoints"]["used"],
        "ssd entries": tiers["ssd"]["entries"],
        "records": flying["records_total"] - flying["records_free"],
        "writes": flying["writes"],
        "reads": flying["reads"],
        "fault-ins": flying["fault_ins"],
        **status["locks"],
    }


def idle_locks(server: Server, timeout_s: float = 30.0) -> dict[str, int]:
    """Return the locks of the server once they are all free, or after `timeout_s`: ends of requests take a step or two."""
    deadline = time.monotonic() + timeout_s
    while True:
        locks: dict[str, int] = server.status()["locks"]
        if not any(locks.values()) or time.monotonic() > deadline:
            return locks
        time.sleep(0.2)


def assert_all_returned(server: Server) -> None:
    """Flush the idle server and check that every slot, page, record, slab and lock is free.

    A flush empties the pools whatever was lost, so the locks are looked at before it: on an idle server none is held.
    """
    locks = {name: count for name, count in idle_locks(server).items() if count}
    assert not locks, f"still locked on an idle server: {locks}"
    server.flush()
    left = {name: count for name, count in in_use(server.settle()).items() if count}
    assert not left, f"still in use after a flush: {left}"
