"""What a checkpoint restores beside weights, and sums over the tokens of a step, on two ranks.

One world of two context-parallel ranks with a policy and a critic; the tests look at its facts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file
from support.spawn import run_ranks

from mindspeed_rl.launch.bootstrap import World

pytestmark = pytest.mark.distributed

FLAGS = ("--context-parallel-size", "2", "--rl-advantage-estimator", "gae",
         "--make-vocab-size-divisible-by", "8", "--lr-warmup-iters", "4",
         "--grpo-kl-beta", "0.1")  # fmt: skip


@contextmanager
def counted_reads(sizes: list[int]) -> Iterator[None]:
    """Collect the bytes of weights that this rank reads from files."""
    from mindspeed_rl.model_files.reading import RowReader

    original = RowReader.read

    def noted(reader: RowReader, *args: Any) -> Any:
        values = original(reader, *args)
        sizes.append(values.nbytes)
        return values

    with mock.patch.object(RowReader, "read", noted):
        yield


def give_moments(engine: Any) -> None:
    """The optimizer of an engine as after two steps."""
    import torch

    from mindspeed_rl.trainer.optimizer import torch_optimizers

    for optimizer in torch_optimizers(engine.optimizer):
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            ones = torch.ones_like(param)
            optimizer.state[param] = {
                "step": torch.tensor(2.0), "exp_avg": 0.5 * ones, "exp_avg_sq": ones
            }  # fmt: skip


def moments(engine: Any) -> list[tuple[float, float]]:
    """Step and sum of the first moments of every parameter."""
    from mindspeed_rl.trainer.optimizer import torch_optimizers

    states = [s for o in torch_optimizers(engine.optimizer) for s in o.state.values()]
    return [(float(s["step"]), float(s["exp_avg"].sum())) for s in states]


def save_and_resume(world: World, model: str, folder: str) -> dict[str, Any]:
    """Rank function: a save after so many updates, and a load by new engines.

    The policy has other weights than at its start but no update yet, as in the warm-up of a critic;
    the critic has its moments.
    """
    import torch
    from support.training_worlds import start_job

    from mindspeed_rl.building.models import build_critic, build_engine, build_models
    from mindspeed_rl.config.training import CheckpointConfig
    from mindspeed_rl.trainer_state.checkpoint import load_checkpoint, save_checkpoint

    job = start_job(world, model, FLAGS)
    policy, critic = build_engine(job, "policy", 8), build_critic(job)
    assert critic is not None
    give_moments(critic)
    found = {"sum": float(policy.all_reduce_dp_cp(torch.tensor([1.0 + world.rank])))}
    policy.schedule.num_updates, critic.schedule.num_updates = 3, 2
    torch.manual_seed(100 + world.rank)
    drawn = torch.rand(5)
    torch.manual_seed(100 + world.rank)
    both = {"critic": critic}
    with torch.no_grad():
        for param in policy.named_parameters().values():
            param += 1.0
    policy.reload_master_weights()
    save_checkpoint(folder, 1, policy, {}, companions=both)
    saved = (moments(policy), moments(critic))
    read: list[int] = []
    with counted_reads(read):
        models = build_models(job)
    policy, critic, reference = models.policy, models.critic, models.reference
    assert critic is not None and reference is not None
    torch.manual_seed(7)
    load_checkpoint(folder, policy, CheckpointConfig(), {"critic": critic})
    again = torch.rand(5)
    start = build_engine(job, "reference", 0).named_parameters()
    kept = reference.named_parameters()
    return found | {
        "bytes_read": sum(read),
        "reference": [torch.equal(kept[name], param) for name, param in start.items()],
        "policy_moved": [
            torch.equal(param, start[name] + 1.0)
            for name, param in policy.named_parameters().items()
        ],
        "moments": (moments(policy), moments(critic)),
        "saved_moments": saved,
        "same_numbers": torch.equal(drawn, again),
        "updates": (policy.schedule.num_updates, critic.schedule.num_updates),
    }


@pytest.fixture(scope="module")
def facts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("resume")
    args = (str(tiny_model), str(folder / "save"))
    return run_ranks(save_and_resume, 2, work_dir=folder, args=args)


def test_sums_over_tokens_are_over_the_context_as_well(facts: list[dict[str, Any]]) -> None:
    """Ranks that share every sequence hold different tokens of it."""
    assert [rank["sum"] for rank in facts] == [3.0, 3.0]


def test_both_schedules_go_on(facts: list[dict[str, Any]]) -> None:
    """That of the critic is its own: it makes updates while the policy waits, and the reverse."""
    assert [rank["updates"] for rank in facts] == [(3, 2), (3, 2)]


def test_moments_go_on_from_any_update(facts: list[dict[str, Any]]) -> None:
    """Also from before the first, whose step of 0 megatron-core does not write."""
    for rank in facts:
        policy, critic = rank["moments"]
        assert (policy, critic) == rank["saved_moments"]
        assert set(policy) == {(0.0, 0.0)}
        assert {step for step, _ in critic} == {2.0} and all(total > 0 for _, total in critic)


def test_random_numbers_go_on(facts: list[dict[str, Any]]) -> None:
    assert all(rank["same_numbers"] for rank in facts)


def test_the_reference_is_that_of_the_files(facts: list[dict[str, Any]], tiny_model: Path) -> None:
    """To the bit, in a resumed run as well, and without a read of its own.

    The ranks of the node read every tensor once for the policy and once for the critic, which has
    another head; the reference has its weights from the policy.
    """
    for rank in facts:
        assert rank["reference"] and all(rank["reference"])
        assert all(rank["policy_moved"])
    sizes = {
        name: tensor.nbytes for name, tensor in load_file(tiny_model / "model.safetensors").items()
    }
    head = sizes["lm_head.weight"]
    assert sum(rank["bytes_read"] for rank in facts) == 2 * sum(sizes.values()) - head
