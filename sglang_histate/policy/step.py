"""What a step takes of a prompt: a part of the step's room is kept for prompts that end with it.

A request that resumes some pages below where its text parts from what is cached computes those pages too. Where its new
tokens alone would have filled a step, the few more would cost it a second one: for a long text some ten milliseconds at
least, and as long as everything that rides in that step. So the last tokens of a step, its *tail*, are given only to a
prompt that ends with them; a prompt that goes on is cut before.

    step_tokens(rest=8500, left=8192, tail=2048)     # 8500: it ends in this step
    step_tokens(rest=20000, left=8192, tail=2048)    # 8192
"""

from __future__ import annotations


def step_tokens(rest: int, left: int, tail: int) -> int:
    """Return how many tokens of a prompt a step takes.

    Args:
        rest: tokens of the prompt that are not computed yet, >= 0.
        left: tokens that the step still has for any prompt; none or fewer if an end has taken of the tail before.
        tail: tokens beyond those that only the end of a prompt may take, >= 0.
    """
    if left <= 0:
        return 0
    return rest if rest <= left + tail else left
