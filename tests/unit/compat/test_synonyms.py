"""Names of other RL stacks: what an unknown flag is called here."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from mindspeed_rl.command_line.arguments import own_flags, parse
from mindspeed_rl.compat import synonyms as module
from mindspeed_rl.compat.foreign_flags import foreign_flags
from mindspeed_rl.compat.synonyms import synonyms
from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.core.errors import UsageError

OWN = {name for _, flags in own_flags(RLRunConfig) for flag in flags for name in flag.spellings}


def test_answers_name_flags_that_exist() -> None:
    named = {flag for answer in synonyms().values() for flag in re.findall(r"--[a-z0-9-]+", answer)}
    assert len(named) > 30
    assert named <= OWN


def test_no_name_has_two_answers() -> None:
    names = set(synonyms())
    assert not names & (OWN | set(foreign_flags()))
    file = Path(module.__file__).with_suffix(".toml")
    rows = tomllib.loads(file.read_text())["synonyms"]
    assert len(names) == sum(len(words.split()) for _, words in rows)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--learning-rate 1e-6", "--learning-rate of other stacks; it is --lr here"),
        ("--num_generations=8", "--num-generations of other stacks; it is --grpo-group-size here"),
        ("--lora-dropout 0.1", "adapters have no dropout"),
        ("--use-lora", "--use-lora of other stacks; it is --lora-rank here"),
        ("--deepspeed ds.json", "--deepspeed of other stacks; it has no counterpart, as Megatron"),
        ("--finetuning_type lora", "--finetuning-type of other stacks; it is --lora-rank here"),
        ("--enable_thinking false", "--chat-template-kwargs enable_thinking=false"),
        (
            "trainer.total_epochs=3",
            "written --flag value here; --total-epochs is --epochs here",
        ),
        ("a.b=3", "a.b=3 is an override as in verl; flags are written --flag value here"),
        ("actor_rollout_ref.rollout.n=8", "here; rollout.n is --grpo-group-size here"),
        ("+data.max_prompt_length=7", "written --flag value here; --max-prompt-length is a flag"),
        ("critic.optim.lr=1e-5", "written --flag value here; critic.optim.lr is --critic-lr here"),
        ("--rollout-n 8", "--rollout-n of other stacks; it is --grpo-group-size here"),
        ("--learning-rat 1e-6", "unknown flag --learning-rat; "),
    ],
)
def test_the_message_of_an_unknown_flag(typed: str, told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        parse(RLRunConfig, typed.split(), "mindspeed_rl.train_rl")


@pytest.mark.parametrize(
    "path", ["actor_rollout_ref.rollout.seed", "critic.lr", "trainer.no_such_thing"]
)
def test_an_override_without_a_counterpart_names_no_flag_of_something_else(path: str) -> None:
    with pytest.raises(UsageError) as found:
        parse(RLRunConfig, [f"{path}=3"], "mindspeed_rl.train_rl")
    assert str(found.value).endswith("flags are written --flag value here")


def test_overrides_behind_a_flag_with_several_values_are_not_its_values() -> None:
    words = "--reward-function math=0.9 actor_rollout_ref.rollout.n=8 algorithm.adv_estimator=grpo"
    with pytest.raises(UsageError) as found:
        parse(RLRunConfig, words.split(), "mindspeed_rl.train_rl")
    group, estimator = found.value.mistakes
    assert group.startswith("actor_rollout_ref.rollout.n=8 is an override as in verl")
    assert estimator.endswith("--adv-estimator is --rl-advantage-estimator here")
    shares = ("data.jsonl=0.7", "critic.parquet=0.3")
    words = f"--prompt-data {' '.join(shares)} --reward-function math my.rewards.py:data=0.1"
    assert parse(RLRunConfig, words.split(), "train_rl").config.prompts.prompt_data == shares


def test_a_folder_that_is_called_like_an_override_is_a_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--prompt-data", "a.jsonl=0.7", "data.v2=0.3"]
    with pytest.raises(UsageError, match=r"data\.v2=0\.3 is an override"):
        parse(RLRunConfig, words, "train_rl")
    (tmp_path / "data.v2").mkdir()
    assert parse(RLRunConfig, words, "train_rl").config.prompts.prompt_data == tuple(words[1:])


def test_what_a_published_script_says_of_thinking_is_what_happens() -> None:
    said = ("--enable-thinking true", "--enable-thinking none")
    words = [*" ".join(said).split(), "--lr", "1e-6"]
    assert parse(RLRunConfig, words, "x").ignored == said


def test_an_entry_names_only_flags_that_it_has() -> None:
    with pytest.raises(UsageError) as told:
        parse(PretrainRunConfig, ["--num-generations", "8", "--tp", "2"], "mindspeed_rl.pretrain")
    assert "--grpo-group-size" not in str(told.value)
    assert "it is --tensor-model-parallel-size here" in str(told.value)
