"""What the event loop asks of a system under test: a prefix cache and what it does with memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from eval.simulate.jobs import Job
from eval.simulate.radix import Run

if TYPE_CHECKING:
    from eval.simulate.fault import Fault


class Visit:
    """A request inside a system, from its arrival to its end.

    `run` is the deepest run that it holds, `room` the bytes on the device that are reserved for what it has not
    handed to the cache yet, (KV, state).
    """

    __slots__ = ("from_ssd", "holds", "job", "plan", "reads", "room", "run", "tokens", "waits")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.run: Run | None = None
        self.tokens = 0  # restored and computed so far
        self.room = (0, 0)
        self.plan: tuple[int, ...] = ()
        self.reads = 0  # how often it has waited for the SSD
        self.waits: Fault | None = None
        self.holds: Fault | None = None  # whose locks it shares until it is admitted
        self.from_ssd: tuple[int, bool] = (0, False)  # pages of KV, and whether the state was read for it


@dataclass(frozen=True)
class Admission:
    """A request starts. `restored`: tokens by the tier that their KV came from. `kv_match`: tokens whose KV some
    tier had. `loaded_s`: when what has to come to the device is there."""

    restored: dict[str, int] = field(default_factory=dict)
    checkpoint_tier: str = ""
    kv_match: int = 0
    loaded_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens that need no computing."""
        return sum(self.restored.values())


Schedule = Callable[[float, Callable[[float], None]], None]
"""Have a function called with the time when that time has come."""


class System(Protocol):
    """All times are seconds from the start and never go back."""

    chunk_tokens: int
    """A prefill chunk that does not end its prompt ends on a multiple of this."""
    tail_tokens: int
    """So many more tokens of a step are for prompts that end with them, see `sglang_histate.policy.step`."""

    def arrive(self, job: Job, now_s: float) -> Visit:
        """A request comes; reads that it needs may begin."""

    def ready(self, visit: Visit, now_s: float) -> bool:
        """Return whether it may be admitted; False while reads for it are under way, which may begin now."""

    def admit(self, visit: Visit, now_s: float) -> Admission | None:
        """Give it what the caches have and room on the device until it ends; None if there is no room now."""

    def computed(self, visit: Visit, tokens: int, now_s: float) -> None:
        """Its prompt is computed up to `tokens`."""

    def finish(self, visit: Visit, now_s: float) -> None:
        """Its answer has ended."""

    def facts(self) -> dict[str, Any]:
        """Return counters and peaks for the records."""
