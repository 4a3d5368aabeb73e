"""The reward of a server: retries, concurrency, errors that are no zeros."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from support.rewards_support import make_pool, settings

from mindspeed_rl.rewards import RewardRequest, WeightedReward, score_sample
from mindspeed_rl.rewards.builtin.remote import RemoteError, RemoteReward

Answer = Callable[[dict[str, Any], int], tuple[int, str]]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed_rl.rewards.builtin.remote.REMOTE_BACKOFF_S", 0.001)


@contextmanager
def server(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """``answer(sample, how often it was asked for it)`` gives status and body."""
    asked: list[dict[str, Any]] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sample = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                count = sum(a["sample_id"] == sample["sample_id"] for a in asked)
                asked.append(sample)
            status, body = answer(sample, count)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """Silent."""

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/score", asked
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


def request(i: int, response: str = "x") -> RewardRequest:
    return RewardRequest(i, "question", response, "42", "stop", 3, {"level": 5})


def remote(url: str, retries: int = 2) -> RemoteReward:
    flags = settings(
        "remote", remote_url=url, remote_url_timeout_s=5.0, remote_url_retries=retries
    ).flags
    return RemoteReward(flags)


def test_the_sample_is_posted_and_its_reward_read() -> None:
    with server(lambda sample, _: (200, json.dumps({"reward": sample["sample_id"] / 4}))) as (
        url,
        asked,
    ):
        assert remote(url)(request(3)) == 0.75
    assert asked == [
        {"sample_id": 3, "prompt": "question", "response": "x", "answer": "42",
         "finish_reason": "stop", "num_response_tokens": 3, "metadata": {"level": 5}}
    ]  # fmt: skip


def test_a_busy_server_is_asked_again() -> None:
    with server(lambda _, n: (200, '{"reward": 1}') if n == 2 else (503, "busy")) as (url, asked):
        assert remote(url)(request(1)) == 1
        assert len(asked) == 3
        with pytest.raises(RemoteError, match=r"--reward-url .*503"):
            remote(url, retries=1)(request(2))


def test_a_refusal_is_final() -> None:
    with server(lambda *_: (404, "no such reward")) as (url, asked):
        with pytest.raises(RemoteError, match=r"--reward-url .*404"):
            remote(url)(request(1))
        assert len(asked) == 1


@pytest.mark.parametrize("body", ["", "1", "[]", '{"score": 1}', "<html>"])
def test_nonsense_is_an_error(body: str) -> None:
    with (
        server(lambda *_: (200, body)) as (url, _),
        pytest.raises(RemoteError, match="--reward-url"),
    ):
        remote(url)(request(1))


def test_values_are_checked_like_those_of_any_reward() -> None:
    """NaN, texts and missing servers are errors and no zeros; null abstains."""
    rewards: dict[int, object] = {0: None, 1: "1.0", 2: float("nan"), 3: 0.5}
    with server(lambda s, _: (200, json.dumps({"reward": rewards[s["sample_id"]]}))) as (url, _):
        weighted = [WeightedReward("remote", 2.0, remote(url))]
        results = [score_sample(weighted, request(i)) for i in range(4)]
    assert [(r.status, r.reward) for r in results] == [
        ("ok", None), ("error", None), ("error", None), ("ok", 1.0),
    ]  # fmt: skip
    gone = score_sample(weighted, request(3))
    assert (gone.status, gone.reward) == ("error", None) and "after 3 attempts" in gone.detail


def test_requests_overlap_up_to_the_limit_and_order_is_kept() -> None:
    """The first answers wait for a second request, which one at a time could never reach."""
    pair = threading.Barrier(2, timeout=20.0)
    at_once, most = [0], [0]
    lock = threading.Lock()

    def answer(sample: dict[str, Any], _: int) -> tuple[int, str]:
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        if sample["sample_id"] < 8:  # of the first chunk
            pair.wait()
        with lock:
            at_once[0] -= 1
        return 200, json.dumps({"reward": sample["sample_id"]})

    with server(answer) as (url, asked):
        server_flags = {
            "remote_url": url, "remote_url_timeout_s": 20.0, "remote_url_concurrency": 2
        }  # fmt: skip
        with make_pool("remote", timeout_s=60.0, **server_flags) as pool:
            results = pool.score([request(i) for i in range(16)])
    assert [r.reward for r in results] == [float(i) for i in range(16)]
    assert most[0] == 2 and len(asked) == 16


def test_an_address_is_needed() -> None:
    for url in ("", "localhost:80", "file:///etc/passwd"):
        with pytest.raises(ValueError, match="--reward-url"):
            remote(url)
