"""The driver of ranks in Ray, without Ray: placements and environments."""

from __future__ import annotations

import builtins
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.rewards_support import settings
from support.rl_run import make_run

from mindspeed_rl.config.launch import LaunchConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.launch.failures import Failure, Member, WatchdogSettings
from mindspeed_rl.launch.ray import (
    Command,
    RankActor,
    _NodeLostError,
    check_room,
    cluster_platform,
    forwarded,
    local_cpus,
    nodes_left,
    open_store,
    rank_environments,
    run_attempts,
)
from mindspeed_rl.rewards.ray_pool import RayRewardPool

LAUNCH = LaunchConfig(orchestrator="ray", ray_num_nodes=2, ray_ranks_per_node=2)


def test_a_mistake_that_one_node_sees_is_published(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others may already wait for it to join."""
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    port, published = open_store("127.0.0.1")
    _, environment = rank_environments([[], []], 1, ("127.0.0.1", port))
    for name in environment:  # which the rank sets
        monkeypatch.setenv(name, "")
    settings = WatchdogSettings(exit_grace_s=0.0)
    command = Command("train_rl", (), str(tmp_path / "gone"), settings)
    RankActor(1).run(command, environment)
    failure = published.published()
    assert failure is not None and failure.kind == "usage" and failure.failed.rank == 1
    assert "node 1 cannot enter" in failure.text


def test_without_ray_a_pool_in_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_ray(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "ray":
            raise ImportError("No module named 'ray'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_ray)
    with pytest.raises(ValueError, match="--reward-pool ray"):
        RayRewardPool(settings("format"))


def test_the_driver_starts_the_ranks_again_until_a_fault_repeats(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At steps 3, 5 and 5 again; without the flag the first failure is the last."""
    rank, starts = Member(1, 0, 7), list[int]()

    def run_ranks(ray: Any, config: Any, command: Command, restarts: int) -> Failure:
        starts.append(restarts)
        return Failure("error", rank, "train", "it broke", rank, (3, 5, 5)[restarts])

    monkeypatch.setattr("mindspeed_rl.launch.ray.run_ranks", run_ranks)
    config = make_run(tmp_path).config
    command = Command("train_rl", (), str(tmp_path), WatchdogSettings())
    assert run_attempts(None, config, command) is not None and starts == [0]
    launch = replace(LAUNCH, max_restarts=9, restart_backoff_s=0.0)
    starts.clear()
    failure = run_attempts(None, replace(config, launch=launch), command)
    assert failure is not None and failure.step == 5 and starts == [0, 1, 2]
    told = capsys.readouterr().err
    assert "restart 2 of 9 in 0 s: the job ended in step 5" in told and "no restart" in told


class Cluster:
    """Ray's view of its nodes, of which one is gone after some questions."""

    def __init__(self, before: int, after: int, questions: int = 1) -> None:
        self.counts = [before] * questions + [after]

    def nodes(self) -> list[dict[str, Any]]:
        alive = self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]
        node = {"Resources": {"CPU": 2.0, "NPU": 8.0}}
        return [node | {"Alive": number < alive} for number in range(4)]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8.0}


ELASTIC = replace(LAUNCH, ray_num_nodes=3, elastic_min_nodes=2, elastic_wait_s=0.0)


def test_a_job_goes_on_with_the_nodes_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nodes_left(Cluster(3, 3), ELASTIC, "cpu", lambda count: "") == 3
    assert nodes_left(Cluster(4, 4), ELASTIC, "cpu", lambda count: "") == 3, "it never has more"
    assert nodes_left(Cluster(2, 2), ELASTIC, "cpu", lambda count: "") == 2
    patient = replace(ELASTIC, elastic_wait_s=60.0)
    assert nodes_left(Cluster(2, 3), patient, "cpu", lambda count: "") == 3, "one came back"
    with pytest.raises(UsageError, match="--elastic-min-nodes 2: no 2"):
        nodes_left(Cluster(2, 2), ELASTIC, "cpu", lambda count: f"no {count}")
    monkeypatch.setattr("mindspeed_rl.launch.ray.START_LIMIT_S", 0.0)
    with pytest.raises(UsageError, match="1 of at least 2 nodes are left"):
        nodes_left(Cluster(1, 1), ELASTIC, "cpu", lambda count: "")


