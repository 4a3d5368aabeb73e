"""Drafts are what followed the longest earlier match, compared with all of a text by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_rl.rollout.suffixes import SHORTEST, SuffixIndex

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=1, max_size=4)


def longest_by_hand(texts: Sequence[Sequence[int]], number: int, longest: int) -> int:
    """Length of the longest end of a text that is somewhere followed by a token."""
    text = list(texts[number])
    for length in range(min(longest, len(text)), SHORTEST - 1, -1):
        end = text[len(text) - length :]
        for other in texts:
            if any(list(other[i : i + length]) == end for i in range(len(other) - length)):
                return length
    return 0


@given(TEXTS, st.integers(2, 6), st.lists(st.integers(1, 3), max_size=6))
def test_a_match_is_the_longest_while_texts_grow(
    texts: list[list[int]], longest: int, strides: list[int]
) -> None:
    index = SuffixIndex(longest=longest, candidates=1000)
    numbers = [index.add(text[:1]) for text in texts]
    now = [text[:1] for text in texts]
    for stride in [*strides, 100]:
        for number, text in enumerate(texts):
            more = text[len(now[number]) :][:stride]
            index.extend(numbers[number], more)
            now[number] = now[number] + more
            length, other, position = index.match(number)
            assert length == longest_by_hand(now, number, longest)
            if length:
                assert now[other][position - length : position] == now[number][-length:]
                assert position < len(now[other])
                ahead = list(now[other])
                if other == number:  # its own repetition goes on
                    for _ in range(3):
                        ahead.append(ahead[len(ahead) - len(now[number]) + position])
                assert index.continuation(number, 3) == ahead[position : position + 3]


def test_the_newest_of_equal_matches_is_taken() -> None:
    index = SuffixIndex()
    index.add([1, 2, 7])
    index.add([1, 2, 8])
    assert index.continuation(index.add([1, 2]), 5) == [8]


def test_a_text_that_follows_another_stays_with_it() -> None:
    """A newer place with an equally long match does not end a full one."""
    index = SuffixIndex(longest=3)
    index.add([1, 2, 3, 4, 5, 6, 7])
    mine = index.add([1, 2, 3])
    assert index.continuation(mine, 2) == [4, 5]
    index.add([2, 3, 4, 9])
    index.extend(mine, [4])
    assert index.continuation(mine, 2) == [5, 6]


def test_a_repetition_goes_on_beyond_the_end() -> None:
    index = SuffixIndex()
    assert index.continuation(index.add([9, 1, 2, 3, 1, 2, 3]), 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_only_the_newest_candidates_are_compared() -> None:
    index = SuffixIndex(candidates=1)
    index.add([5, 1, 2, 7])
    index.add([6, 1, 2, 8])
    assert index.match(index.add([5, 1, 2]))[0] == 2


@pytest.mark.parametrize("text", [[], [1], [1, 2], [1, 2, 1]])
def test_without_an_earlier_place_there_is_no_draft(text: list[int]) -> None:
    index = SuffixIndex()
    assert index.continuation(index.add(text), 4) == []
