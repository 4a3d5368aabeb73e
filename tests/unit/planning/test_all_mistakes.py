"""All mistakes of a command line that can be found apart from each other are one error."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checked_runs import configured, write_inputs, write_model

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import PretrainRunConfig, RLRunConfig, ScoreRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.launch.job import ONE_RANK, plan_run, predict
from mindspeed_rl.planning.run_plan import plan_pretrain, plan_rl, plan_score

# A flag of each check, with a word that its line has.
RL = {
    "--unknwon": "unknown flag",
    "--num-layers 7": "model has 4",
    "--hidden-size 5": "model has 384",
    "--num-experts 8": "no experts",
    "--prompt-data none.jsonl": "no such file",
    "--eval-prompt-data nor.jsonl": "no such file",
    "--reward-function mth": "unknown",
    "--reward-url-timeout-s 3": "no effect",
    "--load nowhere": "no such directory",
    "--rl-default-top-p 0.9": "truncated",
    "--attention-dropout 0.1": "0 only",
    "--rl-routing-replay rollout": "no experts",
    "--moe-tp-extend-ep": "no experts",
    "--tensor-model-parallel-size 3": "world size 4",
    "--rollout-tp 3": "world size 4",
    "--vllm-model x": "not available",
    "--gae-lambda 0.5": "has no effect",
    "--rl-agent one.py": "FILE.py:FUNCTION",
    "--rl-endpoint-host 0.0.0.0": "every interface",
    "--profile-ranks 9 --profile": "--profile-ranks 9",
    "--seq-length 3": "--max-prompt-length",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    write_model(folder / "model", hidden_size=384)
    return folder


def lines_of(flags: str, folder: Path) -> tuple[str, ...]:
    words = f"--hf-checkpoint {folder}/model {flags}".split()
    parsed = parse(RLRunConfig, words, "test", keep_refused=True)
    with pytest.raises(UsageError) as found:
        plan_run(parsed, plan_rl, 4)
    return found.value.mistakes


def test_every_check_of_a_run_is_told_of_in_one_start(folder: Path) -> None:
    lines = lines_of(" ".join(RL), folder)
    for flags, word in RL.items():
        named = [line for line in lines if flags.split()[0] in line]
        assert any(word in line for line in named), (flags, lines)
    assert any("--train-iters is required" in line for line in lines)
    assert len(lines) == len(set(lines)) >= len(RL)


@pytest.mark.parametrize("flags", [f for f in RL if "host" not in f])
def test_a_mistake_is_told_alone_where_it_is_the_only_one(flags: str, folder: Path) -> None:
    """What another check says of the same command line would be a consequence, not a mistake."""
    good = f"--prompt-data {folder}/rl.jsonl --train-iters 2 --output-dir {folder}/out "
    good += "--max-prompt-length 8 --rollout-max-response-length 8 "
    (line,) = lines_of(f"{good} {flags}", folder)
    assert RL[flags] in line


def test_flags_without_effect_are_told_with_those_that_have_their_default(folder: Path) -> None:
    flags = "--critic-lr 1e-5 --gae-lambda 0.9 --rl-kl-estimator k3 --rl-gamma 1"
    ends = " has no effect with --rl-advantage-estimator grpo; it is read with "
    told = sorted(line.partition(ends)[0] for line in lines_of(flags, folder) if ends in line)
    assert told == ["--critic-lr 1e-05", "--gae-lambda 0.9", "--rl-gamma 1.0"]
    parsed = parse(RLRunConfig, ["--hf-checkpoint", "x", "--critic-lr", "1e-5"], "test")
    assert not parsed.refused  # alone it changes nothing, so a script may have it


def test_a_missing_critic_is_told_with_what_is_wrong_of_the_policy(folder: Path) -> None:
    flags = "--rl-preset ppo --critic-hf-checkpoint nowhere --num-layers 7 --train-iters 9"
    lines = lines_of(flags, folder)
    assert any("--critic-hf-checkpoint nowhere" in line for line in lines)
    assert any("--num-layers 7" in line for line in lines)


def test_supervised_runs_and_scores_tell_all_as_well(folder: Path) -> None:
    model = f"--hf-checkpoint {folder}/model --platform cpu"
    with pytest.raises(UsageError) as found:
        flags = f"{model} --sft-data none --hidden-size 5 --load nowhere --no-shuffle --profile "
        flags += "--stage pretrain --profile-ranks 9"
        plan_pretrain(configured(PretrainRunConfig, flags), 4)
    wanted = [
        "--no-shuffle",
        "--train-iters",
        "--profile-ranks",
        "--data-path",
        "--load",
        "--hidden",
    ]
    assert [word for word in wanted if not any(word in x for x in found.value.mistakes)] == []
    with pytest.raises(UsageError) as found:
        plan_score(configured(ScoreRunConfig, f"{model} --rollout-tp 3 --hidden-size 5"), 4)
    wanted = ["--tokens", "--output", "--rollout-tp", "--hidden-size"]
    assert [word for word in wanted if not any(word in x for x in found.value.mistakes)] == []


def test_a_dry_run_without_a_number_of_ranks_says_what_it_assumes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--hf-checkpoint {folder}/model --prompt-data x --train-iters 2 --rl-dry-run "
    flags += "--max-prompt-length 8 --rollout-max-response-length 8 --rl-dry-run-machine cpu "
    predict(parse(RLRunConfig, flags.split(), "test"), {})
    alone = capsys.readouterr().out
    assert alone.startswith(ONE_RANK)
    predict(parse(RLRunConfig, flags.split(), "test"), {"WORLD_SIZE": "1"})
    assert alone == f"{ONE_RANK}\n{capsys.readouterr().out}"
    for more, told in (("--rollout-tp 2", True), ("--hidden-size 5", False)):
        with pytest.raises(UsageError) as found:
            predict(parse(RLRunConfig, (flags + more).split(), "test"), {})
        assert (ONE_RANK in found.value.mistakes) is told
        assert any(more.split()[0] in line for line in found.value.mistakes)
    with pytest.raises(UsageError, match="WORLD_SIZE=two"):
        predict(parse(RLRunConfig, flags.split(), "test"), {"WORLD_SIZE": "two"})
