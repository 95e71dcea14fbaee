"""How likely a trajectory is to be used again, given for how long it has been idle, learned from the traffic.

Every request starts a spell of idleness of what it used, and a request that resumes there ends it. With one spell a
tick, the share of requests that end a spell of age a is the probability that a spell ends at that age, so

    P(used again | idle for a) = share of spells that end after a / (1 - share of spells that end up to a)

and neither a list of spells nor a timer is needed. Ages are in ticks of the logical clock, in bins that double. The
shares are moving averages, so no spell weighs for ever. What an eviction hides, a return that would have come later,
is not seen: the estimate is of what pays with what is kept.

Before there is evidence, the hazard falls off with age as a power law does; that counts as `PRIOR` spells. The same
requests in the same order give the same numbers on every rank.
"""

from __future__ import annotations

from itertools import pairwise

BINS = 24
"""Ages of 2**23 ticks and more are the last bin."""

PRIOR = 64.0
"""Spells that the prior counts as."""

PRIOR_RETURN = 0.9
"""Share of spells that end some time, before anything is known."""

PRIOR_MEDIAN = 16.0
"""Age at which half of those have ended: about a round of two dozen live sessions."""

MEMORY = 4096.0
"""Spells over which the shares are averaged: some rounds of each live session."""


def bin_of(age: int) -> int:
    """Return the bin of an age in ticks, >= 0."""
    return min(age.bit_length(), BINS - 1)


class ReturnModel:
    """See the module docstring."""

    __slots__ = ("_after", "_ended", "_spells")

    def __init__(self) -> None:
        ends = [PRIOR_RETURN * _prior_share(1 << index) for index in range(BINS)]
        self._ended = [PRIOR * (end - start) for start, end in pairwise([0.0, *ends])]
        self._spells = PRIOR
        self._after: list[float] | None = None

    def observe(self, age: int | None) -> None:
        """Count one request: it resumed what had been idle for `age` ticks, or nothing (None).

        Raises:
            ValueError: a negative age.
        """
        if age is not None and age < 0:
            raise ValueError(f"nothing can have been idle for {age} ticks")
        # A full memory forgets one spell for each new one; forgetting in steps keeps this cheap.
        self._spells += 1.0
        if age is not None:
            self._ended[bin_of(age)] += 1.0
        if self._spells >= 2 * MEMORY:
            self._ended = [count / 2 for count in self._ended]
            self._spells /= 2
        self._after = None

    def probability(self, age: int) -> float:
        """Return the probability that something idle for `age` ticks, >= 0, is used again, between 0 and 1."""
        if self._after is None:
            self._after = self._tails()
        return self._after[bin_of(age)]

    def _tails(self) -> list[float]:
        """For each bin: of the spells that last to its middle, the share that ends after that."""
        never = self._spells - sum(self._ended)
        later, found = 0.0, []
        for count in reversed(self._ended):
            ending = later + count / 2
            found.append(ending / (never + ending) if ending > 0 else 0.0)
            later += count
        return found[::-1]


def _prior_share(age: int) -> float:
    """Share of the spells that end at all which have ended by an age."""
    return age / (age + PRIOR_MEDIAN)
