"""What was measured, as plain values: one record a request."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from eval.internal_hits.client import Answer, Cached


@dataclass(frozen=True)
class Record:
    """One request to one system. `reusable` is None where the request only prepared later ones."""

    case: str
    row: str
    system: str
    repeat: int
    step: int
    prompt_tokens: int
    reusable: int | None
    cached: Cached
    ttft_s: float
    total_s: float
    output_ids: tuple[int, ...]
    cpu_s: float | None = None  # CPU time of all the server's processes, where it was measured

    @property
    def place(self) -> tuple[str, int, int]:
        """Which request this is, whatever the system."""
        return self.case, self.repeat, self.step

    @property
    def loss(self) -> int:
        """Reusable tokens that were computed again."""
        return (self.reusable or 0) - self.cached.total

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def record_of(
    answer: Answer,
    *,
    case: str,
    row: str,
    system: str,
    repeat: int,
    step: int,
    reusable: int | None,
    cpu_s: float | None = None,
) -> Record:
    return Record(
        case,
        row,
        system,
        repeat,
        step,
        answer.prompt_tokens,
        reusable,
        answer.cached,
        answer.ttft_s,
        answer.total_s,
        answer.output_ids,
        cpu_s,
    )


@dataclass(frozen=True)
class Mismatch:
    """Two systems gave different greedy tokens for the same request. `at` is the first different position."""

    case: str
    row: str
    repeat: int
    step: int
    systems: tuple[str, str]
    at: int
    outputs: tuple[tuple[int, ...], tuple[int, ...]]

    def text(self) -> str:
        first, second = self.systems
        return (
            f"case {self.case}, {self.row}, repeat {self.repeat}, request {self.step}: {first} and {second} differ from "
            f"output token {self.at} on: {list(self.outputs[0])} and {list(self.outputs[1])}"
        )


def mismatches(records: list[Record], reference_order: tuple[str, ...]) -> list[Mismatch]:
    """Compare every answer with that of the first system of `reference_order` which gave one."""
    by_place: dict[tuple[str, int, int], dict[str, Record]] = {}
    for record in records:
        by_place.setdefault(record.place, {})[record.system] = record
    found = []
    for answers in by_place.values():
        ranked = sorted(answers.values(), key=lambda record: reference_order.index(record.system))
        reference = ranked[0]
        for other in ranked[1:]:
            pairs = zip(reference.output_ids, other.output_ids, strict=False)
            at = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
            if at is None and len(reference.output_ids) == len(other.output_ids):
                continue
            found.append(
                Mismatch(
                    other.case,
                    other.row,
                    other.repeat,
                    other.step,
                    (reference.system, other.system),
                    min(len(reference.output_ids), len(other.output_ids)) if at is None else at,
                    (reference.output_ids, other.output_ids),
                )
            )
    return found
