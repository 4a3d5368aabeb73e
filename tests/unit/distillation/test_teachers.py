"""Which sample has which teacher, what teachers add to micro-batches, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.checked_runs import configured

from mindspeed_rl.algorithms.distillation import ONLY, DistillationSettings
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.types import Prompt, TrainSample
from mindspeed_rl.distillation.heads import OWNER, STATES
from mindspeed_rl.distillation.teachers import (
    check_rows,
    check_tokenizer,
    teachers_of_samples,
    with_teachers,
)
from mindspeed_rl.flag_checks.algorithms import check_algorithms
from mindspeed_rl.samples.packing import MicroBatch, pack
from mindspeed_rl.samples.rollout_info import RolloutInfo

LENGTHS = (3, 1, 2)  # trained tokens of samples 10, 11, 12


class Teacher:
    """Says the same number of every token; its states are rows of that number."""

    def __init__(self, number: float, hidden_size: int) -> None:
        self.number, self.spec = number, SimpleNamespace(hidden_size=hidden_size)
        self.full = False

    def outputs(self, batches: Sequence[MicroBatch]) -> list[tuple[torch.Tensor, ...]]:
        width = (self.spec.hidden_size,) if self.full else ()
        return [(torch.full((b.sequence_of.numel(), *width), self.number),) for b in batches]


def batches() -> list[MicroBatch]:
    samples = [
        TrainSample(10 + i, torch.arange(5, 7 + length), 2) for i, length in enumerate(LENGTHS)
    ]
    return [pack(samples[:2], 16), pack(samples[2:], 16)]


def teachers() -> dict[str, Any]:
    return {"math": Teacher(-1.5, 4), "code": Teacher(-2.5, 6)}


OF_SAMPLE = {10: "math", 12: "code"}  # 11 has none


def test_every_token_has_the_log_prob_of_its_own_teacher() -> None:
    first, second = with_teachers(teachers(), OF_SAMPLE, False, batches())
    found = first.column("teacher_logprobs")
    assert found[:3].tolist() == [-1.5] * 3 and found[3:].isnan().all()
    assert second.column("teacher_logprobs").tolist() == [-2.5] * 2


def test_states_are_as_wide_as_the_widest_teacher() -> None:
    """Those of a narrower one fill the front of a row; a token without teacher has number -1."""
    given = teachers()
    for teacher in given.values():
        teacher.full = True
    first, second = with_teachers(given, OF_SAMPLE, True, batches())
    assert first.column(OWNER).tolist() == [0, 0, 0, -1]
    assert second.column(OWNER).tolist() == [1, 1]
    rows = first.column(STATES)
    assert rows.shape == (4, 6)
    assert rows[:3, :4].eq(-1.5).all() and rows[:3, 4:].eq(0).all() and rows[3].eq(0).all()
    assert second.column(STATES).eq(-2.5).all()
    assert "teacher_logprobs" not in first.columns


def test_micro_batches_off_the_last_stage_stay_as_they_are() -> None:
    class Earlier(Teacher):
        def outputs(self, batches: Sequence[MicroBatch]) -> Any:
            return [None for _ in batches]

    given = batches()
    assert with_teachers({ONLY: cast(Any, Earlier(0.0, 4))}, {}, False, given) == given


class Rows(list[Prompt]):
    """Prompts of a data set."""

    source = "rows.jsonl"

    def questions(self) -> Rows:
        return self


def rows(*metadata: Mapping[str, Any]) -> Any:
    return Rows(Prompt(i, (5,), "q", "a", metadata=m) for i, m in enumerate(metadata))


def test_the_row_of_a_sample_names_its_teacher() -> None:
    prompts = rows({"from": "math"}, {}, {"from": "code"})
    samples = [
        cast(RolloutInfo, SimpleNamespace(sample_id=10 + i, prompt_index=i)) for i in range(3)
    ]
    assert teachers_of_samples(samples, prompts, ["math", "code"], "from") == OF_SAMPLE
    assert teachers_of_samples(samples, prompts, [ONLY], "from") == dict.fromkeys((10, 11, 12), "")


def test_rows_are_counted_by_teacher() -> None:
    prompts = rows({"from": "math"}, {}, {"from": "code"}, {"from": "code"})
    told = check_rows(prompts, ["math", "code"], "from")
    assert told == "teachers: math for 1 rows, code for 2 rows, none for 1 rows"
    assert check_rows(prompts, [ONLY], "from") == "teachers: one teacher for 4 rows"


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"from": "law"}, "1 rows have the from 'law', and --teacher-hf-checkpoint names math, "
         "code; add that teacher"),
        ({"from": "math"}, "no row of --prompt-data rows.jsonl has from = 'code'"),
    ],
)  # fmt: skip
def test_rows_and_teachers_must_fit(metadata: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        check_rows(rows(metadata), ["math", "code"], "from")


def test_a_teacher_of_another_tokenizer_is_refused() -> None:
    def tokenizer(**vocabulary: int) -> Any:
        return SimpleNamespace(get_vocab=lambda: vocabulary)

    policy = tokenizer(a=0, b=1)
    check_tokenizer(policy, tokenizer(a=0, b=1, c=2), "/teacher")
    told = "/teacher: its tokenizer is another one .* token 'b' is 1 in the policy's and {} in"
    with pytest.raises(UsageError, match=told.format(2)):
        check_tokenizer(policy, tokenizer(a=0, b=2), "/teacher")
    with pytest.raises(UsageError, match=told.format("missing")):
        check_tokenizer(policy, tokenizer(a=0), "/teacher")


def test_names_of_teachers() -> None:
    assert DistillationSettings(("/one",)).teachers == {ONLY: "/one"}
    assert DistillationSettings(("m=/one", "c=/t=w")).teachers == {"m": "/one", "c": "/t=w"}
    assert DistillationSettings(("m=/one",)).teachers == {"m": "/one"}
    for given, told in (
        (("/one", "m=/two"), "/one has no name"),
        (("m=/one", "m=/two"), "m=/two is the second one of name m"),
    ):
        with pytest.raises(UsageError, match=told):
            _ = DistillationSettings(given).teachers


def test_the_weight_is_in_the_advantage_or_in_the_loss() -> None:
    given = ("/one",)
    sampled = DistillationSettings(given, teacher_weight=0.5)
    full = DistillationSettings(given, teacher_weight=0.5, teacher_kl="full")
    assert (sampled.sampled_weight, sampled.full_weight) == (0.5, 0.0)
    assert (full.sampled_weight, full.full_weight) == (0.0, 0.5)
    nobody = DistillationSettings(teacher_weight=0.5)
    assert (nobody.sampled_weight, nobody.full_weight) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--rl-advantage-estimator none", "nothing would be learned without --teacher-hf-checkpoi"),
        ("--teacher-hf-checkpoint t --rl-policy-loss clip_cov", "--rl-policy-loss clip_cov: choos"),
        ("--teacher-weight 0.5", "--teacher-weight 0.5 has no effect without --teacher-hf-checkp"),
        ("--teacher-kl full", "--teacher-kl full has no effect without --teacher-hf-checkpoint"),
    ],
)
def test_flags_that_contradict_each_other(flags: str, told: str) -> None:
    config = configured(RLRunConfig, "--hf-checkpoint m --prompt-data d --train-iters 2 " + flags)
    with pytest.raises(UsageError, match=told):
        check_algorithms(config)
