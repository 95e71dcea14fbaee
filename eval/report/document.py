"""A report's page: what was compared, the tables, the plots, and what each run was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eval.metrics import Comparison, Part, Sensitive, SystemFigures, figures
from eval.metrics.runs import Key
from eval.metrics.sensitivity import CANDIDATE
from eval.metrics.system_figures import first_requests
from eval.metrics.table import shown
from eval.report.provenance import run_texts
from eval.report.tables import part_tables, ratio_table, rest_table

if TYPE_CHECKING:  # the page needs no matplotlib
    from eval.report.plots import Plot

_WORDS = """hit %: prompt tokens that were not computed again; a KV match whose state had to be computed again is no
hit. device, host, ssd: the same by the tier that the KV was read from. of reusable %: part of what an infinite cache
(all KV, a state at every page) would reuse. again with KV: tokens computed again although their KV was there, "-" where
a system does not tell (HiState's server tells the sum of a run, so only of all requests). Requests and tokens are sums
over a system's runs; makespan and bytes written are means of its runs. TTFT: seconds from the moment a turn could be sent to its first token; percentiles by linear
interpolation. In brackets: 95 % intervals by resampling sessions (the turns of one session are not independent)."""

_TIERS_ON_THE_ENGINE = """**Tiers are as each server counts**, so compare them within one system only. Stock SGLang counts KV as
the host's where the state of the hit is on the host only, even if the KV never left the device; HiState counts it by where
the KV was."""


def page(comparison: Comparison, chosen: Sensitive, plots: Sequence[Plot], command: str, seed: int) -> str:
    """Return the page as Markdown."""
    found = figures(comparison, chosen)
    sessions = {key[0] for key in comparison.keys}
    parts = [
        f"# {short_name(comparison.workload)} ({comparison.source})",
        f"Workload: {comparison.workload}.",
        f"{len(comparison.keys):,} requests of {len(sessions):,} sessions, {len(found)} "
        f"{'system' if len(found) == 1 else 'systems'}, commit {comparison.commit}. Written by",
        f"```\n{command}\n```",
        *_short(comparison, chosen, found),
        *_warnings(comparison, found),
        "## All requests",
        part_tables(comparison, [(name, one.all) for name, one in found.items()], None, seed),
        _WORDS,
        *([_TIERS_ON_THE_ENGINE] if comparison.source == "engine" else []),
        *_subsets(comparison, chosen, found, seed),
        *_ratios(comparison, chosen, seed),
        "## The whole run",
        rest_table(found.values()),
    ]
    if plots:
        parts.append("## Plots")
        for plot in plots:
            parts.append(f"### {plot.title}\n\n{plot.caption}\n\n![{plot.title}]({plot.file})")
    parts += ["## Runs", run_texts(comparison)]
    return "\n\n".join(parts) + "\n"


def short_name(workload: str) -> str:
    """A workload's name up to its first semicolon: details follow it."""
    return workload.partition(";")[0].strip()


def _warnings(comparison: Comparison, found: dict[str, SystemFigures]) -> list[str]:
    lines = []
    for name, one in found.items():
        if not one.requests:
            lines.append(f"- {name} has no requests: its run ended before the first one.")
        elif one.errors == one.requests:
            lines.append(f"- All {one.requests:,} requests of {name} failed: it has no figures.")
        elif one.errors:
            lines.append(
                f"- {one.errors:,} of {one.requests:,} requests of {name} failed; its times are those of the others."
            )
        if one.requests and one.missing:
            lines.append(
                f"- {name} lacks {one.missing:,} requests that other runs have: it ended early, and only ratios "
                "compare the same requests."
            )
    if "," in comparison.commit:
        lines.append("- The runs are of different commits: repeat them before you compare.")
    if len(found) == 1:
        lines.append("- There is one system only, so nothing is compared.")
    return ["Read with care:\n\n" + "\n".join(lines)] if lines else []


def _subsets(
    comparison: Comparison, chosen: Sensitive, found: dict[str, SystemFigures], seed: int
) -> list[str]:
    def rows(attribute: str) -> list[tuple[str, Part]]:
        return [(name, getattr(one, attribute)) for name, one in found.items()]

    parts = ["## Reuse-sensitive requests", f"The rule: {chosen.rule}."]
    if chosen.keys:
        parts += _few(chosen.keys)
        parts.append(part_tables(comparison, rows("sensitive"), chosen.keys, seed))
    elif chosen.keys is not None:
        parts.append("No request is one: the caching policy makes no difference here.")
    later = comparison.keys - first_requests(comparison)
    if later:
        parts += [
            "## Without each session's first request",
            part_tables(comparison, rows("later"), later, seed),
        ]
    rewriting = _rewriting(comparison)
    if rewriting:
        parts += [
            "## Requests that rewrite context",
            "Prompts that leave the path of their session's earlier turns before its end.",
            *_few(rewriting),
            part_tables(comparison, rows("rewriting"), rewriting, seed),
        ]
    return parts


def _few(keys: frozenset[Key]) -> list[str]:
    if len(keys) >= 100:
        return []
    return [f"There are {len(keys)} of them: the p99 of so few is all but the longest one."]


def _rewriting(comparison: Comparison) -> frozenset[Key]:
    return frozenset(record.key for run in comparison.runs for record in run.records if record.rewrite)


def _against(comparison: Comparison, chosen: Sensitive) -> str:
    """The system that others are divided by: HiState, or the baseline, or the first one."""
    for name in (CANDIDATE, chosen.baseline):
        if name in comparison.systems:
            return name
    return next(iter(comparison.systems))


def _short(comparison: Comparison, chosen: Sensitive, found: dict[str, SystemFigures]) -> list[str]:
    """The two figures that most readers come for, in two sentences."""
    against = _against(comparison, chosen)
    mine = found[against]
    lines = []
    if mine.all.ttft.p99 and len(found) > 1:
        others = ", ".join(
            f"{name} {shown(one.all.ttft.p99, 2, 1 / mine.all.ttft.p99)}"
            for name, one in found.items()
            if name != against
        )
        lines.append(f"p99 TTFT over {against}'s: {others}.")
    if mine.sensitive is not None and mine.sensitive.requests:
        share = shown(mine.sensitive.reusable_share, 1, 100)
        lines.append(
            f"{against} reuses {share} % of what the infinite cache would on reuse-sensitive requests "
            f"({mine.sensitive.requests:,} of {mine.all.requests:,})."
        )
    return [" ".join(lines)] if lines else []


def _ratios(comparison: Comparison, chosen: Sensitive, seed: int) -> list[str]:
    if len(comparison.systems) < 2:
        return []
    against = _against(comparison, chosen)
    parts: dict[str, frozenset[Key] | None] = {"all": None}
    if chosen.keys:
        parts["sensitive"] = chosen.keys
    if rewriting := _rewriting(comparison):
        parts["rewriting"] = rewriting
    return [
        f"## TTFT over {against}'s",
        f"Above 1: slower than {against}. Paired: requests that both systems answered, the same sessions in every "
        "resample.",
        ratio_table(comparison, parts, against, seed),
    ]
