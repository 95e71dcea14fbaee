"""SGLang's token traces: JSON lines with the prompts themselves as token ids.

Fields: `input_tokens`, `output_tokens` or `num_output_tokens`, optional `ts` (seconds; without it requests follow
each other without pause) and `num_input_tokens` (must be the length). There is no session id; see
`eval.workloads.chains`. Equal blocks of tokens get equal ids, and the tokens of every prompt stay reachable.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.workloads import fields
from eval.workloads.chains import Request, chained, sessions_of
from eval.workloads.fields import Where
from eval.workloads.lines import json_lines
from eval.workloads.sessions import Session
from eval.workloads.token_blocks import MOST_TOKEN_ID, ExactTokens, TokenBlocks

DEFAULT_BLOCK_TOKENS = 64


@dataclass(frozen=True)
class TokenTrace:
    """Sessions in the order they begin, and `tokens.prompt(session, index)` for what was sent."""

    sessions: list[Session]
    tokens: ExactTokens


def read_trace(path: Path, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> TokenTrace:
    """Return the sessions and their tokens. The file's prompts are in memory until then.

    Raises:
        TraceError: a line is not as the schema says; the message names file, line and field.
        OSError: the file cannot be read.
    """
    blocks = TokenBlocks(block_tokens)
    prompts: list[list[int]] = []
    requests: list[Request] = []
    for value, where in json_lines(path):
        found = fields.record(value, where)
        tokens = token_ids(found, "input_tokens", where)
        if not tokens:
            raise where.at("input_tokens").error("an empty prompt is none")
        if found.get("num_input_tokens", len(tokens)) != len(tokens):
            given = fields.shown(found["num_input_tokens"])
            raise where.at("num_input_tokens").error(f"{given} where input_tokens has {len(tokens)}")
        if "output_tokens" in found:
            output = len(token_ids(found, "output_tokens", where))
        else:
            output = fields.count(found, "num_output_tokens", where)
        at = fields.seconds(found, "ts", where)
        if at is None:
            at = requests[-1].at_s if requests else 0.0
        requests.append(Request(at, len(tokens), output, blocks.ids(tokens), number=len(prompts)))
        prompts.append(tokens)
    requests.sort(key=lambda one: one.at_s)
    groups = chained(requests)
    sessions = sessions_of(groups, block_tokens)
    exact = ExactTokens(blocks)
    for session, group in zip(sessions, groups, strict=True):
        for index, request in enumerate(group):
            exact.keep_rest(session.name, index, prompts[request.number])
    return TokenTrace(sessions, exact)


def token_ids(of: dict[str, Any], name: str, where: Where) -> list[int]:
    """Return a list of token ids."""
    place = where.at(name)
    found = fields.items(fields.member(of, name, where), place)
    for index, one in enumerate(found):
        if not isinstance(one, int) or isinstance(one, bool) or not 0 <= one <= MOST_TOKEN_ID:
            raise place.at(index).error(f"a token id is expected, not {fields.shown(one)}")
    return found
