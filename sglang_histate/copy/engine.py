"""What moves bytes: one face for the batch call of CUDA, the loop of single calls, and torch.

An engine queues copies on the stream that is current, and returns; on the CPU they are done when it returns. It does
not order anything against other streams: that is `ordering.py`. Which engine a device gets is found out at start
(`probe.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from sglang_histate.copy.transfer import Copy


class CopyError(RuntimeError):
    """The driver refused a copy, or it was asked for where it cannot run. What it names may be half done."""


class CopyEngine(ABC):
    """Stateless between calls but for a fallback that stays. One thread at a time for one stream."""

    name: str
    """In `histate doctor`, the status and messages."""

    @abstractmethod
    def submit(self, copies: Sequence[Copy]) -> None:
        """Queue `copies`, in any order among themselves, on the current stream.

        Raises:
            PlanError: see `transfer.descriptors`; then nothing is queued.
            CopyError: the driver refused.
        """

    @property
    def fallback(self) -> str | None:
        """Why copies do not go the way that `name` says any more; None while they do."""
        return None
