"""Which tier gets a historical checkpoint: a comparison of prices, not a rule by kind.

Prices are those of `scarcity`, in tokens that a checkpoint has to save; what it is worth is in the same tokens.
"""

from __future__ import annotations

from enum import StrEnum

from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.scarcity import MOST_PRICE


class TierReason(StrEnum):
    """Why a checkpoint of a prompt went to its tier."""

    FLAG = "flag"
    """All go to the SSD (--histate-history ssd)."""
    PROMPT_END = "prompt_end"
    """KV is spilled only where the SSD has the checkpoint that it ends in."""
    CHEAPER = "cheaper"
    """Its bytes cost less there; where both cost the same it is the SSD."""
    REFUSED = "ssd_refused"
    """The SSD does not take it, and it saves more than its place on the host costs."""
    NO_HOST_PLACE = "no_place_on_host"
    """The host was cheaper, but had no KV there that it restores, or no room."""


CHOICES: tuple[tuple[Tier, TierReason], ...] = (
    (Tier.HOST, TierReason.CHEAPER),
    (Tier.HOST, TierReason.REFUSED),
    (Tier.SSD, TierReason.FLAG),
    (Tier.SSD, TierReason.PROMPT_END),
    (Tier.SSD, TierReason.CHEAPER),
    (Tier.SSD, TierReason.NO_HOST_PLACE),
)
"""All that can happen."""


def historical_tier(host: float, ssd: float, worth: float, *, is_end: bool, refused: bool) -> Tier | None:
    """Return the tier that a checkpoint goes to, None for nowhere.

    Args:
        host, ssd: what it has to save there; `MOST_PRICE` or more: it cannot be had.
        worth: what it is expected to save.
        is_end: whether it ends its prompt: then the SSD is asked first.
        refused: whether the SSD was asked and does not take it.
    """
    if refused:
        return Tier.HOST if worth > host else None
    return Tier.HOST if not is_end and host < ssd < MOST_PRICE else Tier.SSD
