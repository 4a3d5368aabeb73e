"""The configuration of a replay: that of the run, which writes into a folder of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support.checked_runs import configured

from mindspeed_rl.command_line.replay_run import recorded_flags
from mindspeed_rl.config import RLRunConfig

RUN = (
    "--hf-checkpoint m --train-iters 9 --save out/save --save-interval 2 --output-dir out "
    "--tensorboard-dir tb --export-hf hf --eval-prompt-data e.jsonl --rl-eval-data a=b.jsonl "
    "--eval-interval 1 --rl-eval-samples 2 --rl-eval-temperature 0.5 --rl-prompts-per-eval 3 "
    "--wandb-project w --lr 1e-3 --lr-warmup-iters 2 --grpo-kl-beta 0.1 --bf16 "
    "--log-rollouts 7 --log-rollout-tokens --vllm-max-num-seqs 4 "
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
    same = RLRunConfig.__dataclass_fields__.keys() - changed
    assert all(getattr(found, name) == getattr(run, name) for name in same)


def test_the_first_step_starts_as_the_run_did() -> None:
    """From no checkpoint, or from the weights of one."""
    assert configured(RLRunConfig, RUN + "--replay 1 out").checkpoint.load == ""
    flags = RUN + "--load warm --finetune --replay"
    first, second = (configured(RLRunConfig, f"{flags} {n} out").checkpoint for n in (1, 2))
    assert (first.load, first.finetune) == ("warm", True)
    assert (second.load, second.finetune) == ("out/save", False)


def test_the_flags_of_a_record_are_those_that_may_change_numbers() -> None:
    found = recorded_flags(configured(RLRunConfig, RUN + "--replay 5 out"))
    assert found == {
        "--hf-checkpoint": "m", "--train-iters": "9", "--lr": "0.001", "--lr-warmup-iters": "2",
        "--bf16": "True", "--grpo-kl-beta": "0.1", "--vllm-max-num-seqs": "4",
    }  # fmt: skip
