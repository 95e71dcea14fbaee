"""What the cache did for each of the latest requests, and why it did not do more.

    admitted   a request is in its first batch: what it resumes from is settled, its prompt is compared with those before
    finished   its output is part of what the next prompt may continue
    answer     the HTTP process asks, see `explain_routes.py`

For people to read: nothing decides by it, so only the rank that answers keeps it. It holds token ids, which leave it in
one way only (`around`), and positions.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import quote

import numpy as np
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

from sglang_histate.adapter.attribution import Recomputed
from sglang_histate.adapter.for_people import for_people
from sglang_histate.adapter.hit_series import HitSeries
from sglang_histate.adapter.prefix_break import BreakFinder, PrefixBreak
from sglang_histate.adapter.prompt_memory import PromptMemory
from sglang_histate.adapter.request_state import RequestState, state_of
from sglang_histate.adapter.session_lines import SessionLines
from sglang_histate.policy.standing_break import StandingBreak, StandingBreaks
from sglang_histate.policy.structure import Part, Structure

logger = logging.getLogger(__name__)

HEAD_TOKENS = 1024
"""A short difference further back than this, outside the system part, is an edit and no habit of the client."""

WORTH_TOKENS = 256
"""Tokens that have to be alike after a short difference before it is counted: less is not worth a warning."""

AROUND_TOKENS = 24


@dataclass(frozen=True)
class Explanation:
    """One request. Everything but `rid`, `namespace` and `admitted_s` (Unix time) is in tokens of the prompt.

    `device`, `host`, `ssd`: where the KV of the reused prefix was, `checkpoint` the prefix's end, which is where the one
    state that was restored belongs, and `checkpoint_tier` where that was. `restorable`: the longest prefix for which KV and a
    state were found. `recomputed`: what of the KV that was found was computed again, and why. `captures`: where
    checkpoints were to be taken.
    """

    rid: str
    namespace: bytes
    admitted_s: float
    prompt: int
    device: int
    host: int
    ssd: int
    checkpoint: int
    checkpoint_tier: str | None
    kv_found: int
    restorable: int
    recomputed: tuple[Recomputed, ...]
    captures: tuple[int, ...]
    prefix_break: PrefixBreak | None
    output: int | None = None  # None until it has finished

    @property
    def replayed(self) -> int:
        """Tokens that were computed again though their KV was found."""
        return sum(part.tokens for part in self.recomputed)

    def details(self, page_size: int) -> dict[str, int | str]:
        """What the answer to the request says of it, beside what SGLang does. Flat: SGLang sends it on as such.

        The break is told in whole pages, as everything else that a client hears of the cache: to the token, a client
        could guess prompts of others that share its `cache_salt`, one token at a time.
        """
        found: dict[str, int | str] = {
            "ssd": self.ssd,
            "restorable": self.restorable,
            "replayed": self.replayed,
            "checkpoint": self.checkpoint,
        }
        if self.checkpoint_tier is not None:
            found["checkpoint_tier"] = self.checkpoint_tier
        if self.prefix_break is not None:
            found["prefix_break"] = self.prefix_break.position // page_size * page_size
            if self.prefix_break.place is not None:
                found["prefix_break_place"] = self.prefix_break.place
        return found

    def as_json(self) -> dict[str, Any]:
        broken = self.prefix_break
        return {
            "rid": self.rid,
            "admitted_s": round(self.admitted_s, 3),
            "prompt_tokens": self.prompt,
            "output_tokens": self.output,
            "cached": {"device": self.device, "host": self.host, "ssd": self.ssd},
            "computed_tokens": self.prompt - self.checkpoint,
            "checkpoint": self.checkpoint,
            "checkpoint_tier": self.checkpoint_tier,
            "kv_found": self.kv_found,
            "restorable": self.restorable,
            "replayed": self.replayed,
            "replayed_because": [
                {"why": part.why.value, "start": part.start, "end": part.end} for part in self.recomputed
            ],
            "captures": list(self.captures),
            "prefix_break": None
            if broken is None
            else {
                "position": broken.position,
                "place": broken.place,
                "before": broken.before,
                "against": broken.rid,
                "alike_after": broken.alike_after,
            },
        }


class Explanations:
    """Scheduler thread only."""

    def __init__(
        self,
        core: Any,
        *,
        page_size: int,
        requests: int,
        structure: Structure | None,
        structure_note: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`requests`: how many are remembered. `structure_note` says whether the parts of prompts are told, and if not why."""
        self._core = core
        self._page_size = page_size
        self._most = requests
        self._note = structure_note
        self._clock = clock
        self._memory = PromptMemory(page_size, requests)
        self._finder = BreakFinder(core, self._memory, page_size, structure)
        self._log: OrderedDict[str, Explanation] = OrderedDict()
        self._breaks = StandingBreaks()
        self._series = HitSeries()
        self._sessions = SessionLines()

    @for_people("explaining a request")
    def admitted(self, req: Any) -> None:
        """`req` is in a batch and accounted for. Does nothing from its second batch on."""
        state = state_of(req, self._page_size)
        if state.details is not None or req.rid.startswith(HEALTH_CHECK_RID_PREFIX):
            return  # the second is nobody's question, be it a health check or one of HiState's own
        tokens = np.array(req.full_untruncated_fill_ids, dtype=np.int64)
        broken = None
        if req.input_embeds is None and req.positional_embed_overrides is None:
            keys = self._keys(req, state, len(tokens))
            broken = self._finder.find(req, state, tokens, keys)
            self._memory.add(req.rid, state.keys.namespace, keys, tokens)
        made = self._explain(req, state, len(tokens), broken)
        state.details = made.details(self._page_size)
        self._log.pop(req.rid, None)
        self._log[req.rid] = made
        if len(self._log) > self._most:
            self._log.popitem(last=False)
        self._series.add(
            made.admitted_s,
            device=made.device,
            host=made.host,
            ssd=made.ssd,
            checkpoint_tier=made.checkpoint_tier,
            replayed=made.replayed,
            computed=made.prompt - made.checkpoint - made.replayed,
        )
        self._count_break(made)

    @for_people("explaining a request that has finished")
    def finished(self, req: Any) -> None:
        """`req` has finished and its tokens are in the tree."""
        made = self._log.get(req.rid)
        if made is None:
            return
        self._log[req.rid] = replace(made, output=len(req.output_ids))
        state = state_of(req, self._page_size)
        if self._memory.get(req.rid) is not None:
            tokens = np.array(req.full_untruncated_fill_ids, dtype=np.int64)
            keys = self._keys(req, state, len(tokens))
            self._memory.add(req.rid, state.keys.namespace, keys, tokens)
        if self._core.ranking is not None and req.last_node != self._core.root_node.id:
            self._sessions.ended(req.last_node, req.rid, self._clock())

    def reset(self) -> None:
        """The cache is being emptied: what prompts said goes with it, what was said about requests stays."""
        self._memory.forget(None)
        self._sessions.clear()

    def forget(self, namespace: bytes | None) -> None:
        """Forget everything about a tenant, or (None) about all."""
        self._memory.forget(namespace)
        self._breaks.forget(namespace)
        gone = [e.rid for e in self._log.values() if namespace is None or e.namespace == namespace]
        for rid in gone:
            del self._log[rid]

    def explain(self, rid: str) -> dict[str, Any] | None:
        """Return what is remembered of a request, None if it is forgotten or was never heard of."""
        found = self._log.get(rid)
        return None if found is None else found.as_json()

    def latest(self, count: int) -> list[dict[str, Any]]:
        """Return what is remembered of the latest requests, the latest first."""
        return [found.as_json() for found, _ in zip(reversed(self._log.values()), range(count), strict=False)]

    def around(self, rid: str) -> dict[str, list[int]] | None:
        """Return the token ids around the break of a request, in its own prompt and in the earlier one.

        These are words of users: only for whom the server's owner has given a key.
        """
        made = self._log.get(rid)
        if made is None or made.prefix_break is None or made.prefix_break.rid is None:
            return None
        mine, other = self._memory.get(rid), self._memory.get(made.prefix_break.rid)
        if mine is None or other is None:
            return None
        start = max(0, made.prefix_break.position - AROUND_TOKENS)
        end = made.prefix_break.position + AROUND_TOKENS
        return {"now": mine[start:end].tolist(), "before": other[start:end].tolist()}

    def activity(self) -> dict[str, Any]:
        """Return the figures of the status page."""
        return {
            "structure": self._note,
            "remembered_requests": len(self._log),
            "remembered_tokens": self._memory.tokens,
            "series": self._series.as_json(self._clock()),
            "sessions": self._sessions.as_json(self._core.ranking.tree),
            "breaks": [
                made.as_json() for made in reversed(self._log.values()) if made.prefix_break is not None
            ][:20],
            "standing_breaks": [_standing(one) for one in self._breaks.standing()],
        }

    def _keys(self, req: Any, state: RequestState, tokens: int) -> list[bytes]:
        # Only this rank explains: what a request remembers of its keys decides things, so nothing is added to it.
        return state.keys.peek(req.full_untruncated_fill_ids, tokens // self._page_size * self._page_size)

    def _explain(self, req: Any, state: RequestState, tokens: int, broken: PrefixBreak | None) -> Explanation:
        resumed = int(req.prefix_len)
        return Explanation(
            rid=req.rid,
            namespace=state.keys.namespace,
            admitted_s=self._clock(),
            prompt=tokens,
            device=req.cached_tokens_device if resumed else 0,
            host=req.cached_tokens_host if resumed else 0,
            ssd=req.cached_tokens_storage if resumed else 0,
            checkpoint=resumed,
            checkpoint_tier=None if state.resumed_from is None else state.resumed_from.value,
            kv_found=state.kv_covered,
            restorable=max(state.restorable, resumed),
            recomputed=state.recomputed,
            captures=state.plan,
            prefix_break=broken,
        )

    def _count_break(self, made: Explanation) -> None:
        broken = made.prefix_break
        if broken is None or broken.alike_after < WORTH_TOKENS:
            return
        if broken.part not in (Part.SYSTEM, Part.TOOLS) and broken.position >= HEAD_TOKENS:
            return
        found = self._breaks.observe(
            made.namespace, broken.position, broken.place, broken.alike_after, made.rid
        )
        if found is not None:
            logger.warning("%s", warning(found))


def warning(found: StandingBreak) -> str:
    """Return the sentence that names a standing break. It quotes no prompt, and no line end of a client's request id."""
    place = "" if found.place is None else f" ({found.place})"
    return (
        f"HiState: {found.times} requests differ from earlier ones in a few tokens near token {found.position}{place} and are "
        f"alike after that, so {found.lost_tokens // found.times} tokens of each could not be reused: something that changes "
        "with every request, such as a date or an id, stands near the head of the prompt. Move it behind what stays the "
        f"same. GET /histate/explain?rid={quote(found.examples[-1], safe='')} shows one."
    )


def _standing(found: StandingBreak) -> dict[str, Any]:
    shown = asdict(found)
    del shown["namespace"]  # a hash of a tenant's salt
    return shown