def test_an_attempt_is_made_with_the_nodes_that_are_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where Ray learns of a lost node only while it waits for room."""
    rank, asked = Member(1, 0, 7), list[tuple[int, int]]()

    def run_ranks(ray: Any, config: Any, command: Command, restarts: int) -> Failure | None:
        asked.append((restarts, config.launch.ray_num_nodes))
        if len(asked) == 1:
            return Failure("lost", rank, "train", "it is gone", rank, 3)
        if len(asked) == 2:
            raise _NodeLostError
        return None

    monkeypatch.setattr("mindspeed_rl.launch.ray.run_ranks", run_ranks)
    problems: dict[int, str] = {}
    monkeypatch.setattr(
        "mindspeed_rl.launch.ray.smaller_problem",
        lambda prog, arguments, per_node: lambda count: problems.get(count, ""),
    )
    launch = replace(ELASTIC, max_restarts=3, restart_backoff_s=0.0)
    config = replace(make_run(tmp_path).config, launch=launch)
    command = Command("train_rl", (), str(tmp_path), WatchdogSettings())
    assert run_attempts(Cluster(3, 2, questions=1), config, command) is None
    assert asked == [(0, 3), (1, 3), (1, 2)]
    told = capsys.readouterr().err
    assert "attempt 2 runs on 3 of 3 nodes, 6 ranks" in told
    assert "attempt 2 runs on 2 of 3 nodes, 4 ranks" in told
    problems[2] = "with 2 nodes (4 ranks) it cannot run: 3 does not divide 4"
    with pytest.raises(UsageError, match=r"--elastic-min-nodes 2: with 2 nodes .*does not divide"):
        run_attempts(Cluster(3, 3), config, command)
    assert len(asked) == 3, "before anything starts"


# -- placement ---------------------------------------------------------------------------------


def test_a_rank_gets_what_torchrun_would_set() -> None:
    found = [["10"], ["4"], ["0"], ["1"]]
    ranks = rank_environments(found, 2, ("10.0.0.1", 29500), "ASCEND_RT_VISIBLE_DEVICES")
    assert [r["RANK"] for r in ranks] == ["0", "1", "2", "3"]
    assert [r["LOCAL_RANK"] for r in ranks] == ["0", "1", "0", "1"]
    assert [r["GROUP_RANK"] for r in ranks] == ["0", "0", "1", "1"]
    assert {r["WORLD_SIZE"] + r["LOCAL_WORLD_SIZE"] + r["GROUP_WORLD_SIZE"] for r in ranks} == {
        "422"
    }
    assert {(r["MASTER_ADDR"], r["MASTER_PORT"]) for r in ranks} == {("10.0.0.1", "29500")}
    assert {r["TORCHELASTIC_USE_AGENT_STORE"] for r in ranks} == {"True"}, "the driver holds it"
    visible = [r["ASCEND_RT_VISIBLE_DEVICES"] for r in ranks]
    assert visible == ["4,10", "4,10", "0,1", "0,1"], "neighbours see each other's devices"
    (on_cpu,) = rank_environments([[]], 1, ("127.0.0.1", 1))
    assert not {"ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"} & set(on_cpu)


@pytest.mark.parametrize(
    ("platform", "resources", "found"),
    [
        ("cpu", {"GPU": 8.0}, "cpu"),
        ("npu", {}, "npu"),
        ("auto", {"CPU": 4.0, "NPU": 16.0}, "npu"),
        ("auto", {"CPU": 4.0, "GPU": 8.0}, "cuda"),
        ("auto", {"CPU": 4.0}, "cpu"),
    ],
)
def test_devices_are_those_of_the_cluster(
    platform: str, resources: dict[str, float], found: str
) -> None:
    assert cluster_platform(platform, resources) == found


def test_a_cluster_without_room_is_told_at_once() -> None:
    wanted = {"CPU": 2.0, "NPU": 2.0}
    large, small = {"CPU": 64.0, "NPU": 16.0}, {"CPU": 64.0}
    check_room(LAUNCH, wanted, [large, small, large])
    with pytest.raises(UsageError, match=r"2 NPU.*0 NPU"):
        check_room(LAUNCH, wanted, [large, small])


def test_settings_of_libraries_go_along_and_visible_devices_do_not() -> None:
    environ = {"HCCL_BUFFSIZE": "64", "ASCEND_RT_VISIBLE_DEVICES": "3", "HF_TOKEN": "x", "X": "y"}
    found = forwarded(environ)
    assert found["HCCL_BUFFSIZE"] == "64" and found["OMP_NUM_THREADS"] == "1"
    assert not {"ASCEND_RT_VISIBLE_DEVICES", "HF_TOKEN", "X"} & set(found)
    assert str(Path(__file__).parents[3]) in found["PYTHONPATH"]
    assert forwarded(environ | {"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "8"


def test_a_local_ray_has_a_place_for_every_actor(tmp_path: Path) -> None:
    run = make_run(tmp_path, "--reward-num-workers 3").parts
    config = replace(run.config, launch=replace(LAUNCH, ray_num_nodes=1))
    assert local_cpus(config, run.plan) == 2 + 3
    environment = replace(config.environment, rl_environment_ray_workers=2)
    assert local_cpus(replace(config, environment=environment), run.plan) == 2 + 3 + 2
    rewards = replace(config.rewards, reward_pool="process")
    assert local_cpus(replace(config, rewards=rewards), run.plan) == 2
