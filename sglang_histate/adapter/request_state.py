"""What HiState remembers about one request, kept on the request itself so that it lives exactly as long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_histate.adapter.attribution import Recomputed
from sglang_histate.adapter.counters import HitTier, Miss
from sglang_histate.adapter.hints import Hints
from sglang_histate.adapter.page_keys import PageKeys


@dataclass
class RequestState:
    """Positions and lengths are tokens from the start of the prompt."""

    keys: PageKeys
    arrived_s: float | None = None  # when it entered the queue, None once it was admitted
    waits_since_s: float | None = None  # since when it waits for a read
    # Set by every tree match.
    kv_covered: int = 0  # longest prefix whose KV is on device or host
    restorable: int = 0  # deepest state at or before it that is on device or host
    last_visited: Any = None  # the node that ends at `kv_covered`, None for the root
    branch: int | None = None  # last grid position of the KV match, if it lies beyond every state
    # Set by the fault-in.
    # The version of the store at the last lookup; while it is the same, nothing new can be found.
    looked_at_version: int = -1
    fault_ins: int = 0
    # The last read that was under way when there was no room for one for this request.
    short_since: int | None = None
    gave_up_on_room: bool = False
    missed: Miss | None = None  # what became of the last read for this request, if it came to nothing
    may_ask: bool = True  # False: its token ids do not name a checkpoint, or it is not looked up
    attached: int | None = None  # where a checkpoint from the SSD was attached for this request
    kv_restored: int = 0  # tokens of KV that were read from the SSD for this request
    # Set at admission.
    kv_loaded: int = 0  # tokens of KV that had to come from the host
    state_loaded: bool = False  # the state that it resumes from had to come from the host
    resumed_from: HitTier | None = None  # where that state was, None if nothing was reused
    recomputed: tuple[Recomputed, ...] = ()  # what of its KV was of no use, and why
    restored_from_ssd: int = 0  # tokens of the prefix that was resumed through an SSD checkpoint
    accounted: bool = False
    details: dict[str, int | str] | None = None  # what its answer says of it, see `explanations.py`
    learned_from: bool = False  # whether the hit prior has counted this request
    placed: int = 0  # up to here the ranking knows where its checkpoints are in the tree
    hints: Hints | None = None  # what its client said, None until somebody asked
    hinted_at: tuple[int, ...] | None = None  # where it wants checkpoints, None until somebody asked
    head: int | None = None  # what compaction leaves of its prompt, None if nobody asked or knows
    # The capture plan over the whole remaining prompt.
    plan: tuple[int, ...] = ()
    # The last checkpoint of the plan that is stored or was captured; where the plan starts before that.
    kept: int = 0
    released: bool = False  # its KV beyond `placed` was given back without going into the tree
    check: Any = None  # what it computes for the server itself, see `verification.py`
    plan_next: int = -1  # where the next chunk has to begin for the plan to stay valid


def state_of(req: Any, page_size: int) -> RequestState:
    """Return the request's state, made on first use."""
    state = getattr(req, "histate", None)
    if state is None:
        state = RequestState(PageKeys(page_size, req.extra_key, req.cache_salt))
        req.histate = state
    return state
