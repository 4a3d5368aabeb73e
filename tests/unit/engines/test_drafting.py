"""Drafts of an engine: which of their tokens are kept, how long they may be, what excludes them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.engines.vllm.drafting import HistoryProposer, check_drafts
from mindspeed_rl.engines.vllm.patches.seeded_draws import Draws
from mindspeed_rl.engines.vllm.patches.verified_drafts import grid_of_rows, kept_places, per_row
from mindspeed_rl.rollout.drafts import Drafter, DraftRule

TOKENS = st.integers(0, 2)
REQUESTS = st.lists(
    st.integers(0, 4).flatmap(
        lambda n: st.tuples(
            st.lists(TOKENS, min_size=n, max_size=n),
            st.lists(TOKENS, min_size=n + 1, max_size=n + 1),
        )
    ),
    min_size=1,
    max_size=5,
)


@given(REQUESTS)
def test_a_draft_is_kept_up_to_the_first_token_that_is_not_sampled(
    requests: list[tuple[list[int], list[int]]],
) -> None:
    """Each request has a draft and the tokens sampled at its places and after them."""
    counts = torch.tensor([len(sampled) for _, sampled in requests])
    sampled = torch.tensor(list(itertools.chain.from_iterable(s for _, s in requests)))
    drafted = torch.tensor(list(itertools.chain.from_iterable([*d, -1] for d, _ in requests)))
    grid = grid_of_rows(counts)
    kept = kept_places(sampled[grid], drafted[grid][:, :-1], counts)
    for row, (draft, tokens) in enumerate(requests):
        right = 0
        while right < len(draft) and draft[right] == tokens[right]:
            right += 1
        assert sampled[grid][row][kept[row]].tolist() == tokens[: right + 1]


def metadata(**changes: Any) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    none = torch.empty(0)
    values: dict[str, Any] = {
        "temperature": torch.tensor([0.5, 0.7]),
        "all_greedy": False,
        "all_random": True,
        "top_p": None,
        "top_k": None,
        "generators": Draws([11, 12], torch.tensor([5, 9])),
        "max_num_logprobs": 0,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": none,
        "presence_penalties": none,
        "repetition_penalties": none,
        "output_token_ids": [],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    return SamplingMetadata(**values | changes)


def test_each_row_has_the_seed_of_its_request_and_a_position_of_its_own() -> None:
    found = per_row(metadata(), [3, 1])
    assert found.temperature.tolist() == pytest.approx([0.5, 0.5, 0.5, 0.7])
    assert list(found.generators.seeds) == [11, 11, 11, 12]
    assert found.generators.positions.tolist() == [5, 6, 7, 9]


def test_settings_that_shape_tokens_otherwise_are_not_verified() -> None:
    with pytest.raises(AssertionError):
        per_row(metadata(top_k=torch.tensor([3, 3])), [1, 1])


def test_a_draft_ends_with_its_response() -> None:
    """At its own limit, and at that of the model, whichever is first."""
    proposer = HistoryProposer(SimpleNamespace(model_config=SimpleNamespace(max_model_len=20)))
    assert proposer.propose([[1]], [3], None) == [[]]
    requests: Any = defaultdict(
        lambda: SimpleNamespace(
            sampling_params=SimpleNamespace(max_tokens=6), output_token_ids=[1, 2, 3]
        )
    )
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=["a", "b", "c"]), requests=requests, num_spec_tokens=8
    )
    proposer.attach(runner)
    assert runner.effective_drafter_max_model_len == 28
    drafter = proposer.drafter = Drafter(DraftRule(allowed_loss=10.0))
    for name in runner.input_batch.req_ids:
        drafter.open(name, (1, 2), (), [range(3, 30)])
    drafts = proposer.propose([[3], [3], []], [10, 18, 5], None, slot_mappings=None)
    assert drafts == [[4, 5], [4], []]


def config_of(*flags: str) -> RLRunConfig:
    result: RLRunConfig = parse(RLRunConfig, ["--hf-checkpoint", "x", *flags], "x").config
    return result


NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'
OURS = ("--rollout-drafts", "history")


@pytest.mark.parametrize(
    ("flags", "platform", "named"),
    [
        (OURS, "npu", "--rollout-drafts history"),
        (OURS, "cuda", "--rollout-drafts history"),
        (("--vllm-speculative-config", NGRAM), "npu", "--vllm-speculative-config"),
        ((*OURS, "--vllm-speculative-config", NGRAM), "cpu", "--rollout-drafts"),
        ((*OURS, "--rollout-dp", "2"), "cpu", "--rollout-dp 2"),
        ((*OURS, "--rl-routing-replay", "rollout"), "cpu", "--rl-routing-replay rollout"),
    ],
)
def test_drafts_are_refused_where_they_are_not_verified(
    flags: tuple[str, ...], platform: str, named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        check_drafts(config_of(*flags), platform)


def test_drafts_are_not_refused_elsewhere() -> None:
    check_drafts(config_of("--rollout-dp", "2", "--rl-routing-replay", "rollout"), "npu")
    check_drafts(config_of(*OURS, "--rollout-tp", "2", "--rollout-rebalance", "all"), "cpu")
    check_drafts(config_of("--vllm-speculative-config", NGRAM), "cpu")


@pytest.mark.parametrize("value", ["eagle", {"method": "eagle", "model": "m"}, {"model": "m"}])
def test_drafts_that_need_weights_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match="--vllm-speculative-config"):
        engine_provider().check_options({"speculative_config": value})
    engine_provider().check_options({"speculative_config": {"method": "ngram"}})
