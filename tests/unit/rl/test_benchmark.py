"""A throughput run: what it makes of the flags of another, its prompts, rewards and table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.rl_run import HF_CONFIG, make_run

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.rollout import RolloutBalanceConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.memory import MemoryPhase
from mindspeed_rl.data.random_prompts import random_prompts
from mindspeed_rl.metrics.throughput_table import benchmark_lines
from mindspeed_rl.planning.findings import find_out
from mindspeed_rl.planning.prediction import MemoryPrediction
from mindspeed_rl.planning.run_plan import plan_rl
from mindspeed_rl.rewards.drawn import DrawnRewards
from mindspeed_rl.rewards.types import RewardRequest

SCRIPT = (
    "--prompt-data gone.jsonl --eval-prompt-data gone.jsonl --eval-interval 5 --rl-eval-samples 4 "
    "--rl-eval-temperature 0.7 --seq-length 16 --reward-function code --reward-code-memory-gb 2 "
    "--grpo-filter-groups-with-same-reward --rl-overlong-filtering --save gone --save-interval 2 "
    "--rl-max-logprob-diff 0.5 --train-iters 3 --grpo-prompts-per-step 4 --grpo-group-size 2 "
    "--log-rollouts 2 --log-rollout-tokens"
)


def config_of(folder: Path, flags: str) -> RLRunConfig:
    """Of a folder with config.json and a tokenizer, without weights."""
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    (folder / "tokenizer.json").touch()
    words = f"{SCRIPT} --hf-checkpoint {folder} --output-dir {folder}/out {flags}".split()
    return parse(RLRunConfig, words, "test").config


def test_any_script_without_weights_and_data_is_planned(tmp_path: Path) -> None:
    by_length = (
        "--prompt-order by-length --response-length-cap-factor 2 --response-length-cap-floor 4"
    )
    config = config_of(tmp_path, f"--rl-benchmark-lengths 24 9 {by_length}")
    assert config.balance == RolloutBalanceConfig()
    plan = plan_rl(config, 2)
    assert plan.max_model_len == 33
    assert not config.prompts.prompt_data and not config.prompts.eval_files
    assert not config.checkpoint.save and not config.sampling.rl_overlong_filtering
    assert config.rl.rl_max_logprob_diff == 0 and config.logging.log_rollouts == 0
    packing = find_out(config, 2).packing
    assert packing.mean_length == 33
    data = tmp_path / "rows.jsonl"
    data.touch()
    real = config_of(tmp_path, f"--prompt-data {data} --eval-prompt-data {data}")
    with pytest.raises(UsageError, match="--hf-checkpoint"):
        plan_rl(real, 2)


@pytest.mark.parametrize("lengths", ["24", "24 9 3"])
def test_two_lengths_are_asked_for(tmp_path: Path, lengths: str) -> None:
    with pytest.raises(UsageError, match="--rl-benchmark-lengths"):
        config_of(tmp_path, f"--rl-benchmark-lengths {lengths}")


def test_prompts_have_one_length_and_the_seed_decides_them() -> None:
    prompts = random_prompts(5, 7, 300, seed=3)
    assert len(prompts) == 5
    assert {len(p.token_ids) for p in prompts} == {7} and set(prompts.num_tokens()) == {7}
    assert all(0 <= token < 300 for p in prompts for token in p.token_ids)
    assert len({p.token_ids for p in prompts}) == 5
    same, other = (random_prompts(5, 7, 300, seed=seed) for seed in (3, 4))
    assert prompts.fingerprint == same.fingerprint != other.fingerprint
    assert prompts[2] == same[2]


def rewards_of(seed: int, sample_ids: Sequence[int], passes: int = 1) -> list[float]:
    pool, found = DrawnRewards(seed), list[float]()
    for _ in range(passes):
        with pool.scoring() as scoring:
            for i in sample_ids:
                scoring.add(RewardRequest(i, "", "", "", "length", 1))
            assert scoring.num_done == len(sample_ids)
            found = [result.reward or 0.0 for result in scoring.finish()]
    return found


def test_rewards_depend_on_seed_pass_and_sample_and_not_on_who_draws_them() -> None:
    everything = rewards_of(3, range(64))
    assert len(set(everything)) == 64 and 0 <= min(everything) < max(everything) < 1
    assert abs(sum(everything) / 64 - 0.5) < 0.15
    assert rewards_of(3, [40, 7]) == [everything[40], everything[7]]
    assert rewards_of(3, [7], passes=2) != [everything[7]] != rewards_of(4, [7])


def test_the_table_leaves_the_first_step_out_of_means_but_not_of_peaks(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    step = {
        "time/step_s": 4.0, "time/generate_s": 3.0, "time_max/generate_s": 3.5,
        "throughput/tokens_per_s": 10.0, "throughput/tokens_per_s_per_device": 5.0,
        "memory/generate_peak_bytes": 2.0**30, "memory/train_used_bytes": 2.0**30,
        "memory/train_owned_bytes": 2.0**29,
    }  # fmt: skip
    first = step | {"time/step_s": 100.0, "memory/generate_peak_bytes": 3 * 2.0**30}
    prediction = MemoryPrediction(run.config, run.parts.plan)
    peaks = prediction.peaks([0])
    assert peaks[MemoryPhase.TRAIN] == sum(prediction.rank_table(0)[MemoryPhase.TRAIN].values())
    # As many tokens in 6 seconds as in 4: 80 in 10.
    slower = {"throughput/tokens_per_s": 20 / 3, "throughput/tokens_per_s_per_device": 10 / 3}
    lines = list(benchmark_lines([first, step, step | slower | {"time/step_s": 6.0}], peaks))
    assert "steps 2 to 3" in lines[0]
    words = [line.split() for line in lines]
    assert ["generate", "3.000", "60.0%", "3.500"] in words
    assert ["step", "5.000"] in words
    assert ["step", "response", "8.0", "4.0"] in words
    (memory,) = (
        row for row in words if row[0] == "rollout" and len(row) == 4 and row[1] == "3.000"
    )
    assert memory[3] == "2.500"
