"""Requests of which the engine still has what an earlier call sampled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mindspeed_rl.rollout.open_requests import OpenRequests
from mindspeed_rl.rollout.requests import GenerationRequest


class Keeper:
    """An engine that has the last two tokens of every request that paused.

    Attributes:
        asked: tokens, limit and tokens for later, by key.
        aborted: keys.
    """

    def __init__(self) -> None:
        self.asked: dict[str, tuple[tuple[int, ...], int, int]] = {}
        self.aborted: list[str] = []

    def add(
        self,
        key: str,
        token_ids: list[int],
        seed: int,
        max_tokens: int,
        temperature: float | None,
        *,
        watched: bool,
    ) -> str:
        assert watched, "it may pause"
        return f"inner {key}"

    def add_part(
        self, key: str, token_ids: list[int], seed: int, max_tokens: int, later_tokens: int
    ) -> tuple[str, int]:
        self.asked[key] = tuple(token_ids), max_tokens, later_tokens
        return f"inner {key}", 2

    def abort(self, keys: list[str]) -> None:
        self.aborted += keys


def output(*token_ids: int) -> Any:
    """Its log-probs follow from the tokens."""
    flat = SimpleNamespace(token_ids=list(token_ids), logprobs=[-t / 8 for t in token_ids])
    return SimpleNamespace(token_ids=list(token_ids), logprobs=flat, finish_reason="length")


def paused() -> tuple[Keeper, OpenRequests]:
    """One with a prompt of two tokens and three tokens so far, of which the engine has two."""
    port = Keeper()
    requests = OpenRequests(port, 99)
    requests.add(
        [GenerationRequest(4, (50, 51), 7, 5, (60, 61, 62), (-1.0, -2.0, -3.0), later_tokens=6)]
    )
    assert port.asked == {"4": ((50, 51, 60, 61, 62), 2, 6)}
    return port, requests


def test_a_response_in_parts_has_every_token_once() -> None:
    _, requests = paused()
    ended = SimpleNamespace(request_id="4", outputs=[output(61, 62, 63, 64)])
    done = requests.finish({4: ended}, 3)[4]
    assert done.token_ids == (60, 61, 62, 63, 64)
    assert done.logprobs == (-1.0, -2.0, -3.0, -63 / 8, -64 / 8), "those of the first are kept"


def test_a_response_in_parts_moves_with_every_token_once() -> None:
    port, requests = paused()
    requests.note([SimpleNamespace(request_id="4", outputs=[output(61, 62, 63)])])
    (load,) = requests.loads(lambda _, generated: generated + 9)
    assert (load.context, load.remaining, load.computed) == (6, 9, True)
    (moved,) = requests.take([4])
    assert moved.prefix_tokens == (60, 61, 62, 63)
    assert moved.prefix_logprobs == (-1.0, -2.0, -3.0, -63 / 8)
    assert port.aborted == ["4"] and moved.later_tokens == 6


def test_the_tokens_of_watched_requests_are_handed_out_once_each() -> None:
    """Those of a request that comes back from another engine as well, from the first on."""
    requests = OpenRequests(Keeper(), 99)
    requests.add([GenerationRequest(4, (50, 51), 7, watched=True)])

    def step(*token_ids: int) -> Any:
        return requests.new_tokens([SimpleNamespace(request_id="4", outputs=[output(*token_ids)])])

    assert step(61) == {4: (0, (61,))}
    assert step(61, 62, 63) == {4: (1, (62, 63))}
    requests.note([SimpleNamespace(request_id="4", outputs=[output(61, 62, 63)])])
    (moved,) = requests.take([4])
    assert moved.watched and step(61, 62, 63, 64) == {}, "it is elsewhere"
    requests.add([moved])
    assert step(70) == {4: (0, (61, 62, 63, 70))}
    assert step(70, 71) == {4: (4, (71,))}
    ended = SimpleNamespace(request_id="4", outputs=[output(70, 71, 72)])
    requests.finish({4: ended}, 3)
    assert requests.new_tokens([ended]) == {}


def test_other_requests_are_not_handed_out() -> None:
    _, requests = paused()
    noted = SimpleNamespace(request_id="4", outputs=[output(61, 62, 63)])
    assert requests.new_tokens([noted]) == {}
