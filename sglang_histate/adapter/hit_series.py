"""Prompt tokens by where they came from, over the last half hour."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass

STEP_S = 10
STEPS = 180


@dataclass
class Step:
    """Requests that were admitted in `STEP_S` seconds from `start_s` (Unix time); the rest is tokens of their prompts.

    `device`, `host` and `ssd` say where the KV of the reused tokens was, `from_device`, `from_host` and `from_ssd` where the
    checkpoint that they were resumed from was. `replayed` tokens had KV and were computed all the same, `computed` had none.
    """

    start_s: int
    requests: int = 0
    device: int = 0
    host: int = 0
    ssd: int = 0
    from_device: int = 0
    from_host: int = 0
    from_ssd: int = 0
    replayed: int = 0
    computed: int = 0


class HitSeries:
    """Steps in which nothing happened are left out."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque(maxlen=STEPS)

    def add(
        self,
        now_s: float,
        *,
        device: int,
        host: int,
        ssd: int,
        checkpoint_tier: str | None,
        replayed: int,
        computed: int,
    ) -> None:
        """Count one request. A clock that was set back counts into the latest step."""
        start = int(now_s) // STEP_S * STEP_S
        if not self._steps or self._steps[-1].start_s < start:
            self._steps.append(Step(start))
        step = self._steps[-1]
        step.requests += 1
        step.device += device
        step.host += host
        step.ssd += ssd
        if checkpoint_tier is not None:
            name = f"from_{checkpoint_tier}"
            setattr(step, name, getattr(step, name) + device + host + ssd)
        step.replayed += replayed
        step.computed += computed

    def as_json(self, now_s: float) -> list[dict[str, int]]:
        """Return the steps of the last half hour, oldest first."""
        return [asdict(step) for step in self._steps if step.start_s > now_s - STEP_S * STEPS]
