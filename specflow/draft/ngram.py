"""Index of n-grams: where did the last few tokens occur before?"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["REACH", "NgramIndex"]

REACH = 64  # a match is measured this far back; longer ones say no more about what follows


class NgramIndex:
    """Most recent earlier occurrence of the longest suffix of `min_match` to `max_match` tokens.

    An n-gram enters the tables when the token after it arrives. So the newest suffix is never its own match, and every
    match has at least one token to copy. A token costs `max_match - min_match + 1` table writes, whatever the length
    of the text; nothing is ever scanned again.

    Args:
        min_match: Shortest n-gram that counts as a match.
        max_match: Longest n-gram that is looked up.
        vocab_size: Tokens are 0 .. vocab_size; the one past the vocabulary is free for separators.
    """

    def __init__(self, min_match: int, max_match: int, vocab_size: int) -> None:
        self.tokens: list[int] = []
        self._lengths = range(max_match, min_match - 1, -1)
        self._bits = (vocab_size + 1).bit_length()
        # A key holds a whole n-gram as one integer, exact by construction. Tokens count from 1 in it, so that a
        # text shorter than n never looks like one that starts with token 0.
        self._masks = [(1 << n * self._bits) - 1 for n in self._lengths]
        self._keys = [0] * len(self._lengths)
        self._after: list[dict[int, int]] = [{} for _ in self._lengths]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        bits, start = self._bits, len(self.tokens)
        for level, (mask, after) in enumerate(zip(self._masks, self._after, strict=True)):
            key = self._keys[level]
            for position, token in enumerate(tokens, start):
                after[key] = position
                key = (key << bits | token + 1) & mask
            self._keys[level] = key
        self.tokens.extend(tokens)

    def match(self) -> tuple[int, int]:
        """Matched length and position of the token after the match, for the text's own suffix; (0, 0) for none."""
        return self._longest(self._keys, self.tokens)

    def find(self, tail: Sequence[int]) -> tuple[int, int]:
        """The same for the suffix of another text, of which `tail` are the last tokens."""
        key = 0
        for token in tail[-self._lengths[0] :]:
            key = key << self._bits | token + 1
        return self._longest([key & mask for mask in self._masks], tail)

    def _longest(self, keys: Sequence[int], tail: Sequence[int]) -> tuple[int, int]:
        for n, key, after in zip(self._lengths, keys, self._after, strict=True):
            follower = after.get(key)
            if follower is not None and n <= len(tail):
                return self._measure(follower, tail, n), follower
        return 0, 0

    def _measure(self, follower: int, tail: Sequence[int], known: int) -> int:
        """Length of the match that ends before `follower`: the tables know only its last tokens."""
        length, limit = known, min(follower, len(tail), REACH)
        while length < limit and self.tokens[follower - 1 - length] == tail[-1 - length]:
            length += 1
        return length
