"""Drafts of an engine: which of their tokens are kept, how long they may be, what excludes them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.layout_cases import GQA, LATENT, MOE, spec_of

from mindspeed_rl.algorithms.drafted_tokens import grid_of_rows, kept_places
from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.engines.vllm.drafting import check_drafted_layout, check_drafts
from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.rollout.draft_costs import DraftController, DraftPlan, DraftRule
from mindspeed_rl.rollout.draft_history import DraftHistory, prompt_key
from mindspeed_rl.rollout.draft_source import DraftSource, HistoryProposer
from mindspeed_rl.rollout.drafts import Drafter
from mindspeed_rl.rollout.requests import GenerationRequest
from mindspeed_rl.vllm_patches import verified_drafts
from mindspeed_rl.vllm_patches.seeded_draws import Draws, drawn_at_once, use_in
from mindspeed_rl.vllm_patches.verified_drafts import per_row, verified

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


# A made-up model: probabilities of the next of four tokens after each, and after the prompt.
PROBS = torch.tensor(
    [[0.4, 0.3, 0.2, 0.1], [0.05, 0.6, 0.3, 0.05], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]]
)
SAMPLES, PLACES = 100_000, 3


def draft_of(kind: str, noise: torch.Generator) -> torch.Tensor:
    """Two drafted tokens for each sample: [samples, 2]."""
    if kind == "likely":
        return torch.tensor([0, 0]).expand(SAMPLES, -1)
    if kind == "unlikely":
        return torch.tensor([3, 2]).expand(SAMPLES, -1)
    return torch.randint(4, (SAMPLES, 2), generator=noise)


@contextmanager
def drawing_sampler() -> Iterator[Any]:
    """vLLM's sampler of a runner with our draws, built and patched as an engine's is."""
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.sample.sampler import Sampler

    drawn = drawn_at_once(topk_topp_sampler.random_sample)
    with mock.patch.object(topk_topp_sampler, "random_sample", drawn):
        sampler = Sampler(logprobs_mode="processed_logprobs")
        use_in(sampler)
        yield sampler


def never(*_: object) -> None:
    raise AssertionError("vLLM's own verification samples other tokens")


def sampled_with(sampler: Any, logits: torch.Tensor, draft: torch.Tensor, draws: Draws) -> Any:
    """What vLLM's rejection sampler returns, as it is patched, for rows of each request."""
    drafted = SimpleNamespace(
        num_draft_tokens=[draft.shape[1]] * len(draft),
        draft_token_ids=draft.flatten().to(torch.int32),
    )
    temperature = torch.full((len(draft),), 1.0)
    return verified(never)(
        SimpleNamespace(sampler=sampler), drafted, None, logits,
        metadata(generators=draws, temperature=temperature),
    )  # fmt: skip


def chi_square(kind: str, temperature: float) -> float:
    """The statistic of three tokens in a row, sampled with drafts, against what the model says.

    vLLM's samplers sample, as our patches leave them. What a first step does not keep is sampled in
    a second one without drafts. Each step's logits are rounded otherwise, as by a device whose sums
    depend on the batch.
    """
    draft = draft_of(kind, torch.Generator().manual_seed(1))
    scores = PROBS.log() / temperature
    seeds = range(77_000_000, 77_000_000 + SAMPLES)
    inputs = torch.cat([torch.zeros(SAMPLES, 1, dtype=torch.int64), draft], 1)
    with drawing_sampler() as sampler:
        rows = scores[inputs.flatten()] * (1 + 1e-4)
        draws = Draws(seeds, torch.zeros(SAMPLES, dtype=torch.int64))
        tokens = sampled_with(sampler, rows, draft, draws).sampled_token_ids.long()
        for k in range(1, PLACES):
            before = scores[tokens[:, k - 1].clamp(min=0)] * (1 - 1e-4)
            draws = Draws(seeds, torch.full((SAMPLES,), k))
            none = torch.empty(SAMPLES, 0, dtype=torch.int64)
            late = sampled_with(sampler, before, none, draws).sampled_token_ids.flatten()
            tokens[:, k] = torch.where(tokens[:, k] < 0, late, tokens[:, k])
    probs = scores.softmax(-1)
    wanted = probs[0, :, None, None] * probs[:, :, None] * probs[None, :, :]
    number = tokens[:, 0] * 16 + tokens[:, 1] * 4 + tokens[:, 2]
    found = torch.bincount(number, minlength=64).view(4, 4, 4)
    return float(((found - SAMPLES * wanted) ** 2 / (SAMPLES * wanted)).sum())


