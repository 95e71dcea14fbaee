"""Real tokens as block ids: equal blocks of tokens have equal ids, whatever request they are in."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from eval.workloads.sessions import Session, Turn

MOST_TOKEN_ID = 2**32 - 1


class TokenBlocks:
    """Numbers blocks of `block_tokens` tokens in the order they come, and keeps the tokens of each.

    Raises:
        ValueError: blocks of less than one token.
    """

    def __init__(self, block_tokens: int) -> None:
        if block_tokens < 1:
            raise ValueError(f"a block of {block_tokens} tokens is none")
        self.block_tokens = block_tokens
        self._ids: dict[bytes, int] = {}
        self._blocks: list[bytes] = []

    def ids(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the ids of the whole blocks; the rest of the tokens has none.

        Raises:
            OverflowError: a token id is negative or above `MOST_TOKEN_ID`.
        """
        packed = array("I", tokens).tobytes()
        size = self.block_tokens * array("I").itemsize
        found = []
        for at in range(0, len(packed) - size + 1, size):
            block = packed[at : at + size]
            number = self._ids.get(block)
            if number is None:
                number = self._ids[block] = len(self._blocks)
                self._blocks.append(block)
            found.append(number)
        return tuple(found)

    def tokens(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens of blocks, one after the other."""
        found = array("I")
        for number in ids:
            found.frombytes(self._blocks[number])
        return found.tolist()


class ExactTokens:
    """The recorded tokens of every prompt of a trace, beside its sessions.

    A turn's blocks have them but for the rest after the last whole block, which is kept here by session and
    turn number.
    """

    def __init__(self, blocks: TokenBlocks) -> None:
        self.blocks = blocks
        self._rests: dict[tuple[str, int], tuple[int, ...]] = {}

    def keep_rest(self, session: str, index: int, tokens: Sequence[int]) -> None:
        """Keep what of a prompt's `tokens` follows its last whole block."""
        whole = len(tokens) // self.blocks.block_tokens * self.blocks.block_tokens
        self._rests[session, index] = tuple(tokens[whole:])

    def prompt(self, session: Session, index: int) -> list[int]:
        """Return the tokens of the prompt of turn `index`, from 0, as recorded.

        Raises:
            KeyError: no such turn was read.
        """
        turn: Turn = session.turns[index]
        return self.blocks.tokens(turn.blocks) + list(self._rests[session.name, index])
