"""Conversations that branch: tokens, masks and log-probs, and what other ranks know of them."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from mindspeed_rl.core.types import Completion, Prompt
from mindspeed_rl.generation.multi_turn import Continuation, Episode, Turns

PROMPT = Prompt(0, (7, 8), "", "")
Token = tuple[int, float, bool]


class Follower:
    """What a rank of the engine that does not lead it knows of a conversation."""

    def __init__(self) -> None:
        nobody = cast(Any, None)
        self.turns = Turns(None, {0: PROMPT}, nobody, lambda sample, turn: turn)

    def context(self, kept: int, new: tuple[int, ...]) -> tuple[int, ...]:
        return self.turns._request(Continuation(0, 9, new, kept)).token_ids


@given(st.data())
def test_a_branch_has_the_tokens_that_lead_to_it(data: st.DataObject) -> None:
    """Compared with a list of what each turn's beginning was, token by token."""
    episode, follower = Episode(0, PROMPT), Follower()
    ends: list[list[Token]] = [[]]  # by turn; that of 0 is the prompt
    fresh = iter(range(100, 10_000))
    branches = 0
    for _ in range(data.draw(st.integers(1, 8))):
        last = len(ends) - 1
        behind = data.draw(st.sampled_from([None, *range(last + 1)]))
        branches += behind not in (None, last)
        start = ends[last if behind is None else behind]
        assert episode.length_behind(behind) == len(start)
        heard = tuple(next(fresh) for _ in range(data.draw(st.integers(0, 3))))
        episode.append_observation(heard, behind)
        begun = [*start, *((t, 0.0, False) for t in heard)]
        kept, new = episode.take_new_tokens()
        assert follower.context(kept, new) == (*PROMPT.token_ids, *(t for t, *_ in begun))
        ids = tuple(next(fresh) for _ in range(data.draw(st.integers(1, 3))))
        logprobs = tuple(-0.001 * i for i in ids)
        episode.append_turn(Completion(ids, logprobs, "stop", 0))
        ends.append([*begun, *zip(ids, logprobs, [True] * len(ids), strict=True)])
    chosen = data.draw(st.sampled_from([None, *range(1, len(ends))]))
    episode.end_behind(chosen)
    wanted = ends[-1 if chosen is None else chosen]
    completion = episode.rollout("stop", 0).completion
    columns = (completion.token_ids, completion.logprobs, cast(Any, completion.loss_mask))
    assert list(zip(*columns, strict=True)) == wanted
    assert episode.branches == branches and len(episode.turns) == len(ends) - 1
    sampled = sum(len(t.completion.token_ids) for t in episode.turns)
    assert episode.num_dropped == sampled - sum(mask for *_, mask in wanted)


def test_without_branches_only_what_is_new_travels() -> None:
    episode = Episode(0, PROMPT)
    for turn in range(3):
        episode.append_observation((10 + turn,))
        assert episode.take_new_tokens() == (
            max(0, 2 * turn - 1),
            (*([20] if turn else []), 10 + turn),
        )
        episode.append_turn(Completion((20,), (-1.0,), "stop", 0))
