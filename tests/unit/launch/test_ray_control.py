"""The driver of ranks in Ray, without Ray: placements, who failed."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from support.rewards_support import settings
from support.rl_run import make_run

from mindspeed_rl.config.launch import LaunchConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.launch.failure_store import FailureStore
from mindspeed_rl.launch.failures import Failure, Member, WatchdogSettings
from mindspeed_rl.launch.ray import (
    Command,
    RankActor,
    check_room,
    cluster_platform,
    forwarded,
    local_cpus,
    open_store,
    rank_environments,
    wait_for_end,
)
from mindspeed_rl.rewards.ray_pool import RayRewardPool

LAUNCH = LaunchConfig(orchestrator="ray", ray_num_nodes=2, ray_ranks_per_node=2)
RANK = Member(1, 0, 77)


class Gone(Exception):
    """An actor that died."""


@dataclass
class FakeRay:
    """A call is the answer that it gives, by rank; those in ``never`` do not answer.

    ``on_wait`` happens when the driver waits.
    """

    never: Sequence[object] = ()
    on_wait: Callable[[], object] = lambda: None
    exceptions: Any = field(default_factory=lambda: SimpleNamespace(RayError=Gone))
    num_waits: int = 0

    def wait(self, calls: Sequence[Any], num_returns: int, timeout: float) -> Any:
        self.num_waits += 1
        assert self.num_waits < 9, "the driver waits for what never comes"
        self.on_wait()
        ready = [c for c in calls if c not in self.never]
        return ready, [c for c in calls if c in self.never]

    def get(self, call: Any) -> Any:
        if isinstance(call, Exception):
            raise call
        return call


@pytest.fixture
def store() -> FailureStore:
    return FailureStore(dist.HashStore(), RANK)


def test_a_run_ends_when_all_ranks_have(store: FailureStore) -> None:
    assert wait_for_end(FakeRay(), [None, None], store) is None


def test_a_failure_is_read_from_the_store_while_all_ranks_hang(store: FailureStore) -> None:
    failure = Failure("error", RANK, "train", "RuntimeError: it broke", RANK)
    ray = FakeRay(never=("a", "b"), on_wait=lambda: store.publish(failure))
    assert wait_for_end(ray, ["a", "b"], store) == failure


@pytest.mark.parametrize("phase", ["", "train"])
def test_a_process_that_is_gone_is_named_to_all_ranks(store: FailureStore, phase: str) -> None:
    if phase:
        store.beat(phase, 3.0)
    failure = wait_for_end(FakeRay(never=("hangs",)), ["hangs", Gone("killed by SIGKILL")], store)
    assert failure is not None and failure == store.published() and failure.failed.rank == 1
    assert failure.phase == (phase or "start") and "killed by SIGKILL" in failure.text


def test_what_was_published_before_a_process_is_gone_is_the_cause(store: FailureStore) -> None:
    mistake = store.publish(Failure("usage", RANK, "start", "node 1 cannot enter /data", RANK))
    assert wait_for_end(FakeRay(never=("hangs",)), ["hangs", Gone("it ended")], store) == mistake


def test_a_mistake_that_one_node_sees_is_published(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others may already wait for it to join."""
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    port, published = open_store()
    _, environment = rank_environments([("a", []), ("b", [])], 1, ("127.0.0.1", port))
    for name in environment:  # which the rank sets
        monkeypatch.setenv(name, "")
    settings = WatchdogSettings(exit_grace_s=0.0)
    command = Command("train_rl", (), str(tmp_path / "gone"), "nowhere:main", settings)
    RankActor(1).run(command, environment)
    failure = published.published()
    assert failure is not None and failure.kind == "usage" and failure.failed.rank == 1
    assert "node 1 cannot enter" in failure.text


def test_ray_labels_the_lines_of_a_rank() -> None:
    assert repr(RankActor(3)) == "rank 3"


def test_without_ray_a_pool_in_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_ray(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "ray":
            raise ImportError("No module named 'ray'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_ray)
    with pytest.raises(ValueError, match="--reward-pool ray"):
        RayRewardPool(settings("format"))


# -- placement ---------------------------------------------------------------------------------


def test_a_rank_gets_what_torchrun_would_set() -> None:
    found = [("a", ["10"]), ("a", ["4"]), ("b", ["0"]), ("b", ["1"])]
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
    (on_cpu,) = rank_environments([("a", [])], 1, ("127.0.0.1", 1))
    assert not {"ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"} & set(on_cpu)
    with pytest.raises(AssertionError, match="node 0 is several"):
        rank_environments([("a", []), ("b", [])], 2, ("127.0.0.1", 1))


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
    with pytest.raises(UsageError, match=r"needs 2 CPU, 2 NPU on each of 2 nodes.*64 CPU, 0 NPU"):
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
