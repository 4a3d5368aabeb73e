"""What people see of the tokens of a few samples: advantage, and trainer against engine."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from support.rl_run import PROMPTS, TableRun, make_run
from support.table_engine import first_table, response_of

from mindspeed_rl.generation.shown_rows import MOST_PIECES, training_row
from mindspeed_rl.samples.rollout_info import RolloutInfo, SampleKey
from mindspeed_rl.samples.shown_tokens import ShownToken, shown_samples

REWARDS: dict[int, float | None] = dict(enumerate((1.0, 0.0, 0.0, 1.0, 1.0, 0.0)))
UNIT = (1 / 3) / (math.sqrt(1 / 3) + 1e-4)
ADVANTAGES = [2 * UNIT, -UNIT, -UNIT, UNIT, UNIT, -2 * UNIT]


def updated(run: TableRun) -> list[RolloutInfo]:
    rollouts = run.generate()
    run.update(run.prepared(rollouts.samples))
    return rollouts.generated


@pytest.mark.parametrize("choice", ["on-policy", "recompute"])
@pytest.mark.parametrize("flags", ["", "--global-batch-size 3", "--micro-batch-size 2"])
def test_tokens_of_shown_samples_have_their_own_values(
    tmp_path: Path, choice: str, flags: str
) -> None:
    """Whatever micro-batch or optimizer step they are in, at the weights that sampled."""
    run = make_run(tmp_path, f"--log-rollouts 3 --old-logprob {choice} {flags}", REWARDS)
    run.engine.stale = 0.125
    generated = updated(run)
    found = run.parts.telemetry.tokens.gather()
    assert set(found) == {SampleKey(1, i) for i in (0, 2, 4)}
    for i in (0, 2, 4):
        begin = len(PROMPTS[generated[i].prompt_index].token_ids)
        values = found[SampleKey(1, i)]
        assert sorted(values) == list(range(begin, begin + len(response_of(i))))
        for place, token in enumerate(response_of(i)):
            value = values[begin + place]
            assert value.advantage == pytest.approx(ADVANTAGES[i])
            assert value.logprob == pytest.approx(float(first_table()[token]))


def test_the_next_step_forgets_them(tmp_path: Path) -> None:
    run = make_run(tmp_path, "--log-rollouts 3", REWARDS)
    updated(run)
    run.generate(2)
    assert run.parts.telemetry.tokens.gather() == {}


def test_without_rollouts_in_the_dump_nothing_is_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path, "--log-rollouts 0", REWARDS)
    updated(run)
    assert run.parts.telemetry.tokens.gather() == {}


def sample(num_tokens: int, number: int = 7) -> RolloutInfo:
    return RolloutInfo(
        *(number, 0, num_tokens, num_tokens, True, 0, 0, 0.5, (0.25, math.nan)),
        key=SampleKey(1, number),
    )


class Words:
    """Token 5 is ``<5>``."""

    def decode(self, ids: list[int]) -> str:
        return "".join(f"<{i}>" for i in ids)


def row(num_tokens: int, values: dict[int, ShownToken], mask: list[bool] | None = None) -> dict:
    ids = torch.arange(10, 10 + num_tokens)
    response = {"token_ids": ids, "rollout_logprobs": torch.full((num_tokens,), -1.0)}
    if mask is not None:
        response["loss_mask"] = torch.tensor(mask)
    made = training_row(
        sample(num_tokens), PROMPTS[0], response, values, ("math", "format"), 4, Words()
    )
    json.dumps(made)
    return made


def test_a_row_says_who_wrote_what_and_what_training_made_of_it() -> None:
    """An environment wrote the third token, which is not trained on."""
    begin = len(PROMPTS[0].token_ids)
    values = {begin: ShownToken(0.5, -1.25), begin + 1: ShownToken(1.5, -0.5)}
    values[begin + 3] = ShownToken(-0.5, -1.0)
    made = row(4, values, [True, True, False, True])
    assert made["turns"] == [
        {"by": "model", "text": "<10><11>"},
        {"by": "environment", "text": "<12>"},
        {"by": "model", "text": "<13>"},
    ]
    assert made["mismatch"] == [-0.25, 0.5, None, 0.0]
    assert made["pieces"] == ["<10>", "<11>", "<12>", "<13>"]
    assert made["advantage"] == 0.5 and (made["length"], made["read"]) == (3, 1)
    assert (made["sample_id"], made["group"], made["reward"]) == (7, 1, 0.5)
    assert made["prompt_text"] == Words().decode(list(PROMPTS[0].token_ids))


def test_a_sample_that_was_not_trained_on_has_no_advantage() -> None:
    made = row(3, {})
    assert made["advantage"] is None and "mismatch" not in made and "turns" not in made
    assert made["length"] == 3 and "read" not in made


def test_long_responses_have_the_first_tokens_one_by_one() -> None:
    begin = len(PROMPTS[0].token_ids)
    values = {begin + i: ShownToken(1.0, -1.0) for i in range(MOST_PIECES + 5)}
    made = row(MOST_PIECES + 5, values)
    assert len(made["mismatch"]) == len(made["pieces"]) == MOST_PIECES
    assert made["length"] == MOST_PIECES + 5


@pytest.mark.parametrize(("count", "places"), [(0, []), (1, [0]), (3, [0, 2, 4]), (9, range(6))])
def test_shown_samples_are_far_apart(count: int, places: list[int]) -> None:
    samples = [sample(1, i) for i in range(6)]
    assert [s.sample_id for s in shown_samples(samples, count)] == list(places)
