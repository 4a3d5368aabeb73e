"""Finds where the end of a text occurred before, and what followed it there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

# Tokens of a key of the index, which are the shortest match.
SHORTEST = 2


class SuffixIndex:
    """Texts of tokens that grow, with the places of all pairs of neighbours.

    Args:
        longest: Most tokens of a match; a text is compared no further back.
        candidates: Newest places that are compared per question.
    """

    def __init__(self, longest: int = 24, candidates: int = 16) -> None:
        self.longest = longest
        self._candidates = candidates
        self._texts: list[array[int]] = []
        # Two tokens -> (text, position after them), oldest first; there is a token at the position.
        self._places: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._followed: dict[int, tuple[int, int, int]] = {}

    def add(self, tokens: Sequence[int]) -> int:
        """Add a text and return its number."""
        number = len(self._texts)
        self._texts.append(array("q"))
        self.extend(number, tokens)
        return number

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        """Append tokens to a text."""
        text = self._texts[number]
        for token in tokens:
            end = len(text)
            if end >= SHORTEST:
                key = (text[end - 2], text[end - 1])
                self._places.setdefault(key, []).append((number, end))
            text.append(token)

    def match(self, number: int) -> tuple[int, int, int]:
        """Return length, text and position after the longest match of the end of a text.

        It has at least :data:`SHORTEST` and at most ``longest`` tokens and is followed by a token;
        of equally long ones it is one that the text has followed so far, or else the newest. The
        length is 0 where there is none.
        """
        text = self._texts[number]
        if len(text) < SHORTEST:
            return 0, 0, 0
        if followed := self._still_followed(number):
            return followed
        best = (0, 0, 0)
        places = self._places.get((text[-2], text[-1]), ())
        for other, position in reversed(places[-self._candidates :]):
            length = self._common(text, self._texts[other], position)
            if length > best[0]:
                best = (length, other, position)
                if length == self.longest:
                    break
        self._followed[number] = (*best[1:], len(text))
        return best

    def _still_followed(self, number: int) -> tuple[int, int, int] | None:
        """Return the match that the text has followed, if it is as long as a match can be."""
        other, position, before = self._followed.get(number, (0, 0, 0))
        if not before:
            return None
        text, source = self._texts[number], self._texts[other]
        position += len(text) - before
        if position >= len(source) or self._common(text, source, position) < self.longest:
            return None
        self._followed[number] = (other, position, len(text))
        return self.longest, other, position

    def _common(self, text: array[int], source: array[int], position: int) -> int:
        """Return how many tokens before the position are those at the end of the text."""
        most, length, end = min(self.longest, position, len(text)), 0, len(text)
        while length < most and source[position - 1 - length] == text[end - 1 - length]:
            length += 1
        return length

    def continuation(self, number: int, count: int) -> list[int]:
        """Return up to ``count`` tokens that followed the longest match of the end of a text.

        Where the text repeats itself, the repetition goes on beyond its end.
        """
        length, other, position = self.match(number)
        if not length:
            return []
        found = self._texts[other][position : position + count].tolist()
        if other == number:
            period = len(self._texts[number]) - position
            while len(found) < count:
                found.append(found[-period])
        return found
