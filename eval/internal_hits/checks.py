"""What the run was meant to show, each as one line: met, not met, or unclear where noise is larger than the margin."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean

from eval.internal_hits.cases import CUT
from eval.internal_hits.records import Record
from eval.internal_hits.systems import HICACHE, HISTATE
from eval.internal_hits.zero_reuse import LIMIT, Ratio

MET, NOT_MET, UNCLEAR = "met", "NOT MET", "unclear"
FIRST_REWRITE_FLOOR = 4096


@dataclass(frozen=True)
class Check:
    name: str
    verdict: str
    detail: str

    def text(self) -> str:
        return f"{self.verdict:8} {self.name}: {self.detail}"


def check_all(records: list[Record], ratios: list[Ratio], intervals: dict[int, int]) -> list[Check]:
    """Return a check for everything that was measured. `intervals`: chosen interval of A -> how often, in case d."""
    checks = []
    rewrites = [r for r in records if r.case == "b" and r.reusable and r.row.startswith("A[")]
    if ours := [r for r in rewrites if r.system == HISTATE]:
        least = min(r.cached.total for r in ours)
        checks.append(
            _check(
                "first rewrite, HiState",
                least >= FIRST_REWRITE_FLOOR,
                f"at least {least} of {CUT} tokens cached, wanted {FIRST_REWRITE_FLOOR}",
            )
        )
    if stock := [r for r in rewrites if r.system == HICACHE]:
        most = max(r.cached.total for r in stock)
        checks.append(_check("first rewrite, stock HiCache", most == 0, f"{most} tokens cached, expected 0"))
    points = [r for r in records if r.case == "d" and r.system == HISTATE and r.reusable is not None]
    if points and intervals:
        # Every A chose one, each rewrite at most one: A's is the most frequent, in a tie the widest.
        interval = max(intervals, key=lambda key: (intervals[key], key))
        loss = mean(r.loss for r in points)
        checks.append(
            _check(
                "random rewrite points, HiState",
                loss <= interval / 2,
                f"mean loss {loss:.0f} tokens, wanted at most {interval / 2:.0f} "
                f"(half of interval {interval}); worst {max(r.loss for r in points)}",
            )
        )
        checks.append(
            _check(
                "no rewrite point loses a whole interval, HiState",
                all(r.loss < interval for r in points),
                f"all {len(points)} points below {interval}",
            )
        )
    pushed = [r for r in records if r.case == "e" and r.system == HISTATE and r.reusable]
    if pushed:
        least = min(r.cached.ssd_checkpoint for r in pushed)
        checks.append(
            _check(
                "rewrite after push-out, HiState",
                least > 0,
                f"at least {least} tokens resumed through an SSD checkpoint",
            )
        )
    checks += [_zero_reuse(ratio) for ratio in ratios if ratio.unit == "ttft"]
    return checks


def _check(name: str, good: bool, detail: str) -> Check:
    return Check(name, MET if good else NOT_MET, detail)


def _zero_reuse(ratio: Ratio) -> Check:
    verdict = MET if ratio.high <= LIMIT else NOT_MET if ratio.low > LIMIT else UNCLEAR
    detail = f"TTFT ratio {ratio.ratio:.3f}, 95 % {ratio.low:.3f} to {ratio.high:.3f}, wanted at most {LIMIT}"
    return Check(f"zero reuse, {ratio.length} tokens against {ratio.against}", verdict, detail)


def failed(checks: Iterable[Check]) -> bool:
    return any(check.verdict == NOT_MET for check in checks)
