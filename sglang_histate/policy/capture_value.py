"""What a checkpoint would save, before it exists: C of `recompute`, from the plan alone.

The segment's checkpoints are placed on a new trajectory of which all that is known is its length. As with C, a
hit is at the trajectory's last checkpoint with probability q, or uniform over its tokens. The distance counts
from the last checkpoint that is kept: where one is refused, the next one is worth more.
"""

from __future__ import annotations


def cost_tokens(position: int, before: int, after: int | None, length: int, end_share: float) -> float:
    """Return the expected tokens that a checkpoint saves one hit on its trajectory.

    Args:
        position: where it lies, in tokens from the start of the sequence, > 0.
        before: the checkpoint kept before it, 0 for none.
        after: the next planned checkpoint, None for the last one.
        length: tokens of the trajectory, >= `position`.
        end_share: q, the share of hits at a trajectory's last checkpoint.

    Raises:
        ValueError: the positions are not in that order.
    """
    region_end = length if after is None else after
    if not 0 <= before < position <= region_end <= length:
        raise ValueError(f"checkpoint {position} is not between {before} and {region_end} of {length} tokens")
    served = (1 - end_share) * (region_end - position) / length
    return (position - before) * (served + end_share if after is None else served)
