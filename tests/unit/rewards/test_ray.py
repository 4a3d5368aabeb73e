"""The pool of Ray actors: the semantics of the process pool. Skipped where ray is not installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from support.rewards_support import make_requests, settings, wait_for

from mindspeed_rl.rewards import RewardError, ray_pool
from mindspeed_rl.rewards.ray_pool import RayRewardPool, RayWorker

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
    from mindspeed_rl.rewards.worker_process import worker_environment

    path = worker_environment(os.environ)["PYTHONPATH"]
    ray.init(
        address="local", _node_ip_address="127.0.0.1",  # another Ray of this machine is not joined
        num_cpus=2, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}}, object_store_memory=80 << 20,
    )  # fmt: skip
    yield ray
    ray.shutdown()


def test_order_timeouts_errors_and_lost_actors(cluster: Any) -> None:
    """As `RewardPool`; a lost actor costs no sample."""
    responses = ["good"] * 24
    responses[3] = responses[17] = "bad"
    flags = settings(":hangs_on_bad", workers=2, timeout_s=1.0, timeout_score=-0.5)
    with RayRewardPool(flags) as pool:
        results = pool.score(make_requests(*responses))
        assert [r.sample_id for r in results] == list(range(100, 124))
        assert [r.status for r in results] == ["timeout" if "bad" in r else "ok" for r in responses]
        assert {r.reward for r in results if r.status == "timeout"} == {-0.5}
        cluster.kill(cast(RayWorker, pool.workers[0]).actor, no_restart=False)
        assert {r.status for r in pool.score(make_requests(*["good"] * 9))} == {"ok"}
    with pytest.raises(RuntimeError):
        pool.score(make_requests("good"))
    assert cluster.is_initialized(), "a cluster that the pool did not start stays"


def test_a_lost_actor_that_finds_no_free_cpu_ends_the_run(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its samples do not pass as slow ones."""

    @cluster.remote(num_cpus=2)
    class Hog:
        def is_there(self) -> bool:
            return True

    with RayRewardPool(settings(":hangs_on_bad"), batch_timeout_s=60.0) as pool:
        monkeypatch.setattr(ray_pool, "START_LIMIT_S", 3.0)
        hog = Hog.remote()  # waits for the CPU of the pool's actor
        cluster.kill(cast(RayWorker, pool.workers[0]).actor)
        assert cluster.get(hog.is_there.remote(), timeout=60.0)
        with pytest.raises(RewardError, match=r"--reward-pool ray.* 3 s.*CPU"):
            pool.score(make_requests("good"))
        cluster.kill(hog)
    assert "a reward actor was lost, sample 100 is scored again" in caplog.text


def test_an_actor_that_crashes_at_its_start_is_told_at_once(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And not as a lack of CPUs."""
    from mindspeed_rl.environments import RayRunner, runners

    class Crashing:
        def __init__(self, settings: object) -> None:
            os._exit(1)

        def start(self) -> None: ...

    monkeypatch.setattr(ray_pool, "START_LIMIT_S", 60.0)
    monkeypatch.setattr(ray_pool, "_RewardActor", Crashing)
    with pytest.raises(RewardError, match=r"--reward-pool ray.*died"):
        RayRewardPool(settings("numeric_match"))
    monkeypatch.setattr(runners, "START_LIMIT_S", 60.0)
    (tmp_path / "crash.py").write_text("import os\nos._exit(1)\n")
    tokenizer: Any = None
    with pytest.raises(ValueError, match=r"crash\.py:X .*died"):
        RayRunner(f"{tmp_path}/crash.py:X", tokenizer, 1)


def test_a_batch_that_takes_too_long_times_out(cluster: Any) -> None:
    with RayRewardPool(settings(":hangs_on_bad", timeout_s=60.0), batch_timeout_s=0.5) as pool:
        with pool.scoring() as scoring:
            for request in make_requests("good", "bad", "good"):
                scoring.add(request)
            assert wait_for(lambda: scoring.num_done == 1, 60.0)
            assert [r.status for r in scoring.finish()] == ["ok", "timeout", "timeout"]
        pool.batch_timeout_s = 60.0
        assert [r.status for r in pool.score(make_requests("good"))] == ["ok"]


def test_an_unknown_reward_is_the_users_fault(cluster: Any) -> None:
    with pytest.raises(ValueError, match="--reward-function maths"):
        RayRewardPool(settings("maths"))


ENVIRONMENT = """
import os

from mindspeed_rl.environments import Observation


class Tool:
    def __init__(self, tokenizer):
        self.turns = 0

    def reset(self, prompt):
        return Observation(token_ids=(prompt.index,))

    def step(self, token_ids):
        self.turns += 1
        if token_ids == (13,):
            raise OSError("the tool is gone")
        if token_ids == (66,):
            os._exit(1)
        return Observation(token_ids=(*token_ids, self.turns), done=self.turns == 2)
"""


def test_environments_in_actors_keep_their_conversations(cluster: Any, tmp_path: Path) -> None:
    """As those in this process; what fails costs its sample, a lost actor costs its own."""
    from mindspeed_rl.core.types import Prompt
    from mindspeed_rl.environments import Failed, LocalRunner, RayRunner, resolve_environment

    file = tmp_path / "tool.py"
    file.write_text(ENVIRONMENT)
    name = f"{file}:Tool"
    tokenizer: Any = None
    prompts = {i: Prompt(20 + i, (1,), "", "") for i in range(5)}
    local = LocalRunner(resolve_environment(name), tokenizer, 2)
    remote = RayRunner(name, tokenizer, 2)

    def both(method: str, asked: dict[int, Any]) -> tuple[dict[int, Any], dict[int, Any]]:
        found: tuple[dict[int, Any], dict[int, Any]] = {}, {}
        for runner, answers in zip((remote, local), found, strict=True):
            getattr(runner, method)(asked)
            while len(answers) < len(asked):
                answers |= runner.answers(60.0)
            assert not runner.answers(60.0), "nothing is asked"
        return found

    def equal(method: str, asked: dict[int, Any]) -> bool:
        of_remote, of_local = both(method, asked)
        return of_remote == of_local

    assert equal("reset", prompts)
    assert equal("step", {3: (7,), 0: (8, 9)}) and equal("step", {3: (7,), 0: (8, 9)})
    broken, expected = both("step", {1: (13,), 2: (5,)})
    assert isinstance(broken[1], Failed) and "the tool is gone" in broken[1].trace
    assert broken[2] == expected[2]
    remote.step({2: (66,), 4: (5,), 3: (5,)})
    lost: dict[int, Any] = {}
    while len(lost) < 3:
        lost |= remote.answers(60.0)
    assert isinstance(lost[2], Failed) and isinstance(lost[4], Failed), "both live in actor 0"
    assert not isinstance(lost[3], Failed)
    assert equal("reset", prompts), "another actor takes its place"
    remote.close()
    with pytest.raises(ValueError, match="--rl-environment nothing"):
        RayRunner("nothing", tokenizer, 1)
