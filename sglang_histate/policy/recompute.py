"""C, the tokens that have to be computed again once a checkpoint is lost.

Losing checkpoint p sends every hit that p would have served back to the checkpoint before it, p', so

    C(p) = (pos(p) - pos(p')) * sum over trajectories s below p of
           [ (1 - q) * len(region of p on s) / L_s  +  q * (1 if p is the last checkpoint of s else 0) ]

with L_s the tokens of s, the region of p on s from p to the next checkpoint of s or to its end, and q the
share of hits at a trajectory's last checkpoint. Checkpoints of every tier count, and the root is one at 0.

Every trajectory has weight 1, not 1 / number of trajectories: that factor is the same for all checkpoints,
and a new session would change every price by it without changing what matters.

`Checkpoint.region` and `Checkpoint.ends` hold the two sums without q and distance, kept up to date here. The
distance is looked up when a price is needed. Both sums are integers: 1 / L_s is rounded once, to a multiple
of 2**-40, and from then on is added and subtracted exactly. Floats would leave a rest after each pair of
additions and subtractions, so that two ranks or two runs with another history rank equals differently;
fractions would be exact, but their denominators grow without bound. At a million tokens the rounding is below
one part in two million of a price.
"""

from __future__ import annotations

from sglang_histate.policy.prefix_nodes import Checkpoint, Node, previous

WEIGHT_BITS = 40
"""A weight of 1 is 2**40."""

END_STEPS = 16
"""Prices know q in steps of 1/16 only."""

COST_SCALE = END_STEPS << WEIGHT_BITS
"""`price` returns tokens times this."""

START_END_SHARE = 0.5
"""q before the first hit: an end hit is as likely as an interior one."""

END_SHARE_WEIGHT = 1 / 512
"""How much one hit moves q: with 24 live sessions it follows a change within about twenty rounds."""


class EndShare:
    """q, the share of hits at a trajectory's last checkpoint, as a moving average, and its step for prices.

    A new step makes every price new, O(n log n) for n units. It is taken only when q is a whole step (1/16)
    away from the step in use, and then is the nearest one, at most 1/32 away. One hit moves q by at most
    1/512, so at least 16 hits lie between two re-pricings, and the amortised cost of a hit is at most n / 16
    prices. It takes hits of one kind only to get there: at a constant true share q strays by 0.016 (standard
    deviation), and a step is four times that.
    """

    __slots__ = ("steps", "value")

    def __init__(self) -> None:
        self.value = START_END_SHARE
        self.steps = round(self.value * END_STEPS)

    def observe(self, at_end: bool) -> None:
        """Count one hit."""
        self.value += ((1.0 if at_end else 0.0) - self.value) * END_SHARE_WEIGHT
        if abs(self.value * END_STEPS - self.steps) >= 1:
            self.steps = round(self.value * END_STEPS)


def weight(tokens: int) -> int:
    """Return 1 / tokens as a multiple of 2**-40, for a trajectory of `tokens` > 0 tokens."""
    return ((2 << WEIGHT_BITS) + tokens) // (2 * tokens)


def price(checkpoint: Checkpoint, distance: int, end_steps: int) -> int:
    """Return C in tokens * `COST_SCALE`, `distance` tokens after the checkpoint before; q = end_steps/16."""
    return distance * (
        (END_STEPS - end_steps) * checkpoint.region + ((end_steps * checkpoint.ends) << WEIGHT_BITS)
    )


def shift_path(node: Node | None, change: int, tail: int, ends: int) -> list[Checkpoint]:
    """Change the weight of `node` and of everything above it, and the sums of every checkpoint on the way.

    The deepest of them also owns what was added or removed below `node`: `tail`, tokens times weight, and
    `ends`, trajectories. Returns the checkpoints, deepest first. O(nodes and checkpoints of the path).
    """
    path: list[Checkpoint] = []
    run = 0  # tokens between here and the checkpoint met last
    while node is not None:
        node.weight += change
        end = node.tokens
        for checkpoint in reversed(node.checkpoints):
            checkpoint.region += change * (end - checkpoint.offset + run)
            path.append(checkpoint)
            end, run = checkpoint.offset, 0
        run += end
        node = node.parent
    path[0].region += tail
    path[0].ends += ends
    return path


def open_region(checkpoint: Checkpoint) -> list[Checkpoint]:
    """Give a checkpoint just placed its region, taken from the one before; return the next deeper ones.

    Walks the region: O(1) at a trajectory's end or before another checkpoint of the node, O(nodes of the
    region) where trajectories branch off.
    """
    node, offset = checkpoint.node, checkpoint.offset
    assert node is not None
    deeper: list[Checkpoint] = []
    index = node.index(offset) + 1
    if index < len(node.checkpoints):
        deeper.append(node.checkpoints[index])
        region, ends = (deeper[0].offset - offset) * node.weight, 0
    else:
        region, ends = (node.tokens - offset) * node.weight, 0
        if node.first is None:
            ends = 1
        stack = [node.first]
        while stack:
            below = stack.pop()
            while below is not None:
                if below.checkpoints:
                    deeper.append(below.checkpoints[0])
                    region += below.checkpoints[0].offset * below.weight
                else:
                    region += below.tokens * below.weight
                    if below.first is None:
                        ends += 1
                    else:
                        stack.append(below.first)
                below = below.next
    checkpoint.region, checkpoint.ends = region, ends
    before = previous(checkpoint)
    before.region -= region
    before.ends -= ends
    return deeper


def close_region(checkpoint: Checkpoint) -> None:
    """Hand the region of a checkpoint about to go to the one before it."""
    before = previous(checkpoint)
    before.region += checkpoint.region
    before.ends += checkpoint.ends
