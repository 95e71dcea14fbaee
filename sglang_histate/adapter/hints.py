"""What a client may say about a request, in `custom_params` of SGLang's API. All of it is optional, nothing is trusted.

    extra_body={"custom_params": {"histate_checkpoint_before_last": [1, 2], "histate_keep_requests": 200}}

A hint that is wrong is ignored and counted; it never fails the request. Answers never depend on hints.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

PREFIX = "histate_"
MOST_PLACES = 16
"""Checkpoints that one request can ask for; the first ones count."""


class Hint(Enum):
    """The hints by name, without `PREFIX`."""

    CHECKPOINT_AT = "checkpoint_at"  # tokens from the start of the prompt
    CHECKPOINT_BEFORE_LAST = "checkpoint_before_last"  # messages, 1: before the last one
    KEEP_REQUESTS = (
        "keep_requests"  # the session comes back, after so many requests of the server at the latest
    )
    DONE = "done"  # nobody comes back to this session


class Ignored(Enum):
    """Why a hint had no effect."""

    UNKNOWN = "unknown_hint"
    WRONG_TYPE = "wrong_type"
    OUT_OF_RANGE = "out_of_range"
    TOO_MANY = "too_many_places"
    NO_TEMPLATE = "no_chat_template"  # nobody knows where messages begin
    KEPT_ENOUGH = "kept_share_used_up"


@dataclass(frozen=True)
class Hints:
    """What is left of a request's hints. `ignored` has one entry for each that is not."""

    checkpoint_at: tuple[int, ...] = ()
    before_last: tuple[int, ...] = ()
    keep_requests: int = 0
    done: bool = False
    ignored: tuple[Ignored, ...] = ()

    @property
    def given(self) -> tuple[Hint, ...]:
        """The hints that have an effect, if there is what they are about."""
        found = {
            Hint.CHECKPOINT_AT: self.checkpoint_at,
            Hint.CHECKPOINT_BEFORE_LAST: self.before_last,
            Hint.KEEP_REQUESTS: self.keep_requests,
            Hint.DONE: self.done,
        }
        return tuple(hint for hint, value in found.items() if value)


NONE = Hints()


def parse(custom_params: Any) -> Hints:
    """Return the hints in a request's `custom_params`, whatever they are."""
    if not isinstance(custom_params, dict):
        return NONE
    found: dict[str, Any] = {}
    ignored: list[Ignored] = []
    for name, value in custom_params.items():
        if not isinstance(name, str) or not name.startswith(PREFIX):
            continue
        word = name.removeprefix(PREFIX)
        if word in (Hint.CHECKPOINT_AT.value, Hint.CHECKPOINT_BEFORE_LAST.value):
            field = "checkpoint_at" if word == Hint.CHECKPOINT_AT.value else "before_last"
            found[field] = _positives(value, ignored)
        elif word == Hint.KEEP_REQUESTS.value:
            (found["keep_requests"],) = _positives([value], ignored) or (0,)
        elif word == Hint.DONE.value:
            found["done"] = value is True
            if not isinstance(value, bool):
                ignored.append(Ignored.WRONG_TYPE)
        else:
            ignored.append(Ignored.UNKNOWN)
    return Hints(**found, ignored=tuple(ignored)) if found or ignored else NONE


def _positives(value: Any, ignored: list[Ignored]) -> tuple[int, ...]:
    """Return the whole numbers > 0 of a list, as many as may be."""
    if not isinstance(value, list):
        value = [value]
    kept: list[int] = []
    for one in value[: MOST_PLACES + 1]:
        if not isinstance(one, int) or isinstance(one, bool):
            ignored.append(Ignored.WRONG_TYPE)
        elif one <= 0:
            ignored.append(Ignored.OUT_OF_RANGE)
        elif len(kept) == MOST_PLACES:
            ignored.append(Ignored.TOO_MANY)
        else:
            kept.append(one)
    return tuple(kept)
