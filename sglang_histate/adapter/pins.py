"""Host locks on attached states, one per waiting request, so that nothing pushes a state out before its request runs."""

from __future__ import annotations

from typing import Any

from sglang_histate.adapter.host_slots import HostSlots


class HostPins:
    """A request holds at most one pin. Scheduler thread only."""

    def __init__(self, cache: Any, slots: HostSlots) -> None:
        self._cache = cache
        self._slots = slots
        self._held: dict[Any, tuple[Any, Any]] = {}  # request handle -> node and receipt of its host lock

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, handle: Any, node_id: Any) -> None:
        """Pin the node for the request, in place of an earlier, shallower one."""
        receipt = self._cache.inc_host_lock_ref(node_id).to_dec_params()
        self.release(handle)
        self._held[handle] = node_id, receipt

    def release(self, handle: Any) -> None:
        """Let go of the request's pin, if it has one."""
        pin = self._held.pop(handle, None)
        if pin is not None:
            node_id, receipt = pin
            self._cache.dec_host_lock_ref(node_id, receipt)
            self._slots.drop_loaded(node_id)

    def clear(self) -> None:
        """The tree is being emptied, and its locks with it."""
        self._held.clear()
