"""What all outcomes of a log add up to: counts, tokens, seconds of prefill, bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eval.measure.placements import Outcome, Placement
from eval.quantile import quantile
from eval.simulate.costs import Costs

LANDING_EDGES = (64, 256, 1024, 4096, 16384)
"""Tokens before a turn's end, each edge included; the last class is beyond."""


@dataclass(frozen=True)
class Landing:
    """Internal hits by how far before the end of the turn they land in, up to `upto` tokens (None: any).

    `again`: tokens that checkpoints at turn ends compute although their KV is there. `saved_s`: seconds that HiState
    saves on these requests.
    """

    upto: int | None
    requests: int
    again: int
    saved_s: float


@dataclass(frozen=True)
class Row:
    """One placement. Tokens over all requests; seconds from the prompt's start of computing, nothing in its way.

    `hit`: tokens not computed over all prompt tokens. `again`: computed although their KV was there. `prefill_s`: sum
    of computing and of reading what is restored; `mean_s` and `p99_s` of it, `internal_mean_s` for internal hits only
    (None without one). `checkpoints`: taken in all, `checkpoint_bytes` theirs.
    """

    placement: str
    computed: int
    hit: float
    again: int
    prefill_s: float
    mean_s: float
    p99_s: float
    internal_mean_s: float | None
    checkpoints: int
    checkpoint_bytes: int


@dataclass(frozen=True)
class Findings:
    """The whole answer. `past`: quantiles of how far internal hits land past the turn end before them, in tokens.

    `kv_bytes`: KV of all different pages. `internal_again`: tokens of internal hits that checkpoints at turn ends
    compute although their KV is there.
    """

    sessions: int
    requests: int
    prompt_tokens: int
    matched_tokens: int
    internal: int
    internal_again: int
    past: dict[str, float]
    landings: tuple[Landing, ...]
    rows: tuple[Row, ...]
    kv_bytes: int

    def row(self, placement: Placement) -> Row:
        return next(row for row in self.rows if row.placement == placement.value)

    def saved_s(self, than: Placement) -> float:
        """Return the seconds of prefill that HiState saves beside another placement."""
        return self.row(than).prefill_s - self.row(Placement.HISTATE).prefill_s


@dataclass(frozen=True)
class _Timed:
    """An outcome with its seconds by placement."""

    outcome: Outcome
    seconds: dict[Placement, float]


def prefill_s(outcome: Outcome, placement: Placement, costs: Costs) -> float:
    """Return the seconds to restore and compute one prompt on an idle GPU.

    Restored KV comes from the host, and so does the checkpoint of all placements but HiState's: that keeps on the host
    the newest end of a path only, every other checkpoint is historical and comes from the SSD. Nothing overlaps.
    """
    restored = outcome.restored[placement]
    seconds = costs.prefill_s(outcome.computed(placement), restored)
    if restored:
        seconds += (restored * costs.kv_token_bytes + costs.state_bytes) / costs.pcie_bytes_s
    if placement is Placement.HISTATE and restored not in (0, outcome.newest):
        seconds += costs.ssd_latency_s + costs.ssd_state_bytes / costs.ssd_read_bytes_s
    return seconds


def findings(outcomes: Iterable[Outcome], costs: Costs) -> Findings:
    """Return what the outcomes add up to.

    Raises:
        ValueError: there are none.
    """
    timed = [_Timed(one, {way: prefill_s(one, way, costs) for way in Placement}) for one in outcomes]
    if not timed:
        raise ValueError("no requests, no findings")
    internal = [one for one in timed if one.outcome.internal]
    past = [float(one.outcome.again(Placement.TURN_ENDS)) for one in internal]
    shares = (0.1, 0.5, 0.9, 0.99) if internal else ()
    return Findings(
        sessions=len({one.outcome.session for one in timed}),
        requests=len(timed),
        prompt_tokens=sum(one.outcome.prompt for one in timed),
        matched_tokens=sum(one.outcome.match for one in timed),
        internal=len(internal),
        internal_again=sum(one.outcome.again(Placement.TURN_ENDS) for one in internal),
        past={f"p{100 * share:g}": quantile(past, share) for share in shares},
        landings=_landings(internal),
        rows=tuple(_row(timed, internal, way, costs) for way in Placement),
        kv_bytes=sum(one.outcome.new_pages * one.outcome.page for one in timed) * costs.kv_token_bytes,
    )


def _row(timed: Sequence[_Timed], internal: Sequence[_Timed], way: Placement, costs: Costs) -> Row:
    prompt = sum(one.outcome.prompt for one in timed)
    computed = sum(one.outcome.computed(way) for one in timed)
    seconds = [one.seconds[way] for one in timed]
    inner = [one.seconds[way] for one in internal]
    checkpoints = sum(one.outcome.checkpoints[way] for one in timed)
    return Row(
        placement=way.value,
        computed=computed,
        hit=1 - computed / prompt,
        again=sum(one.outcome.again(way) for one in timed),
        prefill_s=sum(seconds),
        mean_s=sum(seconds) / len(seconds),
        p99_s=quantile(seconds, 0.99),
        internal_mean_s=sum(inner) / len(inner) if inner else None,
        checkpoints=checkpoints,
        checkpoint_bytes=checkpoints * costs.state_bytes,
    )


def _landings(internal: Sequence[_Timed]) -> tuple[Landing, ...]:
    found = []
    low = -1
    for upto in (*LANDING_EDGES, None):
        high = float("inf") if upto is None else upto
        here = [one for one in internal if low < one.outcome.turn_end - one.outcome.match <= high]
        saved = sum(one.seconds[Placement.TURN_ENDS] - one.seconds[Placement.HISTATE] for one in here)
        again = sum(one.outcome.again(Placement.TURN_ENDS) for one in here)
        found.append(Landing(upto, len(here), again, saved))
        low = upto or 0
    return tuple(found)
