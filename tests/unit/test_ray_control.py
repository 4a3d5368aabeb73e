"""The driver of ranks in Ray, without Ray: placements, messages, who is blamed."""

from __future__ import annotations

import builtins
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from mindspeed_rl.orchestration.failures import Failure, FailureBoard, Member
from mindspeed_rl.orchestration.ray_cluster import (
    Where,
    bundle,
    check_room,
    device_of,
    forwarded,
    rank_environments,
)
from mindspeed_rl.orchestration.ray_controller import Ranks, RunEnded, Traffic, local_cpus
from mindspeed_rl.orchestration.ray_worker import RankActor, Reply
from mindspeed_rl.orchestration.stages import SampleIds, Stage, run_through
from support.rl_run import make_run

from mindspeed_rl.config.launch import LaunchConfig
from mindspeed_rl.launch.failures import Limits
from mindspeed_rl.orchestration import ray_worker
from mindspeed_rl.rewards.ray_pool import RayRewardPool

LAUNCH = LaunchConfig(orchestrator="ray", ray_num_nodes=2, ray_ranks_per_node=2)
ROLLOUT = Stage("rollout", 1)
TRAIN = Stage("train", 1, SampleIds.of(range(6)))


class Gone(Exception):
    """An actor that died."""


@dataclass
class FakeRay:
    """Calls are the functions that make their answers; those in ``never`` do not answer.

    ``on_wait`` happens when the driver waits.
    """

    never: Sequence[int] = ()
    on_wait: Callable[[], object] = lambda: None
    exceptions: Any = field(default_factory=lambda: SimpleNamespace(RayError=Gone))

    waits: list[tuple[list[int], int, float]] = field(default_factory=list)

    def wait(self, calls: Sequence[Any], num_returns: int, timeout: float) -> Any:
        self.waits.append(([c.rank for c in calls], num_returns, timeout))
        assert len(self.waits) < 9, "the driver waits for what never comes"
        self.on_wait()
        ready = [c for c in calls if c.rank not in self.never]
        return ready, [c for c in calls if c not in ready]

    def get(self, call: Any) -> Any:
        answer = call.answer
        if isinstance(answer, Exception):
            raise answer
        return answer


@dataclass(frozen=True, eq=False)
class Call:
    rank: int
    answer: object


def ranks_that_answer(
    answers: Sequence[object], board: FailureBoard | None = None, ray: FakeRay | None = None
) -> Ranks:
    def actor(rank: int) -> Any:
        remote = SimpleNamespace(remote=lambda stage: Call(rank, answers[rank]))
        return SimpleNamespace(go_on=remote)

    driver = FailureBoard(dist.HashStore(), Member(-1, -1, 1), len(answers))
    actors = [actor(rank) for rank in range(len(answers))]
    return Ranks(ray or FakeRay(), actors, board or driver, "prog")


def test_all_ranks_stand_before_the_next_stage() -> None:
    ranks = ranks_that_answer([Reply(TRAIN, 10.0), Reply(TRAIN, 10.25)])
    assert ranks.go_on(ROLLOUT) == TRAIN
    assert ranks.traffic.skews_s == [0.25] and ranks.traffic.num_messages == 3
    assert ranks_that_answer([Reply(None, 0.0)] * 2).go_on(TRAIN) is None


@pytest.mark.parametrize("other", [ROLLOUT, replace(TRAIN, samples=SampleIds.of(range(7))), None])
def test_ranks_that_disagree_end_the_run(other: Stage | None) -> None:
    """Ranks that hold different samples would be silently wrong, or hang."""
    with pytest.raises(RunEnded, match=r"the ranks disagree: rank 0 .* rank 1 before"):
        ranks_that_answer([Reply(TRAIN, 0.0), Reply(other, 0.0)]).go_on(ROLLOUT)


def test_a_failure_is_told_with_its_traceback_while_others_hang() -> None:
    """The driver reads what a rank has published; nobody else has to answer."""
    store = dist.HashStore()
    rank = Member(1, 0, 77)
    trace = "Traceback ...\nRuntimeError: it broke\n"
    board = FailureBoard(store, rank, 2)

    def break_down() -> None:
        board.tell(Failure("error", rank, "train", "RuntimeError: it broke", rank, trace))

    driver = FailureBoard(store, Member(-1, -1, 1), 2)
    ranks = ranks_that_answer([None, None], driver, FakeRay(never=(0, 1), on_wait=break_down))
    with pytest.raises(RunEnded) as told:
        ranks.go_on(TRAIN)
    text = "prog: the job ends: rank 1 in phase train: RuntimeError: it broke"
    assert str(told.value) == trace + text and told.value.exit_code == 1


