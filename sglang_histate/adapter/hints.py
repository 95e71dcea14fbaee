"""What a client may say about a request, in `custom_params` of SGLang's API. All of it is optional, nothing is trusted.

    extra_body={"custom_params": {"histate_checkpoint_before_last": [1, 2], "histate_keep_requests": 200}}
    extra_body={"custom_params": {"histate_session": "planner", "histate_about_to": {"fork": 4}}}

A hint that is wrong is ignored and counted; it never fails the request. Answers never depend on hints.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

PREFIX = "histate_"
MOST_PLACES = 16
"""Checkpoints that one request can ask for; the first ones count."""


MOST_SESSIONS = 16
"""Sessions that one request can name in a list."""

MOST_NAME = 128
"""Characters of a session's name."""

MOST_FORKS = 64


class Hint(Enum):
    """The hints by name, without `PREFIX`; what a session is about to do is a hint each."""

    CHECKPOINT_AT = "checkpoint_at"  # tokens from the start of the prompt
    CHECKPOINT_BEFORE_LAST = "checkpoint_before_last"  # messages, 1: before the last one
    KEEP_REQUESTS = (
        "keep_requests"  # the session comes back, after so many requests of the server at the latest
    )
    DONE = "done"  # nobody comes back to this session
    SESSION = "session"  # its name
    END_SESSIONS = "end_sessions"  # nobody comes back to those
    KEEP_SESSIONS = "keep_sessions"  # those sleep
    SLEEP = "about_to_sleep"
    COMPACT = "about_to_compact"  # only system prompt and tools will be sent again
    FORK = "about_to_fork"  # so many requests will go on from here


class Ignored(Enum):
    """Why a hint had no effect."""

    UNKNOWN = "unknown_hint"
    WRONG_TYPE = "wrong_type"
    OUT_OF_RANGE = "out_of_range"
    TOO_MANY = "too_many_places"
    TOO_MANY_SESSIONS = "too_many_sessions"
    NO_TEMPLATE = "no_chat_template"  # nobody knows where messages begin
    NOT_COMPUTED = "head_not_computed"  # they are cached, without a checkpoint at their end
    KEPT_ENOUGH = "kept_share_used_up"
    UNKNOWN_SESSION = "unknown_session"  # never heard of, forgotten or evicted; another tenant's


@dataclass(frozen=True)
class Hints:
    """What is left of a request's hints. `ignored` has one entry for each that is not."""

    checkpoint_at: tuple[int, ...] = ()
    before_last: tuple[int, ...] = ()
    keep_requests: int = 0
    done: bool = False
    session: str = ""
    end_sessions: tuple[str, ...] = ()
    keep_sessions: tuple[str, ...] = ()
    sleep: bool = False
    compact: bool = False
    forks: int = 0
    ignored: tuple[Ignored, ...] = ()

    @property
    def given(self) -> tuple[Hint, ...]:
        """The hints that have an effect, if there is what they are about."""
        found = {
            Hint.CHECKPOINT_AT: self.checkpoint_at,
            Hint.CHECKPOINT_BEFORE_LAST: self.before_last,
            Hint.KEEP_REQUESTS: self.keep_requests,
            Hint.DONE: self.done,
            Hint.SESSION: self.session,
            Hint.END_SESSIONS: self.end_sessions,
            Hint.KEEP_SESSIONS: self.keep_sessions,
            Hint.SLEEP: self.sleep,
            Hint.COMPACT: self.compact,
            Hint.FORK: self.forks,
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
        elif word == Hint.SESSION.value:
            (found["session"],) = _names([value], ignored) or ("",)
        elif word in (Hint.END_SESSIONS.value, Hint.KEEP_SESSIONS.value):
            found[word] = _names(value, ignored)
        elif word == "about_to":
            found |= _about_to(value, ignored)
        else:
            ignored.append(Ignored.UNKNOWN)
    return Hints(**found, ignored=tuple(ignored)) if found or ignored else NONE


def _about_to(value: Any, ignored: list[Ignored]) -> dict[str, Any]:
    if value in ("sleep", "compact"):
        return {value: True}
    if isinstance(value, str):
        ignored.append(Ignored.OUT_OF_RANGE)
    elif not isinstance(value, dict) or list(value) != ["fork"]:
        ignored.append(Ignored.WRONG_TYPE)
    elif (forks := _positives([value["fork"]], ignored)) and forks[0] > MOST_FORKS:
        ignored.append(Ignored.OUT_OF_RANGE)
    elif forks:
        return {"forks": forks[0]}
    return {}


def _names(value: Any, ignored: list[Ignored]) -> tuple[str, ...]:
    """Return the names of sessions in a list, as many as may be, each once."""
    if not isinstance(value, list):
        value = [value]
    kept: list[str] = []
    for one in value[: MOST_SESSIONS + 1]:
        if not isinstance(one, str):
            ignored.append(Ignored.WRONG_TYPE)
        elif not 0 < len(one) <= MOST_NAME:
            ignored.append(Ignored.OUT_OF_RANGE)
        elif len(kept) == MOST_SESSIONS:
            ignored.append(Ignored.TOO_MANY_SESSIONS)
        elif one not in kept:
            kept.append(one)
    return tuple(kept)


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
