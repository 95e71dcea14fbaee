"""Block ids to token ids, fewer tokens a block, so that recorded sessions fit a small model.

Every whole block becomes `tokens_per_block` tokens, so all lengths shrink by the same factor and keep their
ratios: with 4 tokens for a block of 64 a prompt of 100,000 tokens has 6,250. With as many tokens as the recorded
block has nothing shrinks. `tokens_per_block` divides the page size or is a multiple of it, hence pages and blocks
end together, whatever the recorded block size.

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
    """`prefixes[i]` names the first i + 1 blocks: equal names, equal tokens, in all prompts of one `Scaling`.

    `pages[i]` names the first i + 1 whole pages in the same way. A page that reaches into the rest after the last
    whole block is in no other prompt.
    """

    tokens: list[int]
    prefixes: tuple[int, ...]
    pages: tuple[int, ...]


class Scaling:
    """One mapping for all prompts of a workload. The same calls in the same order give the same tokens.

    Raises:
        ValueError: neither of `tokens_per_block` and `page_tokens` divides the other, or the vocabulary has less
            than two ids.
    """

    def __init__(self, tokens_per_block: int, vocabulary: int, page_tokens: int = 64) -> None:
        if min(tokens_per_block, page_tokens) < 1 or (
            page_tokens % tokens_per_block and tokens_per_block % page_tokens
        ):
            raise ValueError(
                f"{tokens_per_block} tokens a block do not divide a page of {page_tokens} and are no multiple of it: "
                "a page would end inside a block"
            )
        if vocabulary < 2:
            raise ValueError(f"a vocabulary of {vocabulary} cannot tell two blocks apart")
        self.tokens_per_block = tokens_per_block
        self.page_tokens = page_tokens
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
        pages = self._pages(prefixes)
        if left := self._rest_tokens(session, turn):
            name, number, more = self._rest(at, left, len(tokens))
            tokens += self._tokens(name, number, left)
            pages += more
        return Prompt(tokens, tuple(prefixes), tuple(pages))

    def pages(self, session: Session, turn: Turn) -> tuple[int, tuple[int, ...]]:
        """Return the prompt's length in tokens and its `Prompt.pages` without making the tokens.

        The names are those of `prompt` if the same calls come in the same order, of either kind.
        """
        prefixes = []
        at = ROOT
        for block in turn.blocks:
            at, _ = self._step(at, block if session.shared_ids else (session.name, block))
            prefixes.append(at)
        pages = self._pages(prefixes)
        length = len(prefixes) * self.tokens_per_block
        if left := self._rest_tokens(session, turn):
            pages += self._rest(at, left, length)[2]
        return length + left, tuple(pages)

    def output_tokens(self, session: Session, turn: Turn, most: int) -> int:
        """Return the scaled output length, rounded up, from 1 to `most`."""
        return min(max(-(-turn.output_tokens * self.tokens_per_block // session.block_tokens), 1), most)

    def _rest_tokens(self, session: Session, turn: Turn) -> int:
        rest = turn.input_tokens - len(turn.blocks) * session.block_tokens
        left = rest * self.tokens_per_block // session.block_tokens
        return left if left or turn.blocks else 1

    def _pages(self, prefixes: list[int]) -> list[int]:
        """Return the names of the whole pages in whole blocks.

        A block of several pages has the numbers up to its own name for them, see `_step`.
        """
        each = self.tokens_per_block // self.page_tokens
        if each > 1:
            return [name - left for name in prefixes for left in range(each - 1, -1, -1)]
        step = self.page_tokens // self.tokens_per_block
        return prefixes[step - 1 :: step]

    def _rest(self, at: int, left: int, before: int) -> tuple[int, int, list[int]]:
        """Return the name and number of the `left` tokens after `before` others, and the pages that end in them."""
        pages = (before + left) // self.page_tokens - before // self.page_tokens
        name, number = self._step(at, ("rest", self._names), pages)
        return name, number, [name - place for place in range(pages - 1, -1, -1)]

    def _step(self, at: int, key: Hashable, pages: int | None = None) -> tuple[int, int]:
        """Return the name and number of what follows `at`; the numbers before its name are for `pages` - 1 more."""
        found = self._next.get((at, key))
        if found is None:
            number = self._siblings.get(at, 0)
            self._siblings[at] = number + 1
            # One number for each page that ends here: `_pages` names them without looking anything up.
            self._names += max(self.tokens_per_block // self.page_tokens if pages is None else pages, 1)
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
