"""What build_components gives the parts of a run: temperatures, horizons, rates, order of data.

Everything that needs megatron-core, vLLM or files is replaced; engines only note their arguments.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.rl_run import NUM_PROMPTS, PROMPTS, Characters, make_run
from support.table_engine import TableEngine

from mindspeed_rl.building import models as build_models
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.rl import build
from mindspeed_rl.rl.components import Components, RunState

FLAGS = (
    "--rl-advantage-estimator gae --grpo-kl-beta 0.05 --rl-default-temperature 0.7 --train-iters 5 "
    "--critic-warmup-steps 2 --global-batch-size 3 --lr 2e-5 --min-lr 1e-6 --critic-lr 3e-4 "
)


REPLACED = (
    "initialize_parallel", "check_row_rewards", "make_reward_pool", "open_ledger", "watched",
    "build_weight_sync", "open_logger", "_freeze_objects",
)  # fmt: skip


class Engines:
    """The training engines that a run has built, by role: their arguments."""

    def __init__(self) -> None:
        self.built: dict[str, dict[str, Any]] = {}

    def __call__(self, role: str, **arguments: Any) -> Any:
        assert role not in self.built
        self.built[role] = {"temperature": 1.0, **arguments}
        weights = {"weight": torch.full((3,), math.nan)}
        written: list[None] = []
        return SimpleNamespace(
            named_parameters=lambda: weights,
            reload_master_weights=lambda: written.append(None),
            written=written,
        )


def nothing(*_: Any, **__: Any) -> None:
    return None


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    """Stand-ins for what a run is built of."""
    found = Engines()
    monkeypatch.setattr(build_models, "TrainEngine", found)
    for name in ("check_shapes", "kept_mtp", "load_weights", "load_value_model"):
        monkeypatch.setattr(build_models, name, nothing)
    for name in REPLACED:
        monkeypatch.setattr(build, name, nothing)
    monkeypatch.setattr(build, "with_installed_engine", lambda job: job)
    monkeypatch.setattr(build, "load_tokenizer", lambda config: Characters())
    monkeypatch.setattr(build, "load_data", lambda *_, **__: (PROMPTS, {}))
    monkeypatch.setattr(build, "build_rollout_engine", lambda *_: TableEngine())
    memory, phases = SimpleNamespace(leave_all=nothing), SimpleNamespace(to_train=nothing)
    monkeypatch.setattr(build, "share_memory", lambda *_: memory)
    monkeypatch.setattr(build, "DeviceScheduler", lambda *_: phases)
    return found


def built(folder: Path, flags: str = "") -> Components:
    folder.mkdir(exist_ok=True)
    return build.build_components(make_run(folder, FLAGS + flags).parts.job)


def test_policy_and_reference_are_of_the_temperature_of_the_rollouts(
    tmp_path: Path, engines: Engines
) -> None:
    """Ratios and the KL are between distributions at the temperature that sampled."""
    run = built(tmp_path)
    assert run.rollouts.settings(run.config.rl.rl_default_temperature).temperature == 0.7
    assert engines.built["policy"]["temperature"] == 0.7
    assert engines.built["reference"]["temperature"] == 0.7


def test_schedules_end_with_the_updates_of_the_run(tmp_path: Path, engines: Engines) -> None:
    """Two updates a step: five steps for the critic, two less for the policy."""
    assert built(tmp_path).plan.batch.updates == 2
    assert engines.built["critic"]["num_updates"] == 5 * 2
    assert engines.built["policy"]["num_updates"] == (5 - 2) * 2


def test_the_critic_has_a_learning_rate_of_its_own(tmp_path: Path, engines: Engines) -> None:
    built(tmp_path)
    rates = {role: engines.built[role]["train"] for role in ("policy", "critic")}
    assert (rates["policy"].lr, rates["policy"].min_lr) == (2e-5, 1e-6)
    assert (rates["critic"].lr, rates["critic"].min_lr) == (3e-4, 1e-6)


@pytest.mark.usefixtures("engines")
def test_the_seed_decides_the_order_of_the_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def order(seed: int, folder: str) -> list[int]:
        monkeypatch.setattr(build_models, "TrainEngine", Engines())  # each run builds its own
        run = built(tmp_path / folder, f"--seed {seed}")
        return RunState.at_start(run.config, run.data.train).sampler.next(NUM_PROMPTS)

    first, again, other = order(1, "a"), order(1, "b"), order(2, "c")
    assert first == again != other
    assert sorted(first) == sorted(other) == list(range(NUM_PROMPTS))


def test_without_a_kl_there_is_no_reference(tmp_path: Path, engines: Engines) -> None:
    run = built(tmp_path, "--grpo-kl-beta 0")
    assert run.models.reference is None and "reference" not in engines.built


def test_the_reference_has_the_weights_that_were_read_for_the_policy(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are read once; a model that was written to says so, or its host copy is old."""
    reads: list[Any] = []

    def read(job: Any, layout: Any, weights: dict[str, torch.Tensor], **_: Any) -> None:
        reads.append(weights)
        weights["weight"].copy_(torch.tensor([0.5, -2.0, 3.0]))

    monkeypatch.setattr(build_models, "load_weights", read)
    models: Any = built(tmp_path).models
    assert len(reads) == 1 and reads[0] is models.policy.named_parameters()
    found = models.reference.named_parameters()["weight"]
    assert found.tolist() == [0.5, -2.0, 3.0] and found is not reads[0]["weight"]
    assert len(models.reference.written) == 1


@pytest.mark.parametrize("local_rank", [0, 1])
def test_the_data_is_checked_once_per_node(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch, local_rank: int
) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(build, "check_data", lambda config, data: checked.append(data.train))
    job = make_run(tmp_path, FLAGS).parts.job
    build.build_components(replace(job, world=replace(job.world, local_rank=local_rank)))
    assert checked == ([PROMPTS] if local_rank == 0 else [])


@pytest.mark.parametrize(
    ("epochs", "prompts", "steps"), [(1.0, 64, 4), (2.5, 64, 10), (1.0, 65, 5), (0.01, 64, 1)]
)
def test_epochs_are_counted_in_steps(
    tmp_path: Path, epochs: float, prompts: int, steps: int
) -> None:
    """The steps are those of the whole run: of its schedule, its saves and its checks."""
    job = make_run(tmp_path, FLAGS).parts.job
    config = job.config
    config = replace(
        config,
        rl=replace(config.rl, grpo_prompts_per_step=16),
        train=replace(config.train, train_iters=0),
        prompts=replace(config.prompts, epochs=epochs),
        critic=replace(config.critic, critic_warmup_steps=0),
    )
    counted = build.with_counted_steps(replace(job, config=config), prompts).config
    assert counted.train.train_iters == steps
    late = replace(config, critic=replace(config.critic, critic_warmup_steps=steps))
    with pytest.raises(UsageError, match=f"--critic-warmup-steps {steps}: the run has .* {steps}"):
        build.with_counted_steps(replace(job, config=late), prompts)
    given = replace(job, config=replace(late, prompts=replace(late.prompts, epochs=0.0)))
    assert build.with_counted_steps(given, prompts) is given


def test_ranks_with_other_prompts_are_refused() -> None:
    """A rank plans and trains with its own copy of them."""
    same = {"--prompt-data": "a", "--eval-prompt-data": "b"}
    build.refuse_different_prompts([same, same])
    others = [same, same | {"--eval-prompt-data": "c"}, same, same | {"--eval-prompt-data": "d"}]
    with pytest.raises(ValueError, match=r"^--eval-prompt-data: the prompts of ranks 1, 3 differ"):
        build.refuse_different_prompts(others)
