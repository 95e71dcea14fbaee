"""The answer in plain words, then the tables."""

from __future__ import annotations

import textwrap
from dataclasses import asdict

from eval.aligned import aligned
from eval.measure.findings import LANDING_EDGES, Findings, Row
from eval.measure.placements import Placement
from eval.simulate.budgets import Budgets
from eval.simulate.costs import Costs
from sglang_histate.sizes import format_size

LITTLE = 0.01
"""Less than this share of prefill is not worth another moving part."""


def whose(costs: Costs, model_sizes: bool) -> str:
    """Return for which model and machine the seconds are. `model_sizes`: the sizes in `costs` are another model's."""
    changed = {name: value for name, value in asdict(costs).items() if value != asdict(Costs())[name]}
    sizes = ("kv_token_bytes", "state_bytes") if model_sizes else ()
    given = ", ".join(f"{name} {value:g}" for name, value in changed.items() if name not in sizes)
    text = f"Seconds are those of the cost model: Qwen3.5-9B on one H100{' with ' + given if given else ''}."
    if not model_sizes:
        return text
    text += " Sizes of KV and checkpoints are your model's"
    if {"linear_flop", "pair_flop"} <= changed.keys():
        return f"{text}."
    return (
        f"{text}, but its computing counts as that of the 9B model: scale it with --cost linear_flop=F (twice the weights "
        "that a token uses) and --cost pair_flop=F."
    )


def answer(found: Findings, budgets: Budgets, command: str, seconds: str = "") -> str:
    """Return the sentences. `command`, how to simulate the same log under budgets, comes last where it is of use.

    `seconds`: what `whose` says of them.
    """
    verdict, simulate = _verdict(found, budgets)
    saving = f"{_saving(found)} {seconds}".rstrip()
    lines = [textwrap.fill(text, 100, break_long_words=False) for text in (_hits(found), saving, verdict)]
    return "\n".join([*lines, f"Under these budgets and load: {command}"] if simulate else lines)


def tables(found: Findings) -> str:
    """Return where internal hits land, and the four placements side by side."""
    parts = []
    if found.internal:
        parts += [
            "Internal hits by how far before the end of a turn they land:",
            aligned(
                [
                    ("tokens before the end", "requests", "computed again", "HiState saves s"),
                    *(
                        (
                            "more" if one.upto is None else f"up to {one.upto:,}",
                            f"{one.requests:,}",
                            f"{one.again:,}",
                            f"{one.saved_s:,.2f}",
                        )
                        for one in found.landings
                    ),
                ],
            ),
            "Past the turn end before them they land "
            + ", ".join(f"{value:,.0f} tokens ({name})" for name, value in found.past.items())
            + ".",
            "",
        ]
    parts += [
        "Checkpoints at, with room for everything:",
        aligned(
            [
                (
                    "",
                    "hit %",
                    "computed",
                    "KV there",
                    "prefill s",
                    "mean ms",
                    "p99 ms",
                    "internal ms",
                    "taken",
                    "bytes",
                ),
                *(_cells(row) for row in found.rows),
            ],
        ),
    ]
    return "\n".join(parts)


def _hits(found: Findings) -> str:
    ends = found.row(Placement.TURN_ENDS)
    first = (
        f"{found.internal:,} of {found.requests:,} requests ({_percent(found.internal, found.requests)}) match KV at a "
        f"point that is no turn's end."
    )
    if not found.internal:
        return first
    last = next(one.requests for one in found.landings if one.upto == LANDING_EDGES[0])
    if last:
        first += (
            f" {last:,} of them part in the last {LANDING_EDGES[0]} tokens of a turn: there one more checkpoint a page "
            "before the end of each prompt is enough."
        )
    return (
        f"{first} With checkpoints at turn ends alone {found.internal_again:,} tokens of them are computed again "
        f"although their KV is there: {_percent(found.internal_again, found.prompt_tokens)} of all prompt tokens, "
        f"{_percent(found.internal_again, ends.computed)} of those computed."
    )


def _saving(found: Findings) -> str:
    parts = []
    for than, name in (
        (Placement.TURN_ENDS, "at turn ends"),
        (Placement.BRANCH_POINTS, "there and at branch points"),
    ):
        saved, whole = found.saved_s(than), found.row(than).prefill_s
        parts.append(
            f"{saved:,.1f} s of {whole:,.1f} s of prefill, {_percent(saved, whole)}, beside checkpoints {name}"
        )
    return f"With room for everything HiState would save {parts[0]}; {parts[1]}."


def _verdict(found: Findings, budgets: Budgets) -> tuple[str, bool]:
    """Return what to do, and whether a simulation would tell more."""
    ends = found.row(Placement.TURN_ENDS)
    little = found.saved_s(Placement.TURN_ENDS) < LITTLE * ends.prefill_s
    need = found.kv_bytes + ends.checkpoint_bytes
    have = budgets.device_bytes + budgets.host_bytes + budgets.ssd_bytes
    room = (
        f"All different KV of the log and a checkpoint at each turn's end take {format_size(need)}; your tiers hold "
        f"{format_size(have)}"
    )
    if little and need <= have:
        return f"That is little: leave things alone. {room}, so that nothing has to go either.", False
    if little:
        return (
            f"That alone is little: for it, leave things alone. {room}: if old sessions come back, what is kept "
            "decides more.",
            True,
        )
    rest = "nothing has to go" if need <= have else "what is kept decides too"
    return f"That is worth a try. {room}: {rest}.", True


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.placement,
        f"{100 * row.hit:.2f}",
        f"{row.computed:,}",
        f"{row.again:,}",
        f"{row.prefill_s:,.1f}",
        f"{1000 * row.mean_s:,.0f}",
        f"{1000 * row.p99_s:,.0f}",
        "-" if row.internal_mean_s is None else f"{1000 * row.internal_mean_s:,.0f}",
        f"{row.checkpoints:,}",
        format_size(row.checkpoint_bytes),
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"
