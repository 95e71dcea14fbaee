"""One line of the table: an encoding at a depth, over all its cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.checkpoint_dtype.answers import Answer
from eval.quantile import quantile


@dataclass(frozen=True)
class Pair:
    """One case: the state's relative error, and the two answers."""

    state_error: float
    restored: Answer
    computed: Answer

    @property
    def logprob_errors(self) -> list[float]:
        return [abs(a - b) for a, b in zip(self.restored.logprobs, self.computed.logprobs, strict=True)]

    @property
    def equal_tokens(self) -> int:
        return sum(a == b for a, b in zip(self.restored.tokens, self.computed.tokens, strict=True))

    @property
    def first_difference(self) -> int | None:
        """Number of tokens before the two answers part, None if they do not."""
        pairs = enumerate(zip(self.restored.tokens, self.computed.tokens, strict=True))
        return next((index for index, (a, b) in pairs if a != b), None)


@dataclass(frozen=True)
class Line:
    """`answers_equal` of `cases`; `first_difference`: tokens before the earliest one, None if no answer differs."""

    encoding: str
    depth: int
    cases: int
    checkpoint_bytes: int
    state_error_mean: float
    state_error_max: float
    logprob_error_mean: float
    logprob_error_p99: float
    logprob_error_max: float
    tokens_equal: float
    answers_equal: int
    first_difference: int | None


def line(encoding: str, depth: int, checkpoint_bytes: int, pairs: Sequence[Pair]) -> Line:
    errors = [error for pair in pairs for error in pair.logprob_errors]
    tokens = sum(len(pair.computed.tokens) for pair in pairs)
    parted = [pair.first_difference for pair in pairs if pair.first_difference is not None]
    states = [pair.state_error for pair in pairs]
    return Line(
        encoding=encoding,
        depth=depth,
        cases=len(pairs),
        checkpoint_bytes=checkpoint_bytes,
        state_error_mean=sum(states) / len(states),
        state_error_max=max(states),
        logprob_error_mean=sum(errors) / len(errors),
        logprob_error_p99=quantile(errors, 0.99),
        logprob_error_max=max(errors),
        tokens_equal=sum(pair.equal_tokens for pair in pairs) / tokens,
        answers_equal=len(pairs) - len(parted),
        first_difference=min(parted, default=None),
    )


HEADER = (
    "encoding", "tokens", "bytes", "state error", "worst", "logprob error", "p99", "worst", "tokens equal",
    "answers equal", "first difference",
)  # fmt: skip


def cells(one: Line) -> list[str]:
    return [
        one.encoding,
        f"{one.depth:,}",
        f"{one.checkpoint_bytes:,}",
        f"{one.state_error_mean:.2e}",
        f"{one.state_error_max:.2e}",
        f"{one.logprob_error_mean:.1e}",
        f"{one.logprob_error_p99:.1e}",
        f"{one.logprob_error_max:.1e}",
        f"{one.tokens_equal:.3f}",
        f"{one.answers_equal}/{one.cases}",
        "none" if one.first_difference is None else str(one.first_difference),
    ]
