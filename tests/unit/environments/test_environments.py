"""Conversations of several turns: whose tokens are whose, limits, failures, the calculator."""

from __future__ import annotations

import math
import pickle
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from make_tiny_model import build_tokenizer
from support.rl_run import PROMPTS, TableRun, make_run
from support.table_engine import STOP, TableEngine, first_table, single_rank

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.types import Completion, EarlyLogprobs, Prompt, Rollout, TrainSample
from mindspeed_rl.environments import (
    LocalRunner,
    Observation,
    answer_tokens,
    resolve_environment,
)
from mindspeed_rl.environments.builtin.calculator import Calculator, calculate
from mindspeed_rl.environments.chat import TemplateRefusal, message_tokens, opening_tokens
from mindspeed_rl.generation.multi_turn import Environments
from mindspeed_rl.metrics.metric_set import Mean
from mindspeed_rl.rewards import RewardError
from mindspeed_rl.rollout.requests import GenerationRequest, SamplingSettings
from mindspeed_rl.samples.columns import EARLY_REFERENCE
from mindspeed_rl.samples.packing import pack
from mindspeed_rl.samples.saved_responses import carryover_state, restored_carryover

HEARD = (60, 61)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with single_rank():
        yield


class Echo:
    """Says :data:`HEARD` after every turn but the second; scores by the number of turns."""

    def __init__(self, tokenizer: object) -> None:
        self.turns: list[tuple[int, ...]] = []

    def reset(self, prompt: Prompt) -> Observation:
        return Observation((9,) if prompt.index % 2 else ())

    def step(self, token_ids: tuple[int, ...]) -> Observation:
        self.turns.append(token_ids)
        done = len(self.turns) == 2
        return Observation(() if done else HEARD, done, reward=float(len(self.turns)))


class Broken(Echo):
    """Fails in its second turn."""

    def step(self, token_ids: tuple[int, ...]) -> Observation:
        if self.turns:
            raise OSError("the tool is gone")
        return super().step(token_ids)


class AllStop(TableEngine):
    """Every turn is the sample's token and the stop token, as far as its limit allows."""

    def completion(
        self, request: GenerationRequest, settings: SamplingSettings, version: int
    ) -> Completion:
        ids = (4 + request.sample_id, STOP)[: request.max_tokens]
        reason = "stop" if ids[-1] == STOP else "length"
        return Completion(ids, tuple(self.weights[list(ids)].tolist()), reason, version)


def conversing(tmp_path: Path, kind: type = Echo, flags: str = "", threads: int = 0) -> TableRun:
    run = make_run(
        tmp_path,
        f"--rl-environment calculator {flags} --reward-function format environment",
        rewards={i: float(i % 3) for i in range(6)},
    )
    run.set_engine(AllStop())
    environment = run.config.environment
    environments = Environments(
        LocalRunner(kind, cast(Any, None), threads),
        environment.rl_environment,
        environment.rl_environment_max_turns,
        run.config.rewards.reward_max_error_rate,
    )
    run.set_rollouts(environments=environments)
    return run


