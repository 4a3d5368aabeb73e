"""The configuration of a replay: that of the run, which writes into a folder of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.checked_runs import configured

from mindspeed_rl.command_line.replay_run import recorded_flags
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.launch import LaunchConfig
from mindspeed_rl.config.training import CheckpointConfig
from mindspeed_rl.core.errors import UsageError

RUN = (
    "--hf-checkpoint m --train-iters 9 --save out/save --save-interval 2 --output-dir out "
    "--tensorboard-dir tb --export-hf hf --eval-prompt-data e.jsonl --rl-eval-data a=b.jsonl "
    "--eval-interval 1 --rl-eval-samples 2 --rl-eval-temperature 0.5 --rl-prompts-per-eval 3 "
    "--wandb-project w --lr 1e-3 --lr-warmup-iters 2 --grpo-kl-beta 0.1 --bf16 "
    "--log-rollouts 7 --log-rollout-tokens --vllm-max-num-seqs 4 --rl-alarms grad-norm=skip "
)
WEEKS = (
    "--save-interval-minutes 30 --save-total-limit 3 --save-best-metric eval/accuracy "
    "--save-best-direction min --async-save --exit-signal-handler --exit-duration-in-mins 1430 "
    "--exit-interval 4 --peer-checkpoint-steps 2 --export-hf-interval 2 --export-hf-limit 3 "
    "--no-load-optim --no-load-rng --allow-changed-data "
)
IN_RAY = (
    "--orchestrator ray --ray-ranks-per-node 2 --ray-num-nodes 3 --max-restarts 5 "
    "--restart-backoff-s 4 --elastic-min-nodes 2 --elastic-wait-s 6 "
)


def test_a_replay_keeps_what_its_numbers_depend_on_and_writes_nothing_else() -> None:
    run = configured(RLRunConfig, RUN)
    found = configured(RLRunConfig, RUN + "--replay 5 out")
    assert (found.replay.step, found.replay.run_folder) == (5, Path("out"))
    assert found.logging.output_dir == str(found.replay.folder) == "out/replay/step_0000005"
    assert found.checkpoint.load == "out/save" and not found.checkpoint.save
    assert not (found.checkpoint.export_hf or found.logging.tensorboard_dir)
    assert not found.prompts.eval_files and not found.trackers.trackers("")
    assert found.train == run.train, "the schedule has the length of the run"
    defaults = type(run.prompts)()
    evaluation = ("eval_prompt_data", "rl_eval_data", "eval_interval", "rl_prompts_per_eval",
                  "rl_eval_samples", "rl_eval_temperature")  # fmt: skip
    assert found.prompts == replace(run.prompts, **{n: getattr(defaults, n) for n in evaluation})
    assert (found.logging.log_rollouts, found.logging.log_rollout_tokens) == (7, True)
    changed = {"replay", "checkpoint", "logging", "prompts", "trackers"}
    assert found.alarms.rl_alarms == run.alarms.rl_alarms == ("grad-norm=skip",)
    same = RLRunConfig.__dataclass_fields__.keys() - changed
    assert all(getattr(found, name) == getattr(run, name) for name in same)


def test_a_run_of_weeks_is_replayed_by_its_command_line() -> None:
    """No flag of saves stays, which would have no effect; checkpoints of the run are whole."""
    found = configured(RLRunConfig, RUN + WEEKS + "--load base --replay 5 out")
    assert found.checkpoint == CheckpointConfig(load="out/save")
    left_out = configured(RLRunConfig, RUN + "--no-save-optim --no-save-rng --replay 5 out")
    expected = CheckpointConfig(load="out/save", no_load_optim=True, no_load_rng=True)
    assert left_out.checkpoint == expected
    back = RUN.replace("grad-norm=skip", "grad-norm=skip loss-spike:5=rollback")
    assert configured(RLRunConfig, back).alarms.rl_alarms[1:] == ("loss-spike:5=rollback",)
    assert configured(RLRunConfig, back + "--replay 5 out").alarms.rl_alarms == ("grad-norm=skip",)


def test_passes_of_a_replay_come_after_its_rollouts() -> None:
    """Their results are the same, and in the tail a rank has as many as the clock allows."""
    passes = "--reference-pass tail --old-logprob recompute --old-logprob-pass tail "
    assert configured(RLRunConfig, RUN + passes).rl.tail_passes == ["old", "reference"]
    found = configured(RLRunConfig, RUN + passes + "--replay 5 out").rl
    assert found.passes == {"old": "single", "reference": "single"}
    assert set(configured(RLRunConfig, RUN + "--replay 5 out").rl.passes.values()) == {"packed"}


def test_a_replay_is_not_started_again() -> None:
    """Numbers that differ once would differ again."""
    launch = configured(RLRunConfig, RUN + IN_RAY).launch
    assert (launch.max_restarts, launch.elastic_min_nodes) == (5, 2)
    found = configured(RLRunConfig, RUN + IN_RAY + "--replay 5 out").launch
    kept = LaunchConfig(orchestrator="ray", ray_ranks_per_node=2, ray_num_nodes=3)
    assert found == kept


def test_the_first_step_starts_as_the_run_did() -> None:
    """From no checkpoint, or from the weights of one; not from those that it has saved since."""
    assert configured(RLRunConfig, RUN + "--replay 1 out").checkpoint.load == ""
    own = configured(RLRunConfig, RUN + "--load ./out/save --no-load-rng --replay 1 out")
    assert own.checkpoint == CheckpointConfig(no_load_rng=True)
    converted = configured(RLRunConfig, RUN + "--load warm --no-load-optim --replay 1 out")
    assert converted.checkpoint == CheckpointConfig(load="warm", no_load_optim=True)
    flags = RUN + "--load warm --finetune --replay"
    first, second = (configured(RLRunConfig, f"{flags} {n} out").checkpoint for n in (1, 2))
    assert (first.load, first.finetune) == ("warm", True)
    assert (second.load, second.finetune) == ("out/save", False)
    unsaved = flags.replace("--save out/save --save-interval 2 ", "")
    assert configured(RLRunConfig, f"{unsaved} 1 out").checkpoint.finetune
    with pytest.raises(UsageError, match=r"--replay 2 out: .* --load warm \(--finetune\)"):
        configured(RLRunConfig, f"{unsaved} 2 out")


def test_the_flags_of_a_record_are_those_that_may_change_numbers() -> None:
    found = recorded_flags(configured(RLRunConfig, RUN + "--replay 5 out"))
    assert found == {
        "--hf-checkpoint": "m", "--train-iters": "9", "--lr": "0.001", "--lr-warmup-iters": "2",
        "--bf16": "True", "--grpo-kl-beta": "0.1", "--vllm-max-num-seqs": "4",
        "--rl-alarms": "grad-norm=skip",
    }  # fmt: skip
