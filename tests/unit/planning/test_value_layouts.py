"""Critic and reward model in a configuration: accepted, or refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.checked_runs import CLASSIFIER, plan_of_models

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.memory import CRITIC_OWNERS, MemoryOwner, MemoryPhase, OffloadMode
from mindspeed_rl.planning.prediction import MemoryPrediction
from mindspeed_rl.planning.run_plan import RLPlan

GAE = "--rl-advantage-estimator gae"


def plan_of(folder: Path, flags: str, **changes: dict[str, Any]) -> tuple[RLRunConfig, RLPlan]:
    """A run with these models, or others in place of some."""
    return plan_of_models(
        folder, flags, {"policy": {"tie_word_embeddings": True}, "scorer": CLASSIFIER} | changes
    )


def test_a_critic_has_the_layout_of_the_policy_and_one_output(tmp_path: Path) -> None:
    _, plan = plan_of(tmp_path, GAE)
    assert plan.critic is not None and plan.reward_model is None
    assert plan.critic.parallel == plan.parallel
    shapes = plan.critic.hf_shapes
    assert shapes["score.weight"] == (1, 48) and "lm_head.weight" not in shapes
    first, last = plan.critic.local_shapes(0), plan.critic.local_shapes(3)
    assert "output_layer.weight" not in first and last["output_layer.weight"] == (1, 48)
    # the policy's tied head keeps a replica of the embedding on its last stage
    assert plan.megatron.local_shapes(3)["output_layer.weight"] != (1, 48)


def test_without_the_estimator_there_is_none(tmp_path: Path) -> None:
    assert plan_of(tmp_path, "")[1].critic is None


def test_models_of_other_sizes_are_allowed(tmp_path: Path) -> None:
    small = CLASSIFIER | {"num_hidden_layers": 2, "hidden_size": 24}
    flags = f"{GAE} --critic-hf-checkpoint DIR/small --reward-model-hf-checkpoint DIR/scorer"
    _, plan = plan_of(tmp_path, flags, small=small)
    assert plan.critic is not None and plan.reward_model is not None
    assert plan.critic.spec.num_layers == 2 and plan.reward_model.spec.num_layers == 4
    assert plan.reward_model.spec.value_head and not plan.reward_model.spec.tie_embeddings


@pytest.mark.parametrize(
    ("flags", "changes", "told"),
    [
        (f"{GAE} --critic-hf-checkpoint DIR/other", {"vocab_size": 300},
         "--critic-hf-checkpoint .*: a vocabulary of 300, the policy has 307"),
        (f"{GAE} --critic-hf-checkpoint DIR/other", {"id2label": {"0": "a", "1": "b"}},
         "2 labels .*; a value is one number, so allowed: 1"),
        ("--reward-model-hf-checkpoint DIR/other", {"num_hidden_layers": 3},
         "--pipeline-model-parallel-size 2"),
        ("--reward-model-hf-checkpoint DIR/nowhere", {},
         "--reward-model-hf-checkpoint .*nowhere: .*config.json is missing"),
        (f"{GAE} --critic-export-hf DIR/out/hf", {},
         "--critic-export-hf .* is where the policy is exported"),
        (f"{GAE} --critic-export-hf DIR/policy", {}, "--critic-export-hf .* is --hf-checkpoint"),
        ("--rl-routing-replay trainer", {}, "--rl-routing-replay trainer: .* no experts"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused(
    tmp_path: Path, flags: str, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        plan_of(tmp_path, flags, other=CLASSIFIER | changes)


def test_a_policy_is_no_classifier(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Qwen2ForSequenceClassification.* not supported"):
        plan_of(tmp_path, "", policy=CLASSIFIER)


OTHERS = (*CRITIC_OWNERS, MemoryOwner.REWARD_MODEL)


def test_memory_of_the_other_models(tmp_path: Path) -> None:
    """What stays in each mode, and that an update of the critic is a moment of its own."""
    config, plan = plan_of(tmp_path, f"{GAE} --reward-model-hf-checkpoint DIR/scorer")
    stays = {
        OffloadMode.NONE: set(OTHERS),
        OffloadMode.OPTIMIZER: {MemoryOwner.CRITIC, MemoryOwner.REWARD_MODEL},
        OffloadMode.ALL: set(),
    }
    for mode, expected in stays.items():
        table = MemoryPrediction(config, plan, offload=mode).rank_table(0)
        for phase in (MemoryPhase.TRAIN_IDLE, MemoryPhase.SYNC, MemoryPhase.ROLLOUT):
            assert set(table[phase]) & set(OTHERS) == expected, (mode, phase)
        assert set(table[MemoryPhase.LOAD]) >= set(OTHERS) - {MemoryOwner.CRITIC_OPTIMIZER}
        assert table[MemoryPhase.TRAIN].keys() >= set(CRITIC_OWNERS), "the critic's update"
    plain_config, plain = plan_of(tmp_path, "")
    without = MemoryPrediction(plain_config, plain).rank_table(0)
    assert all(not set(t) & set(OTHERS) for t in without.values())
