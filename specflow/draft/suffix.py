"""Suffix automaton: the longest suffix that occurred before, of any length."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["SuffixIndex"]

ROOT = 0


class SuffixIndex:
    """Most recent earlier occurrence of the longest suffix, built token by token.

    The automaton is the online one of Blumer et al. (1985): a state stands for substrings with the same set of end
    positions, its link for the longest suffix with a larger set. The link of the newest state is therefore the longest
    suffix that occurred before. Construction is O(1) amortised a token.

    Every state also keeps its most recent end position. A new token is an occurrence of each suffix on the newest
    state's link path, and that path can be as deep as a text is periodic. Matches are told apart only up to
    `max_match` tokens (of longer ones the most recent wins), so marking starts at the state that holds the suffix of
    that length: at most `max_match` marks a token, a handful in ordinary text, and exact at every length looked up.

    Args:
        min_match: Shortest suffix that counts as a match.
        max_match: Length up to which a longer match is preferred to a more recent one.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self.tokens: list[int] = []
        self._min, self._max = min_match, max_match
        self._next: list[dict[int, int]] = [{}]  # transitions of each state
        self._link = [-1]
        self._length = [0]  # of the longest substring of each state
        self._end = [-1]  # position of the last token of its most recent occurrence
        self._newest = ROOT  # state of the whole text
        self._near, self._near_length = ROOT, 0  # state that holds the suffix of at most max_match tokens
        self._match = (0, 0)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        for token in tokens:
            self._append(token)
            self._mark(token)

    def match(self) -> tuple[int, int]:
        """Matched length and position of the token after the match, for the text's own suffix; (0, 0) for none."""
        return self._match if self._match[0] >= self._min else (0, 0)

    def find(self, tail: Sequence[int]) -> tuple[int, int]:
        """The same for the suffix of another text, of which `tail` are the last tokens.

        Here the match may be the very end of this text; then the position is one past its last token.
        """
        state, length = ROOT, 0
        for token in tail[-self._max :]:
            while state != ROOT and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state = self._next[state][token]
                length += 1
        return (length, self._end[state] + 1) if length >= self._min else (0, 0)

    def _add(self, length: int, end: int, transitions: dict[int, int]) -> int:
        self._length.append(length)
        self._end.append(end)
        self._next.append(transitions)
        self._link.append(ROOT)
        return len(self._link) - 1

    def _append(self, token: int) -> None:
        """Grow the automaton by one token."""
        position = len(self.tokens)
        self.tokens.append(token)
        newest, state = self._add(position + 1, position, {}), self._newest
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = newest
            state = self._link[state]
        if state != -1:
            target = self._next[state][token]
            exact = self._length[state] + 1 == self._length[target]
            self._link[newest] = target if exact else self._split(state, token, target)
        self._newest = newest

    def _split(self, state: int, token: int, target: int) -> int:
        """Give the shorter substrings of `target` a state of their own; they occur once more than the longer ones."""
        short = self._add(self._length[state] + 1, self._end[target], dict(self._next[target]))
        self._link[short] = self._link[target]
        self._link[target] = short
        while state != -1 and self._next[state].get(token) == target:
            self._next[state][token] = short
            state = self._link[state]
        if self._near == target and self._near_length <= self._length[short]:
            self._near = short
        return short

    def _mark(self, token: int) -> None:
        """Note the match of the new suffix, then the new end position of every suffix that occurred before."""
        position = len(self.tokens) - 1
        near, length = self._next[self._near][token], self._near_length + 1
        if length > self._max:
            length = self._max
            if self._length[self._link[near]] >= length:
                near = self._link[near]
        self._near, self._near_length = near, length
        state = self._link[self._newest]
        matched = self._length[state]
        if matched > self._max:
            state, matched = near, self._max
        self._match = (matched, self._end[state] + 1)
        while state != ROOT:
            self._end[state] = position
            state = self._link[state]
