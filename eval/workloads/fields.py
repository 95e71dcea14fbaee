"""Reading fields of a JSON trace, with errors that say where: file, line and field."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class TraceError(ValueError):
    """A trace file is not as its schema says. The message is ``file:line: field: what is wrong``."""


@dataclass(frozen=True)
class Where:
    """A place in a trace. `line` counts from 1; `field` is a path such as ``requests[3].in``."""

    file: Path
    line: int
    field: str = ""

    def at(self, name: str | int) -> Where:
        """Return the place of a member of this one: a key, or an index of a list."""
        if isinstance(name, int):
            return Where(self.file, self.line, f"{self.field}[{name}]")
        return Where(self.file, self.line, f"{self.field}.{name}" if self.field else name)

    def error(self, what: str) -> TraceError:
        return TraceError(f"{self.file}:{self.line}: {self.field or 'line'}: {what}")


def record(value: Any, where: Where) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise where.error(f"an object is expected, not {shown(value)}")
    return value


def items(value: Any, where: Where) -> list[Any]:
    if not isinstance(value, list):
        raise where.error(f"a list is expected, not {shown(value)}")
    return value


def member(of: dict[str, Any], name: str, where: Where) -> Any:
    """Return a field that has to be there."""
    if name not in of:
        raise where.at(name).error("is missing")
    return of[name]


def text(of: dict[str, Any], name: str, where: Where) -> str:
    value = member(of, name, where)
    if not isinstance(value, str):
        raise where.at(name).error(f"a text is expected, not {shown(value)}")
    return value


def count(of: dict[str, Any], name: str, where: Where, least: int = 0) -> int:
    """Return a whole number >= `least`."""
    value = member(of, name, where)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise where.at(name).error(f"a whole number of at least {least} is expected, not {shown(value)}")
    return value


def block_ids(of: dict[str, Any], name: str, where: Where, tokens: int, block: int) -> tuple[int, ...]:
    """Return the ids of the whole blocks of a prompt: an id of a rest that fills no block is left out.

    Whether a trace names the rest or not, both counts are right; any other is an error.
    """
    place = where.at(name)
    ids = items(member(of, name, where), place)
    # Traces have hundreds of millions of ids: only a list that is wrong is looked at one by one.
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0):
        for index, one in enumerate(ids):
            if type(one) is not int or one < 0:
                raise place.at(index).error(f"a whole number, not negative, is expected, not {shown(one)}")
    whole, rest = divmod(tokens, block)
    if len(ids) == whole:
        return tuple(ids)
    if rest and len(ids) == whole + 1:
        return tuple(ids[:-1])
    raise place.error(f"{len(ids)} ids do not fit {tokens} tokens in blocks of {block}")


def seconds(of: dict[str, Any], name: str, where: Where) -> float | None:
    """Return a time >= 0, None if the field is not there or null."""
    value = of.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise where.at(name).error(f"seconds, not negative, are expected, not {shown(value)}")
    return float(value)


def needed_seconds(of: dict[str, Any], name: str, where: Where) -> float:
    """The same for a field that has to be there."""
    member(of, name, where)
    value = seconds(of, name, where)
    if value is None:
        raise where.at(name).error("seconds are expected, not null")
    return value


def shown(value: Any) -> str:
    """Return a value for a message, not too long."""
    written = repr(value)
    return written if len(written) <= 40 else f"{written[:37]}..."