def test_a_hang_leaves_the_ranks_the_time_to_dump_their_stacks() -> None:
    store = dist.HashStore()
    rank = Member(1, 0, 77)
    FailureBoard(store, rank, 2).tell(Failure("hang", rank, "train", "exceeded the limit", rank))
    ray = FakeRay(never=(0, 1))
    ranks = ranks_that_answer([None, None], FailureBoard(store, rank, 2), ray)
    with pytest.raises(RunEnded, match="rank 1 in phase train: exceeded the limit") as told:
        ranks.go_on(TRAIN)
    assert told.value.with_stacks and told.value.exit_code == 1
    ranks.let_end(7.0)
    assert ray.waits[-1] == ([0, 1], 2, 7.0), "until all have ended, those that answered before too"


def test_the_driver_is_more_patient_than_the_last_rank_to_leave() -> None:
    """A rank reads of a failure one interval later and lingers twice (`Watchdog._exit`)."""
    limits = Limits()
    assert limits.end_s > limits.interval_s + 2 * limits.linger_s


def test_a_mistake_of_the_user_is_one_line_with_exit_code_2() -> None:
    store = dist.HashStore()
    rank = Member(0, 0, 77)
    FailureBoard(store, rank, 2).tell(Failure("usage", rank, "start", "--lr: too large", rank))
    ranks = ranks_that_answer([Reply(TRAIN, 0.0)] * 2, FailureBoard(store, rank, 2))
    with pytest.raises(RunEnded, match=r"^prog: error: --lr: too large$") as told:
        ranks.go_on(ROLLOUT)
    assert told.value.exit_code == 2


def test_a_mistake_that_one_node_sees_does_not_wait_for_the_others() -> None:
    refused = Reply(None, 0.0, "node 1 cannot enter /data")
    with pytest.raises(RunEnded, match=r"^prog: error: node 1 cannot enter /data$") as told:
        ranks_that_answer([None, refused], ray=FakeRay(never=(0,))).go_on(ROLLOUT)
    assert told.value.exit_code == 2


def test_an_actor_that_dies_ends_the_run_while_others_hang() -> None:
    ranks = ranks_that_answer([None, Gone("killed by SIGKILL")], ray=FakeRay(never=(0,)))
    with pytest.raises(RunEnded, match=r"rank 1 is gone \(train in step 1 of 6 samples\)") as told:
        ranks.go_on(TRAIN)
    assert "killed by SIGKILL" in str(told.value)


def test_messages_have_the_same_size_for_any_number_of_samples() -> None:
    """The driver's work must not grow with the data: that is what a single controller is for."""
    small = Stage("train", 1, SampleIds.of(range(8)))
    large = Stage("train", 1, SampleIds.of(range(1 << 17)))
    assert len(large.samples) == 1 << 17
    assert abs(len(pickle.dumps(large)) - len(pickle.dumps(small))) <= 4  # digits of a number
    traffic = Traffic()
    for message in (small, large, Reply(large, 1.0)):
        traffic.count(message)
    assert traffic.num_messages == 3 and traffic.max_bytes < 256


def test_a_message_with_data_in_it_is_refused() -> None:
    smuggled = Stage("train" * 1000, 1)
    with pytest.raises(AssertionError, match="a control message of"):
        Traffic().count(smuggled)


def test_sample_ids_are_as_many_numbers_as_there_are_gaps() -> None:
    ids = SampleIds.of([9, 0, 1, 2, 8, 5])
    assert ids.ranges == ((0, 3), (5, 6), (8, 10)) and len(ids) == 6
    assert SampleIds.of([]) == SampleIds() and not SampleIds()
    assert str(TRAIN) == "train in step 1 of 6 samples" and str(ROLLOUT) == "rollout in step 1"


def test_without_a_driver_all_stages_are_done() -> None:
    done = []

    def work() -> Any:
        for step in (1, 2):
            yield Stage("train", step)
            done.append(step)

    run_through(work())
    assert done == [1, 2]


