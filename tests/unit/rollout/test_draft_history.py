"""Earlier responses are bounded in memory, and a file of them is taken whole or not at all."""

from __future__ import annotations

import hashlib
import json
import random

import pytest

from mindspeed_rl.rollout.draft_history import DraftHistory, prompt_key

LIMIT = 100_000
VOCAB = 151_936
RESPONSES = {i: [[i, j, 151_000 + j] for j in range(3)] for i in range(5)}


def filled(limit: int = LIMIT) -> DraftHistory:
    history = DraftHistory(limit)
    for i, responses in RESPONSES.items():
        for response in responses:
            history.add(prompt_key((i, 9)), response)
    return history


def content(history: DraftHistory) -> dict[int, list[list[int]]]:
    return {i: [list(r) for r in history.earlier(prompt_key((i, 9)))] for i in RESPONSES}


def test_responses_come_back_oldest_first() -> None:
    assert content(filled()) == RESPONSES
    assert filled().earlier(prompt_key((9, 9))) == ()


def test_the_least_recently_used_prompts_leave_first() -> None:
    one_prompt = DraftHistory(LIMIT)
    for response in RESPONSES[0]:
        one_prompt.add(prompt_key((0, 9)), response)
    history = DraftHistory(2 * one_prompt.num_bytes)
    for i in (0, 1):
        for response in RESPONSES[i]:
            history.add(prompt_key((i, 9)), response)
    history.earlier(prompt_key((0, 9)))
    history.add(prompt_key((2, 9)), RESPONSES[2][0])
    kept = content(history)
    assert kept[0] == RESPONSES[0] and kept[1] == [] and kept[2] == RESPONSES[2][:1]


def test_memory_stays_below_the_limit() -> None:
    draw, history = random.Random(0), DraftHistory(5_000, per_prompt=4)
    for _ in range(500):
        history.add(prompt_key((draw.randrange(30),)), [1] * draw.randrange(400))
        assert 0 <= history.num_bytes <= 5_000
        assert all(len(history.earlier(prompt_key((i,)))) <= 4 for i in range(30))
    assert len(history) > 1


def test_a_response_larger_than_the_limit_is_not_kept() -> None:
    history = DraftHistory(1_000)
    history.add(prompt_key((1,)), [1] * 1_000)
    assert len(history) == history.num_bytes == 0


def test_a_file_restores_everything() -> None:
    saved, restored = filled(), DraftHistory(LIMIT)
    assert restored.load(saved.to_bytes("tokens"), "tokens", VOCAB) == ""
    assert content(restored) == RESPONSES and restored.num_bytes == saved.num_bytes
    assert restored.to_bytes("tokens") == saved.to_bytes("tokens")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: b"[1]\n",
        lambda data: b"[" * 100_000 + b"\n",
        lambda data: b"\xff\xfe" + data,
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
        lambda data: data.replace(b'"format": 1', b'"format": 2'),
    ],
)
def test_a_spoiled_file_is_dropped(spoil: object) -> None:
    assert callable(spoil)
    history = DraftHistory(LIMIT)
    assert history.load(spoil(filled().to_bytes("tokens")), "tokens", VOCAB)
    assert len(history) == 0


@pytest.mark.parametrize("length", [5, 20, 25, 43])
def test_a_file_whose_records_are_cut_is_dropped_whole(length: int) -> None:
    """Its header was made for what is there: within a key, within a length, within tokens."""
    header, _, body = filled().to_bytes("tokens").partition(b"\n")
    digest = hashlib.blake2b(body[:length], digest_size=16).hexdigest()
    fields = json.loads(header) | {"bytes": length, "digest": digest}
    history = DraftHistory(LIMIT)
    reason = history.load(json.dumps(fields).encode() + b"\n" + body[:length], "tokens", VOCAB)
    assert reason == "it is corrupt" and len(history) == history.num_bytes == 0


def test_a_file_of_another_tokenizer_or_above_the_limit_is_dropped() -> None:
    data = filled().to_bytes("tokens")
    for limit, fingerprint in ((LIMIT, "others"), (100, "tokens")):
        history = DraftHistory(limit)
        assert history.load(data, fingerprint, VOCAB)
        assert len(history) == 0


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1, -(2**31)])
def test_a_file_with_tokens_that_the_model_does_not_have_is_dropped_whole(token: int) -> None:
    """Its digests are right; the engine would look up a row that is not there."""
    saved, history = filled(), DraftHistory(LIMIT)
    saved.add(prompt_key((5,)), [0, VOCAB - 1])
    assert history.load(saved.to_bytes("tokens"), "tokens", VOCAB) == ""
    saved.add(prompt_key((6,)), [1, token, 2])
    other = DraftHistory(LIMIT)
    reason = other.load(saved.to_bytes("tokens"), "tokens", VOCAB)
    assert reason == f"it has tokens outside the model's vocabulary of {VOCAB}"
    assert len(other) == other.num_bytes == 0
