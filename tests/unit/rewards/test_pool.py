"""The reward pool: scores, order, environment, error rates, samples that come one by one."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from support.data_rewards import NOT_IN_A_WORKER
from support.rewards_support import make_pool, make_requests, wait_for, worker_pids

from mindspeed_rl.rewards import RewardError, RewardRequest, Scoring, resolve_reward


def test_the_pool_scores_as_this_process_does() -> None:
    """In their order, with the weighted parts."""
    requests = [
        RewardRequest(i, "", rf"so \boxed{{{i % 3}}}", "1", "stop" if i % 2 else "length", 4)
        for i in range(24)
    ]
    math, fmt = resolve_reward("math"), resolve_reward("format")
    expected = [0.8 * float(math(r) or 0) + 0.2 * float(fmt(r) or 0) for r in requests]
    assert len(set(expected)) == 4
    with make_pool("math=0.8", "format=0.2", workers=2) as pool:
        results = pool.score(requests)
    assert [r.reward for r in results] == pytest.approx(expected)
    assert [r.sample_id for r in results] == list(range(24))
    assert results[3].parts == {"math": 0.0, "format": 1.0}


def test_workers_are_clean_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Own processes, without the parent's rank, preloads or imports; the rest is kept."""
    for name in (*NOT_IN_A_WORKER, "KEPT"):
        monkeypatch.setenv(name, "")
    with make_pool(":process", workers=2, max_error_rate=0.0) as pool:
        used = {result.reward for result in pool.score(make_requests(*["x"] * 64))}
        assert used <= set(worker_pids(pool)) and os.getpid() not in used


def test_order_and_large_messages() -> None:
    """Requests far above the socket's buffer neither block nor mix up."""
    requests = make_requests(*["x" * (i * 997 % 300_000) for i in range(200)])
    with make_pool(":length", workers=3) as pool:
        results = pool.score(requests)
    assert [r.sample_id for r in results] == [r.sample_id for r in requests]
    assert [r.reward for r in results] == [float(len(r.response)) for r in requests]


def test_empty_batch_and_closed_pool() -> None:
    pool = make_pool("exact_match")
    assert pool.score([]) == []
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError):
        pool.score(make_requests("x"))


def test_raising_reward_is_counted_and_above_the_limit_raises() -> None:
    """An exception is not a 0."""
    requests = make_requests(*["good"] * 9, "bad one", *["good"] * 10)
    with make_pool(":raises_on_bad", workers=2) as pool:
        results = pool.score(requests)  # 1 of 20 = 5% is not above 5%
        assert [r.status for r in results].count("ok") == 19
        assert (results[9].status, results[9].reward, results[9].parts) == ("error", None, {})
        assert "RuntimeError: cannot score bad one" in results[9].detail
        with pytest.raises(RewardError, match="--reward-max-error-rate") as caught:
            pool.score([*requests, *make_requests("bad two")])
        assert "2 of 21" in str(caught.value) and "cannot score bad one" in str(caught.value)
        assert [r.status for r in pool.score(requests)].count("ok") == 19  # it goes on working


def test_few_samples_are_judged_together_with_the_next() -> None:
    """One failure in a small call ends no run; as many as in a large one do."""
    bad, good = make_requests("bad one"), make_requests("good", "good")
    with make_pool(":raises_on_bad") as pool:
        assert [r.status for r in pool.score(bad)] == ["error"]
        pool.score(good)
        with pytest.raises(RewardError, match="2 of 4"):
            pool.score(bad)
        for _ in range(3):
            pool.score(make_requests("bad one", *["good"] * 19))


def test_abstaining_is_no_error_and_nonsense_is() -> None:
    def sample(value: object) -> list[RewardRequest]:
        return [RewardRequest(1, "", "", "", "stop", 1, {"value": value})]

    with make_pool(":returns", max_error_rate=0.0) as pool:
        (result,) = pool.score(sample(None))
        assert (result.reward, result.status) == (None, "ok")
        for value in (float("nan"), "1.0", [1.0]):
            with pytest.raises(RewardError, match="'returns'"):
                pool.score(sample(value))


def test_threads_may_share_a_pool() -> None:
    scores: dict[int, list[float | None]] = {}
    with make_pool(":length", workers=2) as pool:

        def work(length: int) -> None:
            scores[length] = [r.reward for r in pool.score(make_requests(*["x" * length] * 50))]

        threads = [threading.Thread(target=work, args=(length,)) for length in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert scores == {length: [float(length)] * 50 for length in range(6)}


@pytest.mark.parametrize("spec", ["maths", "no_such_file.py:score", "math=x", "length"])
def test_bad_rewards_fail_at_construction(spec: str) -> None:
    with pytest.raises(ValueError, match="--reward-"):
        make_pool(spec, workers=2)


def test_a_file_that_ends_the_worker_fails_at_construction(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit(5)\n")
    with pytest.raises(RewardError, match="exit code 5"):
        make_pool(f"{file}:score")


# --- samples that come one by one ---------------------------------------------------------------


def wait_until_done(scoring: Scoring, count: int) -> bool:
    return wait_for(lambda: scoring.num_done == count, 20.0)


def test_samples_are_scored_as_they_come() -> None:
    """The first is scored before the second exists; order is that of arrival."""
    with make_pool(":length", workers=2) as pool, pool.scoring() as scoring:
        for number, request in enumerate(make_requests("abc", "a", "ab")):
            scoring.add(request)
            assert wait_until_done(scoring, number + 1)
        results = scoring.finish()
    assert [r.reward for r in results] == [3.0, 1.0, 2.0]


def test_a_scoring_that_is_given_up_leaves_nothing_behind() -> None:
    """An engine that fails in the middle costs the worker that holds its sample, not the next."""
    with make_pool(":hangs_on_bad", timeout_s=60.0) as pool:
        (before,) = worker_pids(pool)
        with pytest.raises(ZeroDivisionError), pool.scoring() as scoring:
            for request in make_requests("good", "bad", "bad"):
                scoring.add(request)
            assert wait_until_done(scoring, 1)
            raise ZeroDivisionError
        assert [r.status for r in pool.score(make_requests("good", "good"))] == ["ok", "ok"]
        assert before not in worker_pids(pool)