def test_without_ray_a_pool_in_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_ray(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "ray":
            raise ImportError("No module named 'ray'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_ray)
    with pytest.raises(ValueError, match=r"--reward-pool ray needs .*mindspeed-rl-megatron\[ray\]"):
        RayRewardPool(["format"])


# -- placement ---------------------------------------------------------------------------------


def test_a_rank_gets_what_torchrun_would_set() -> None:
    found = [Where("a", 1, ("10",)), Where("a", 2, ("4",)), Where("b", 3, ("0",))]
    found.append(Where("b", 4, ("1",)))
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


def test_on_cpus_no_device_is_hidden() -> None:
    (rank,) = rank_environments([Where("a", 1)], 1, ("127.0.0.1", 1))
    assert not {"ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"} & set(rank)


def test_ranks_of_a_node_must_be_on_it() -> None:
    with pytest.raises(AssertionError, match="node 0 is several"):
        rank_environments([Where("a", 1), Where("b", 2)], 2, ("127.0.0.1", 1))


@pytest.mark.parametrize(
    ("platform", "resources", "device"),
    [
        ("cpu", {"GPU": 8.0}, None),
        ("npu", {}, ("NPU", "ASCEND_RT_VISIBLE_DEVICES")),
        ("auto", {"CPU": 4.0, "NPU": 16.0}, ("NPU", "ASCEND_RT_VISIBLE_DEVICES")),
        ("auto", {"CPU": 4.0, "GPU": 8.0}, ("GPU", "CUDA_VISIBLE_DEVICES")),
        ("auto", {"CPU": 4.0}, None),
    ],
)
def test_devices_are_those_of_the_cluster(
    platform: str, resources: dict[str, float], device: object
) -> None:
    assert device_of(platform, resources) == device


def test_a_cluster_without_room_is_told_at_once() -> None:
    wanted = bundle(LAUNCH, ("NPU", "ASCEND_RT_VISIBLE_DEVICES"))
    assert wanted == {"CPU": 2.0, "NPU": 2.0} and bundle(LAUNCH, None) == {"CPU": 2.0}
    large, small = {"CPU": 64.0, "NPU": 16.0}, {"CPU": 64.0}
    check_room(LAUNCH, wanted, [large, small, large])
    with pytest.raises(ValueError, match=r"needs 2 CPU, 2 NPU on each of 2 nodes.*64 CPU, 0 NPU"):
        check_room(LAUNCH, wanted, [large, small])


def test_settings_of_libraries_go_along_and_visible_devices_do_not() -> None:
    environ = {"HCCL_BUFFSIZE": "64", "ASCEND_RT_VISIBLE_DEVICES": "3", "HF_TOKEN": "x", "X": "y"}
    found = forwarded(environ)
    assert found["HCCL_BUFFSIZE"] == "64" and found["OMP_NUM_THREADS"] == "1"
    assert not {"ASCEND_RT_VISIBLE_DEVICES", "HF_TOKEN", "X"} & set(found)
    assert str(Path(__file__).parents[2]) in found["PYTHONPATH"]
    assert forwarded(environ | {"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "8"


def test_a_local_ray_has_a_place_for_every_actor(tmp_path: Path) -> None:
    run = make_run(tmp_path, "--reward-num-workers 3")
    config = replace(run.config, launch=replace(LAUNCH, ray_num_nodes=1))
    assert local_cpus(config, run.plan) == 2 + 3
    environment = replace(config.environment, rl_environment_ray_workers=2)
    assert local_cpus(replace(config, environment=environment), run.plan) == 2 + 3 + 2
    rewards = replace(config.rewards, reward_pool="process")
    assert local_cpus(replace(config, rewards=rewards), run.plan) == 2


# -- a rank ------------------------------------------------------------------------------------


class Told(BaseException):
    """What a watchdog was told to fail with; the process would end."""


def rank_before(stages: Sequence[Stage]) -> RankActor:
    def fail(error: BaseException) -> None:
        raise Told from error

    actor = RankActor(0)
    actor._job = cast(Any, SimpleNamespace(watchdog=SimpleNamespace(fail=fail)))
    actor._stages = iter(stages)
    assert actor._advance(0.0).stage == stages[0]
    return actor


def test_a_rank_does_what_it_is_told_and_says_what_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[object] = []
    monkeypatch.setattr(ray_worker, "end_job", left.append)
    actor = rank_before([ROLLOUT, TRAIN])
    assert actor.go_on(ROLLOUT).stage == TRAIN and not left
    assert actor.go_on(TRAIN).stage is None
    assert left == [actor._job], "the ranks leave together"
    assert repr(actor) == "rank 0"


def test_a_rank_refuses_another_stage_than_its_own() -> None:
    actor = rank_before([ROLLOUT, TRAIN])
    with pytest.raises(Told) as told:
        actor.go_on(TRAIN)
    assert "orders train in step 1 of 6 samples; this rank stands before rollout" in str(
        told.value.__cause__
    )