# 63 degrees of freedom: 1 in 10,000 is above.
CRITICAL = 113.5


@pytest.mark.parametrize("kind", ["likely", "unlikely", "random"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_verification_keeps_the_distribution(kind: str, temperature: float) -> None:
    """Also where a step with drafts rounds otherwise than one without, as bits are not compared."""
    assert chi_square(kind, temperature) < CRITICAL


def test_the_statistic_notices_drafts_that_are_kept_wrongly() -> None:
    """Drafts that are kept with their sampled successors, and one token in fifty unseen."""

    def all_of_them(sampled: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.ones_like(sampled, dtype=torch.bool)

    def some(sampled: torch.Tensor, drafted: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        kept = kept_places(sampled, drafted, counts)
        kept[::50] = True
        return kept

    with mock.patch.object(verified_drafts, "kept_places", all_of_them):
        assert chi_square("random", 1.0) > 10 * CRITICAL
    with mock.patch.object(verified_drafts, "kept_places", some):
        assert chi_square("unlikely", 1.0) > CRITICAL


def test_a_dummy_batch_is_left_to_the_engine_and_a_greedy_one_is_not() -> None:
    """The first has truncated distributions and no draws: vLLM runs it once at its start."""
    ours = verified(lambda *_: "its own")
    dummy = metadata(generators={}, top_p=torch.tensor([0.9, 0.9]))
    assert ours(SimpleNamespace(), None, None, torch.empty(0), dummy) == "its own"
    greedy = metadata(generators={}, all_greedy=True, all_random=False, temperature=None)
    drafted = SimpleNamespace(
        num_draft_tokens=[2, 0, 1], draft_token_ids=torch.tensor([1, 0, 3], dtype=torch.int32)
    )
    logits = torch.eye(5)[[1, 2, 4, 0, 3, 1]]
    with drawing_sampler() as sampler:
        found = ours(SimpleNamespace(sampler=sampler), drafted, None, logits, greedy)
    assert found.sampled_token_ids.tolist() == [[1, 2, -1], [0, -1, -1], [3, 1, -1]]
    flat = found.logprobs_tensors.logprob_token_ids[:, 0].view(3, 3)
    kept = found.sampled_token_ids >= 0
    assert flat[kept].tolist() == found.sampled_token_ids[kept].tolist()


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
        input_batch=SimpleNamespace(req_ids=["a", "b", "c"], num_tokens_no_spec=[10, 18, 5]),
        requests=requests,
        num_spec_tokens=8,
    )
    proposer.attach(runner)
    assert runner.effective_drafter_max_model_len == 28
    controller = DraftController(DraftRule())
    controller.follow(DraftPlan(1, 0.05, 0.0))
    drafter = proposer.drafter = Drafter(controller)
    for name in runner.input_batch.req_ids:
        drafter.open(name, (1, 2), (), [range(3, 30)])
    drafts = proposer.propose([[3], [3], []], slot_mappings=None)
    assert drafts == [[4, 5], [4], []]


def test_ranks_follow_the_plan_of_the_first() -> None:
    """Every period, and not what their own seconds say; prompts of later turns are the first."""
    proposer = HistoryProposer(SimpleNamespace(model_config=SimpleNamespace(max_model_len=99)))
    runner: Any = SimpleNamespace(
        drafter=proposer,
        num_spec_tokens=8,
        input_batch=SimpleNamespace(req_ids=["0"], num_tokens_no_spec=[0]),
        requests={
            "0": SimpleNamespace(
                sampling_params=SimpleNamespace(max_tokens=60), output_token_ids=[]
            )
        },
    )
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    executor = SimpleNamespace(driver_worker=worker)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor))
    history = DraftHistory(10_000)
    history.add(prompt_key((1, 2)), range(3, 30))
    asked: list[DraftPlan] = []

    def from_leader(plan: DraftPlan) -> DraftPlan:
        asked.append(plan)
        return DraftPlan(2, 0.05, 0.0)

    source = DraftSource(llm, DraftRule(period=3), history, from_leader)
    source.begin()
    source.start("0", GenerationRequest(0, (1, 2, 3, 4), 1, opening=2))
    lengths = []
    for token in range(5, 11):
        runner.input_batch.num_tokens_no_spec = [token]
        (draft,) = proposer.propose([[token]])
        source.end_step(0.01)
        lengths.append(len(draft))
    assert len(asked) == 2 and all(plan.steps == 0 for plan in asked), "by own seconds, none"
    assert [length > 0 for length in lengths] == [False] * 3 + [True] * 2 + [False]
    ledger, saved = source.end(capacity=4)
    assert (ledger.steps, ledger.drafts, saved) == (6, 2, 0) and proposer.drafter is None


def config_of(*flags: str) -> RLRunConfig:
    result: RLRunConfig = parse(RLRunConfig, ["--hf-checkpoint", "x", *flags], "x").config
    return result


NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'
OURS = ("--rollout-drafts", "history")


EAGER = ("--rollout-graph-mode", "eager")


@pytest.mark.parametrize(
    ("flags", "platform", "named"),
    [
        (OURS, "npu", "--rollout-graph-mode auto.* use --rollout-graph-mode eager"),
        ((*OURS, "--rollout-graph-mode", "full-decode"), "cuda", "--rollout-graph-mode full-"),
        ((*OURS, *EAGER, "--rollout-draft-tokens", "16"), "npu", "--rollout-draft-tokens 16"),
        ((*OURS, *EAGER, "--rl-routing-replay", "rollout"), "npu", "--rl-routing-replay rollout"),
        (("--vllm-speculative-config", NGRAM), "npu", "--vllm-speculative-config"),
        ((*OURS, "--vllm-speculative-config", NGRAM), "cpu", "--rollout-drafts"),
    ],
)
def test_drafts_are_refused_where_they_are_not_verified(
    flags: tuple[str, ...], platform: str, named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        check_drafts(config_of(*flags), platform)


def test_drafts_are_not_refused_elsewhere() -> None:
    check_drafts(config_of("--rollout-dp", "2", "--rl-routing-replay", "rollout"), "npu")
    check_drafts(config_of(*OURS, *EAGER, "--rollout-draft-tokens", "15"), "npu")
    check_drafts(config_of(*OURS, "--rollout-tp", "2", "--rollout-rebalance", "all"), "cpu")
    check_drafts(config_of(*OURS, "--rollout-dp", "2", "--rl-routing-replay", "rollout"), "cpu")
    for platform in ("cpu", "cuda"):
        check_drafts(config_of(*OURS), platform)
        check_drafts(config_of("--vllm-speculative-config", NGRAM), platform)


def test_drafts_are_refused_for_layouts_whose_steps_were_not_read() -> None:
    drafted = config_of(*OURS, *EAGER)
    latent = VllmLayout(spec_of(LATENT), EngineLayout(1, 1))
    spread = VllmLayout(spec_of(MOE), EngineLayout(2, 2, expert_parallel=True))
    for layout, named in ((latent, "latent attention"), (spread, "--rollout-ep")):
        with pytest.raises(UsageError, match=f"--rollout-drafts history.*{named}"):
            check_drafted_layout(drafted, layout, "npu")
        check_drafted_layout(drafted, layout, "cuda")
        check_drafted_layout(config_of(), layout, "npu")
    for case in (GQA, MOE):
        check_drafted_layout(drafted, VllmLayout(spec_of(case), EngineLayout(2, 2)), "npu")
