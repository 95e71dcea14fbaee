"""Requests as published by Mooncake (FAST'25): JSON lines of timestamp, lengths and ids of 512-token blocks.

Ids mean the same in the whole file. `hash_ids` also names the rest of the prompt after its last whole block; that
id is left out, because the prompt that goes on from there has another, full block in its place. There is no
session id; `eval.workloads.chains` says how sessions are found, or every request is one (`chain=False`), to be sent
at its own time.
"""

from __future__ import annotations

from pathlib import Path

from eval.workloads import fields
from eval.workloads.chains import Request, chained, sessions_of, single
from eval.workloads.lines import json_lines
from eval.workloads.sessions import Session

BLOCK_TOKENS = 512


def read_sessions(path: Path, chain: bool = True) -> list[Session]:
    """Return the sessions in the order they begin.

    Raises:
        TraceError: a line is not as the schema says; the message names file, line and field.
        OSError: the file cannot be read.
    """
    requests = []
    for value, where in json_lines(path):
        found = fields.record(value, where)
        tokens = fields.count(found, "input_length", where, least=1)
        requests.append(
            Request(
                fields.needed_seconds(found, "timestamp", where) / 1000,  # the field is in milliseconds
                tokens,
                fields.count(found, "output_length", where),
                fields.block_ids(found, "hash_ids", where, tokens, BLOCK_TOKENS),
            )
        )
    requests.sort(key=lambda one: one.at_s)
    return sessions_of(chained(requests) if chain else single(requests), BLOCK_TOKENS)
