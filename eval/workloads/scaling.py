"""Block ids to token ids, fewer tokens a block, so that recorded sessions fit a small model.

Every whole block becomes `tokens_per_block` tokens, so all lengths shrink by the same factor and keep their
ratios: with 4 tokens for a block of 64 a prompt of 100,000 tokens has 6,250. `tokens_per_block` divides the
page size, hence a page is a whole number of blocks.

Prefix sharing is kept exactly: two prompts that begin with the same k blocks, and no more, begin with the same
k * tokens_per_block tokens, and no more. A block's tokens therefore do not follow from its id alone. All blocks
ever seen after the same prefix are numbered in the order they come, and the number is the block's first token;
so two that differ, differ at once. Numbers beyond the vocabulary carry over to the second token; two prompts
may then share one token more, which never makes a page. The remaining tokens are drawn from a checksum.

The rest of a prompt after its last whole block shrinks too, rounded down, and is shared with nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from zlib import crc32

from eval.workloads.sessions import Session, Turn

ROOT = 0


@dataclass(frozen=True)
class Prompt:
    """`prefixes[i]` names the first i + 1 blocks: equal names, equal tokens, in all prompts of one `Scaling`."""

    tokens: list[int]
    prefixes: tuple[int, ...]


class Scaling:
    """One mapping for all prompts of a workload. The same calls in the same order give the same tokens.

    Raises:
        ValueError: `tokens_per_block` does not divide `page_tokens`, or the vocabulary has less than two ids.
    """

    def __init__(self, tokens_per_block: int, vocabulary: int, page_tokens: int = 64) -> None:
        if tokens_per_block < 1 or page_tokens % tokens_per_block:
            raise ValueError(
                f"{tokens_per_block} tokens a block do not divide a page of {page_tokens}: "
                "a page would end inside a block"
            )
        if vocabulary < 2:
            raise ValueError(f"a vocabulary of {vocabulary} cannot tell two blocks apart")
        self.tokens_per_block = tokens_per_block
        self.vocabulary = vocabulary
        # (prefix, key of the block after it) -> name of the longer prefix, and its number among its siblings.
        self._next: dict[tuple[int, Hashable], tuple[int, int]] = {}
        self._siblings: dict[int, int] = {}
        self._names = ROOT

    def prompt(self, session: Session, turn: Turn) -> Prompt:
        """Return the turn's prompt, at least one token.

        Raises:
            ValueError: more blocks follow a prefix than two tokens of the vocabulary can tell apart (with one
                token a block: than one can).
        """
        tokens: list[int] = []
        prefixes = []
        at = ROOT
        for block in turn.blocks:
            at, number = self._step(at, block if session.shared_ids else (session.name, block))
            prefixes.append(at)
            tokens += self._tokens(at, number, self.tokens_per_block)
        rest = turn.input_tokens - len(turn.blocks) * session.block_tokens
        left = rest * self.tokens_per_block // session.block_tokens
        if left or not tokens:
            name, number = self._step(at, ("rest", self._names))
            tokens += self._tokens(name, number, max(left, 1))
        return Prompt(tokens, tuple(prefixes))

    def output_tokens(self, session: Session, turn: Turn, most: int) -> int:
        """Return the scaled output length, rounded up, from 1 to `most`."""
        return min(max(-(-turn.output_tokens * self.tokens_per_block // session.block_tokens), 1), most)

    def _step(self, at: int, key: Hashable) -> tuple[int, int]:
        found = self._next.get((at, key))
        if found is None:
            number = self._siblings.get(at, 0)
            self._siblings[at] = number + 1
            self._names += 1
            found = self._next[at, key] = self._names, number
        return found

    def _tokens(self, name: int, number: int, count: int) -> list[int]:
        # Two tokens of the number where there are two: equal blocks would be worse than common first tokens.
        digits = min(self.tokens_per_block, 2)
        if number >= self.vocabulary**digits:
            raise ValueError(
                f"too many different blocks follow one prefix for {self.tokens_per_block} tokens of a "
                f"vocabulary of {self.vocabulary}: use more tokens a block"
            )
        tokens = [number % self.vocabulary, number // self.vocabulary][:digits]
        for index in range(digits, count):
            tokens.append(crc32(f"{name}/{index}".encode()) % self.vocabulary)
        return tokens[:count]