def test_the_tail_of_a_rollout_sees_whole_conversations(tmp_path: Path) -> None:
    """Those of the rank that leads the engine, as it holds them; what it says stays with them."""
    run = conversing(tmp_path, flags="--grpo-kl-beta 0.1 --reference-pass single")
    columns = (*run.parts.samples.columns, EARLY_REFERENCE)
    run.set_rollouts(columns=columns)
    seen: dict[int, int] = {}

    def tail(rollouts: Sequence[Rollout]) -> Mapping[int, EarlyLogprobs]:
        seen.update({r.sample_id: len(r.completion.token_ids) for r in rollouts})
        said = {i: struct.pack(f"{n}f", *(-i - k for k in range(n))) for i, n in seen.items()}
        return {i: EarlyLogprobs(reference=values) for i, values in said.items()}

    run.parts = replace(run.parts, tail=tail, samples=replace(run.parts.samples, columns=columns))
    samples = run.generate().samples
    assert seen == {i: 6 + i // 3 % 2 for i in range(6)}
    assert all(sample.has_early for sample in samples)
    for i, said in enumerate(run.said(samples)):
        assert said[EARLY_REFERENCE.name].tolist() == [-i - k for k in range(seen[i])]


def test_turns_follow_each_other_and_only_the_models_tokens_are_trained(tmp_path: Path) -> None:
    run = conversing(tmp_path)
    rollouts = run.generate()
    asked = run.engine.asked
    assert len(asked) == 2
    for i, (s, r) in enumerate(zip(rollouts.samples, run.said(rollouts.samples), strict=True)):
        opening = (9,) if s.prompt_index % 2 else ()
        mine = (4 + i, STOP)
        assert tuple(r["token_ids"].tolist()) == (*opening, *mine, *HEARD, *mine)
        mask = [False] * len(opening) + [True] * 2 + [False] * 2 + [True] * 2
        assert r["loss_mask"].tolist() == mask
        assert tuple(r["token_ids"][r["loss_mask"]].tolist()) == (*mine, *mine) and s.stopped
        assert (s.num_tokens, s.num_sampled) == (len(mask), 4)
        context = (*PROMPTS[s.prompt_index].token_ids, *opening)
        assert asked[0][0][i].token_ids == context
        assert asked[1][0][i].token_ids == (*context, *mine, *HEARD)
        assert asked[1][0][i].max_tokens == 8 - len(opening) - 4
    seeds = [r.seed for requests, _ in asked for r in requests]
    assert len(set(seeds)) == 12, "every turn has a seed of its own"
    assert rollouts.metrics["environment/turns"] == Mean(12.0, 6.0)
    assert rollouts.metrics["environment/error_rate"] == Mean(0.0, 6.0)


def test_a_slow_environment_holds_no_other_conversation(tmp_path: Path) -> None:
    """That of one sample answers when the other five are over, and the next runs are as quick."""
    over = threading.Semaphore(0)

    class Slow(Echo):
        count = 0

        def __init__(self, tokenizer: object) -> None:
            super().__init__(tokenizer)
            Slow.count += 1
            self.waits = Slow.count == 3

        def step(self, token_ids: tuple[int, ...]) -> Observation:
            if self.waits and not self.turns:
                for _ in range(5):
                    assert over.acquire(timeout=30.0), "others wait for this conversation"
            answer = super().step(token_ids)
            if answer.done:
                over.release()
            return answer

    run = conversing(tmp_path, Slow, threads=2)
    rollouts = run.generate()
    assert rollouts.metrics["environment/turns"] == Mean(12.0, 6.0)
    assert rollouts.metrics["environment/error_rate"] == Mean(0.0, 6.0)
    (last,) = run.engine.asked[-1][0]
    assert (4 + last.sample_id, STOP, *HEARD) == last.token_ids[-4:]
    assert sum(len(requests) for requests, _ in run.engine.asked) == 12


def test_between_turns_only_what_is_new_travels(tmp_path: Path) -> None:
    """Contexts grow with every turn; ranks of an engine keep what they have read."""
    told: dict[int, list[int]] = {}

    class Watched(AllStop):
        def from_leader(self, value: Any) -> Any:
            for c in value.samples:
                told.setdefault(c.sample_id, []).extend(c.token_ids)
            return super().from_leader(pickle.loads(pickle.dumps(value)))

    run = conversing(tmp_path)
    run.set_engine(Watched())
    samples = run.generate().samples
    assert told.keys() == set(range(6))
    for s, response in zip(samples, run.said(samples), strict=True):
        # each token once, all but those of the last turn, which nobody has to read
        assert told[s.sample_id] == response["token_ids"].tolist()[:-2]


def test_gradient_and_denominators_leave_the_environment_out(tmp_path: Path) -> None:
    """The batches hold the model's tokens only, each with its own log-prob and advantage."""
    run = conversing(tmp_path)
    samples = run.generate().samples
    (update,) = run.build(samples).updates
    assert update.denominators.tokens == 6 * 4
    micro = update.micro_batches
    trained = torch.cat([m.targets[m.loss_mask] for m in micro])
    assert sorted(trained.tolist()) == sorted(t for i in range(6) for t in (4 + i, STOP) * 2)
    logprobs = torch.cat([m.column("rollout_logprobs") for m in micro])
    torch.testing.assert_close(logprobs, first_table()[trained], rtol=0, atol=0)
    metrics = run.update(run.prepared(samples))
    assert run.policy.gradients[0][list(HEARD)].abs().max() == 0.0
    mismatch = metrics["mismatch/max_abs_logprob"]
    assert cast(Any, mismatch).value == 0.0


def test_rewards_see_what_the_model_said_and_what_the_environment_did(tmp_path: Path) -> None:
    run = conversing(tmp_path)
    run.generate()
    for i, request in enumerate(run.pool.requests):
        assert request.response == chr(4 + i) * 2 and request.num_response_tokens == 4
        assert request.metadata["environment_reward"] == 2.0
        assert request.metadata["transcript"].endswith("<=" + chr(4 + i) + chr(STOP))


@pytest.mark.parametrize(
    ("flags", "length", "turns"),
    [
        ("--rl-environment-max-turns 1", 2, 1.0),
        ("--rollout-max-response-length 4", 2, 1.0),  # no room behind the answer
        ("--rollout-max-response-length 6", 6, 2.0),
        ("--rollout-max-response-length 5", 5, 2.0),  # the second turn is cut
    ],
)
def test_limits_cut_a_conversation(tmp_path: Path, flags: str, length: int, turns: float) -> None:
    run = conversing(tmp_path, flags=flags)
    even = cast(Any, [p for p in PROMPTS if p.index % 2 == 0] * 2)
    run.parts = replace(run.parts, data=replace(run.parts.data, train=even))
    rollouts = run.generate()
    whole = flags.endswith("length 6")
    assert {s.stopped for s in rollouts.samples} == {whole}
    assert {s.num_tokens for s in rollouts.samples} == {length}
    assert rollouts.metrics["environment/turns"] == Mean(6 * turns, 6.0)
    requests = run.pool.requests
    assert {r.metadata["environment_reward"] for r in requests} == {turns}


def test_a_failing_environment_costs_its_sample(tmp_path: Path) -> None:
    """Counted, without a reward (never a 0), nothing of it trained, siblings trained."""

    class Sometimes(Broken):
        count = 0

        def reset(self, prompt: Prompt) -> Observation:
            Sometimes.count += 1
            if Sometimes.count != 2:
                self.step = super(Broken, self).step  # type: ignore[method-assign]
            return super().reset(prompt)

    run = conversing(tmp_path, Sometimes, "--reward-max-error-rate 0.2")
    rollouts = run.generate()
    lost = rollouts.samples[1]
    assert math.isnan(lost.reward) and lost.num_sampled == 0 < lost.num_tokens
    assert len(run.pool.requests) == 5
    assert rollouts.metrics["environment/error_rate"] == Mean(1.0, 6.0)
    (update,) = run.build(rollouts.samples).updates
    assert update.denominators.tokens == 5 * 4


def test_too_many_failures_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("class Broken: ...\n")
    run = conversing(tmp_path, Broken, f"--rl-environment {tmp_path}/x.py:Broken")
    with pytest.raises(RewardError, match=r"(?s)x.py:Broken: 6 of 6.*the tool is gone"):
        run.generate()


def test_surplus_keeps_its_loss_mask(tmp_path: Path) -> None:
    run = conversing(tmp_path)
    samples = run.generate().samples
    before = run.said(samples)
    state, columns = carryover_state([samples], before), run.parts.samples.columns
    (restored,), found = restored_carryover(state, 1, columns, 1)
    assert restored == samples
    for response, wanted in zip(found, before, strict=True):
        assert torch.equal(response["loss_mask"], wanted["loss_mask"])


def test_a_loss_mask_has_one_entry_per_token_behind_the_prompt() -> None:
    ids = torch.arange(10, 17)
    mask = torch.tensor([True, False, False, True, True])
    masked = TrainSample(
        0, ids, 2, {"rollout_logprobs": torch.tensor([-1.0, -2.0, -3.0])}, loss_mask=mask
    )
    plain = TrainSample(1, ids, 5, {"rollout_logprobs": torch.tensor([-4.0, -5.0])})
    batch = pack([plain, masked], 20, sequence_multiple=8)
    assert batch.targets[batch.loss_mask].tolist() == [15, 16, 12, 15, 16]
    assert batch.column("rollout_logprobs").tolist() == [-4.0, -5.0, -1.0, -2.0, -3.0]
    assert batch.num_trained == (2, 3) and batch.sequence_of.tolist() == [0, 0, 1, 1, 1]
    with pytest.raises(AssertionError, match="one entry per token"):
        pack([TrainSample(0, ids, 3, loss_mask=mask)], 8)


# --- the calculator -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*34", "408"),
        (" -(3 + 4) ", "-7"),
        ("7/2", "3.5"),
        ("7//2 + 2**10 % 7", "5"),
        ("1/0", "error: division by zero"),
        ("9**9**9", "error: too large"),
        ("__import__('os')", "error: only numbers"),
        ("1 +", "error: not an expression"),
        ("(-8)**0.5", "error: not a real number"),
        ("1" * 300, "error: too long"),
        ("True + 1", "error: only numbers"),
    ],
)
def test_the_calculator_calculates_and_nothing_else(expression: str, value: str) -> None:
    assert calculate(expression).startswith(value)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(["calc(1+2)"] * 3, 262)


def ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_a_call_is_answered_and_a_number_ends_the_conversation(tokenizer: Any) -> None:
    prompt = Prompt(0, (3,), "7+8", "15")
    calculator = Calculator(tokenizer)
    assert calculator.reset(prompt) == Observation()
    heard = calculator.step(ids(tokenizer, "calc(7+8)<|end|>"))
    assert tokenizer.decode(list(heard.token_ids)) == "<|user|>15<|assistant|>"
    assert not heard.done and heard.reward == 0.0
    assert calculator.step(ids(tokenizer, "15<|end|>")) == Observation(done=True, reward=1.0)
    assert calculator.step(ids(tokenizer, "16<|end|>")) == Observation(done=True, reward=0.0)
    assert calculator.step(ids(tokenizer, "15")) == Observation(reward=0.0), "cut"


def test_the_whole_conversation_is_what_the_template_renders(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "7+8"},
        {"role": "assistant", "content": "calc(7+8)"},
        {"role": "user", "content": "15"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    parts = ids(tokenizer, "<|user|>7+8<|assistant|>") + ids(tokenizer, "calc(7+8)<|end|>")
    assert parts + answer_tokens(tokenizer, "15") == ids(tokenizer, text)


@pytest.mark.parametrize("cut", [False, True])
def test_messages_between_turns_are_what_the_template_renders(tokenizer: Any, cut: bool) -> None:
    """Behind a turn that was cut the template's end of a turn comes first."""
    opening = [{"role": "system", "content": "1+2"}, {"role": "user", "content": "7+8"}]
    between = [{"role": "user", "content": "15"}, {"role": "system", "content": "calc"}]
    messages = [*opening, {"role": "assistant", "content": "calc(7+8)"}, *between]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    turn = ids(tokenizer, "calc(7+8)" if cut else "calc(7+8)<|end|>")
    rest = message_tokens(tokenizer, between, cut=cut)
    assert opening_tokens(tokenizer, opening) + turn + rest == ids(tokenizer, text)
    with pytest.raises(TemplateRefusal, match="unknown role tool"):
        message_tokens(tokenizer, [{"role": "tool", "content": "15"}])


def test_what_others_say_cannot_pass_for_the_models_turn(tokenizer: Any) -> None:
    """The mark that stands for the turn while a template renders is found where it was put."""
    tokens = message_tokens(tokenizer, [{"role": "user", "content": "a mindspeed-rl-turn b"}])
    assert tokenizer.decode(list(tokens)) == "<|user|>a mindspeed-rl-turn b<|assistant|>"


def test_environments_are_found_by_name_and_file(tmp_path: Path) -> None:
    assert resolve_environment("calculator") is Calculator
    file = tmp_path / "mine.py"
    file.write_text("class Mine: ...")
    assert resolve_environment(f"{file}:Mine").__name__ == "Mine"  # type: ignore[attr-defined]
    for name in ("calc", f"{file}:Other"):
        with pytest.raises(UsageError, match=f"--rl-environment {name}: "):
            resolve_environment(name)
