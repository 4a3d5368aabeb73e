"""Where messages belong in what was said before."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mindspeed_rl.endpoint.history import ChatHistory

TEXTS = ["a", "b", "ab"]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_texts_that_only_together_are_equal_are_not_the_same() -> None:
    history = ChatHistory()
    history.add(history.find([user("ab"), user("c")]), 5, "x", cut=False)
    for other in ([user("a"), user("bc")], [user("abc")], [user("c"), user("ab")]):
        assert history.find([*other, assistant("x"), user("d")]).behind == 0
    whole = [user("ab"), user("c"), assistant("x"), user("d")]
    found = history.find(whole)
    assert (found.behind, found.messages) == (1, (user("d"),))
    assert (history.length(1), history.cut(1), history.length(0)) == (5, False, 0)


@given(st.data())
def test_the_longest_known_beginning_is_found(data: st.DataObject) -> None:
    """Of a conversation that branches at random, compared with a list of all that was said."""
    history = ChatHistory()
    known: list[tuple[list[dict[str, Any]], int]] = []
    for turn in range(1, data.draw(st.integers(2, 9))):
        start = data.draw(st.sampled_from([[], *(messages for messages, _ in known)]))
        texts = data.draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=2))
        asked = [*start, *map(user, texts)]
        if data.draw(st.booleans()):  # the model's words, made up by the agent
            asked = [*asked, assistant(data.draw(st.sampled_from(TEXTS))), user("z")]
        begun = [
            (len(messages), number)
            for messages, number in known
            if messages == asked[: len(messages)]
        ]
        length, behind = max(begun, default=(0, 0))
        place = history.find(asked)
        assert (place.behind, list(place.messages)) == (behind, asked[length:])
        text = data.draw(st.sampled_from(TEXTS))
        history.add(place, 10 * turn, text, cut=turn % 2 == 0)
        known.append(([*asked, assistant(text)], turn))
        assert len(history) == turn and history.length(turn) == 10 * turn
        assert history.cut(turn) == (turn % 2 == 0)
