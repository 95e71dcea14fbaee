"""How long entries stay before they are evicted, and the pressure that follows for the interval.

T_KV is for KV in the cache, T_state for checkpoints on ssd; pressure = T_KV / T_state. Where KV stays long
and checkpoints do not, storage for checkpoints is short and they are placed wider apart.

Each is an exponential moving average over evictions, in ticks of the logical clock, and evictions alone would
mislead in two situations, where what is still there gives a lower bound:

- Cold start: nothing was evicted yet. The age of the oldest entry is taken; with no entry nothing is known.
- A pause: nothing was evicted for longer than the average. Everything there at the last eviction has stayed
  at least since, so the time since then is taken. The oldest entry's age is no measure here: a system prompt
  that is always in use grows old at any pressure.

    residence = Residence()
    residence.kv.evicted(entered=10, now=250)
    pressure = residence.pressure(now=300, oldest_kv=3, oldest_state=None)
"""

from __future__ import annotations

EVICTION_WEIGHT = 1 / 32
"""How much one eviction moves an average: it follows a new load within some dozens of evictions."""

MIN_PRESSURE, MAX_PRESSURE = 1 / 16, 16.0
"""Bounds of `Residence.pressure`. The interval goes with its square root, so this is a factor of 4 either
way, two steps of the default intervals: an average of few evictions cannot turn capture off or flood the
store."""


class ResidenceTime:
    """The mean time one kind of entry stays, in ticks."""

    __slots__ = ("_last_eviction", "_mean")

    def __init__(self) -> None:
        self._mean = 0.0
        self._last_eviction: int | None = None

    def evicted(self, entered: int, now: int) -> None:
        """Count an entry that came at `entered` and is evicted at `now`; the first one is the average.

        Raises:
            ValueError: it leaves before it came.
        """
        if now < entered:
            raise ValueError(f"an entry that came at {entered} cannot be evicted at {now}")
        stayed = now - entered
        if self._last_eviction is None:
            self._mean = float(stayed)
        else:
            self._mean += (stayed - self._mean) * EVICTION_WEIGHT
        self._last_eviction = now

    def mean(self, now: int, oldest: int | None) -> float | None:
        """Return the time an entry stays, None if unknown. `oldest`: when the oldest one there came."""
        if self._last_eviction is not None:
            return max(self._mean, float(now - self._last_eviction))
        return None if oldest is None else float(max(now - oldest, 0))


class Residence:
    """T_KV and T_state."""

    __slots__ = ("kv", "state")

    def __init__(self) -> None:
        self.kv = ResidenceTime()
        """KV in the cache."""
        self.state = ResidenceTime()
        """Checkpoints on ssd."""

    def pressure(self, now: int, oldest_kv: int | None, oldest_state: int | None) -> float:
        """Return T_KV / T_state between `MIN_PRESSURE` and `MAX_PRESSURE`.

        1.0 unless both are known: a tier that never held anything is neither short nor plentiful. Two times
        of 0 are equal, hence 1.0 too.
        """
        kv, state = self.kv.mean(now, oldest_kv), self.state.mean(now, oldest_state)
        if kv is None or state is None or kv == state:
            return 1.0
        if state == 0:
            return MAX_PRESSURE
        return min(max(kv / state, MIN_PRESSURE), MAX_PRESSURE)
