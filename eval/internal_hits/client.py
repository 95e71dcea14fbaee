"""One streamed completion of exact token ids, timed from the client's side."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 900.0


class AskFailed(RuntimeError):
    """The server refused a request, or its answer is incomplete or says nothing about cached tokens."""


@dataclass(frozen=True)
class Cached:
    """Prompt tokens that were not computed again, by where their KV lay.

    `ssd_checkpoint` is no fourth place: it counts those of the tokens above that were usable only through a
    checkpoint read from the SSD.
    """

    total: int = 0
    device: int = 0
    host: int = 0
    storage: int = 0
    ssd_checkpoint: int = 0


@dataclass(frozen=True)
class Answer:
    """`ttft_s` and `total_s` count from just before the request is sent to the first and the last token."""

    output_ids: tuple[int, ...]
    prompt_tokens: int
    cached: Cached
    ttft_s: float
    total_s: float


def ask(port: int, prompt: list[int], output_tokens: int) -> Answer:
    """Complete `prompt` greedily by exactly `output_tokens` tokens through ``/generate``.

    Raises:
        AskFailed: see the class.
        OSError, http.client.HTTPException: the connection broke.
    """
    body = json.dumps(
        {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True},
            "stream": True,
        }
    ).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.connect()
        start = time.perf_counter()
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise AskFailed(f"status {response.status}: {response.read(500).decode(errors='replace')}")
        return _read(response, start, output_tokens)
    finally:
        connection.close()


def _read(lines: Iterable[bytes], start: float, output_tokens: int) -> Answer:
    first = last = None
    event: dict[str, Any] = {}
    complete = False
    for line in lines:
        data = line.strip().removeprefix(b"data:").strip()
        if not line.startswith(b"data:"):
            continue
        now = time.perf_counter()
        if data == b"[DONE]":
            complete = True
            break
        event = json.loads(data)
        if "error" in event:
            raise AskFailed(str(event["error"]))
        if event.get("output_ids"):
            first = now if first is None else first
            last = now
    if not complete or first is None or last is None:
        raise AskFailed("the stream ended early")
    output = tuple(event["output_ids"])
    if len(output) != output_tokens:
        raise AskFailed(f"{len(output)} output tokens came back instead of {output_tokens}")
    meta = event["meta_info"]
    return Answer(output, int(meta["prompt_tokens"]), cached_of(meta), first - start, last - start)


def cached_of(meta: dict[str, Any]) -> Cached:
    """Read SGLang's ``meta_info``.

    Raises:
        AskFailed: it does not report cached tokens, or its parts do not add up.
    """
    if "cached_tokens" not in meta:
        raise AskFailed("the server does not report cached tokens")
    total = int(meta["cached_tokens"])
    details = meta.get("cached_tokens_details")
    if details is None:  # left out where nothing was cached, or by a server that has one tier only
        return Cached(total=total, device=total)
    device, host, storage = (int(details.get(name) or 0) for name in ("device", "host", "storage"))
    if device + host + storage != total:
        raise AskFailed(f"cached tokens by tier {details} do not add up to {total}")
    return Cached(total, device, host, storage, int(details.get("ssd_checkpoint") or 0))
