"""The lifecycle around vLLM with a toy in its place: version gate, caches, sleep."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_double import EngineDouble
from support.layout_cases import GQA, MOE, Case, layouts_of, with_attention

from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.engines.vllm import capabilities
from mindspeed_rl.engines.vllm.arguments import model_settings
from mindspeed_rl.engines.vllm.engine import VllmEngine, small_cache
from mindspeed_rl.engines.vllm.options import check_option_names
from mindspeed_rl.models.layers import GroupedQueryAttention, LatentAttention
from mindspeed_rl.platforms.process_state import preserved_environment
from mindspeed_rl.rollout.requests import GenerationRequest, NewTokens, SamplingSettings
from mindspeed_rl.vllm_patches import shared_memory_names
from mindspeed_rl.vllm_patches.derived_state import DerivedState

SETTINGS = SamplingSettings(temperature=1.0, max_response_tokens=4, stop_token_ids=(1,))
CALLS = ("free cache", "free weights", "wake weights", "wake cache", "begin", "finish", "generate")
REQUESTS = [GenerationRequest(5, (1, 2, 3), 11), GenerationRequest(4, (4,), 12)]


def update(engine: EngineDouble, version: int) -> None:
    """Weights that differ from version to version."""
    engine.begin_update()
    for view in engine.weight_views().values():
        view.fill_(1.0 + version)
    engine.finish_update(version)


def engine_at(version: int) -> EngineDouble:
    """An engine with the weights of a version."""
    engine = EngineDouble()
    update(engine, version)
    return engine


def answers(engine: EngineDouble, version: int) -> list[float]:
    return [c.logprobs[0] for c in engine.generate(REQUESTS, SETTINGS, version).values()]


def test_completions_come_in_the_order_of_requests() -> None:
    engine = engine_at(3)
    first, second = engine.generate(REQUESTS, SETTINGS, 3).values()
    assert first.logprobs[0] == second.logprobs[0] - 2  # prompts that sum to 6 and to 4
    assert (first.token_ids, first.finish_reason, first.weights_version) == ((7,), "stop", 3)


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_a_sample_that_vllm_gave_up_is_named(reason: str | None) -> None:
    engine = engine_at(3)
    engine.finish_reasons[4] = reason
    with pytest.raises(RuntimeError, match=f"sample 4 .*{reason}"):
        engine.generate(REQUESTS, SETTINGS, 3)


class Speaker(EngineDouble):
    """Ends the turns of a conversation with so many tokens, by sample and tokens before the turn.

    Attributes:
        lengths: of the turns.
    """

    lengths: Mapping[tuple[int, int], int]

    def _steps(self, *about: Any, **more: Any) -> Iterator[list[Any]]:
        while self._asked.prompts:
            key, prompt = self._asked.prompts.popitem()
            tokens = [7] * self.lengths[int(key), len(prompt)]
            output = SimpleNamespace(
                token_ids=tokens,
                logprobs=SimpleNamespace(token_ids=tokens, logprobs=[-1.0] * len(tokens)),
                finish_reason="stop",
            )
            yield [SimpleNamespace(request_id=key, finished=True, outputs=[output])]


class SecondTurn:
    """The second turn of a sample, which comes when its first has ended."""

    num_awaited = 1

    def __init__(self, request: GenerationRequest) -> None:
        self.waiting = [request]

    def take(self, *, wait: bool) -> list[GenerationRequest]:
        come, self.waiting, self.num_awaited = self.waiting, [], 0
        return come

    def show(self, sampled: Mapping[int, NewTokens]) -> None:
        assert not sampled, "nobody watches"


def test_decode_batches_count_every_turn_of_a_conversation() -> None:
    """Turns of 3 and 5 tokens of one sample, and one of 9, each a token less in decode steps."""
    engine = Speaker()
    engine.lengths = {(0, 1): 3, (0, 6): 5, (1, 2): 9}
    update(engine, 0)
    first = [GenerationRequest(1, (4, 4), 1), GenerationRequest(0, (4,), 2)]
    later = SecondTurn(GenerationRequest(0, (4, 7, 7, 7, 8, 9), 3))
    done = engine.generate(first, SETTINGS, 0, arrivals=later)
    assert {i: len(c.token_ids) for i, c in done.items()} == {0: 5, 1: 9}
    assert engine.stats.running == {3: 2, 2: 2, 1: 4}


def test_no_cached_prefix_survives_an_update() -> None:
    """The answer to a prompt seen before an update is that of a fresh engine."""
    engine, fresh = engine_at(0), engine_at(1)
    before = answers(engine, 0)
    update(engine, 1)
    assert answers(engine, 1) == answers(fresh, 1) != before
    assert engine.toy.num_resets == 2


def test_no_paused_response_survives_an_update() -> None:
    """Their blocks have keys and values of older weights; vLLM resets no cache with requests."""
    engine = engine_at(0)

    class Paused:
        def drop_all(self) -> None:
            engine.toy.running = False

    engine._paused = cast(Any, Paused())
    engine.toy.running = True
    update(engine, 1)
    assert engine.toy.num_resets == 2
    engine.toy.running = True
    engine.free_cache()
    assert engine.toy.num_resets == 3


def test_no_cached_prefix_survives_sleep_at_an_unchanged_version() -> None:
    """The memory of the cache comes back as zeros, so nothing may be remembered to be in it.

    No update resets it here: a step that trains the critic alone leaves the version as it is.
    """
    engine = engine_at(3)
    before = answers(engine, 3)
    assert answers(engine, 3) == before
    engine.free_cache()
    engine.wake_cache()
    assert answers(engine, 3) == before


def test_a_cache_that_cannot_be_reset_stops_the_update() -> None:
    engine = EngineDouble()
    engine.toy.running = True
    with pytest.raises(RuntimeError, match="prefix cache"):
        update(engine, 0)
    engine.toy.running = False
    with pytest.raises(RuntimeError, match="weights of version -1"):
        answers(engine, 0)


@pytest.mark.parametrize("trainer", [0, 2])
def test_weights_of_another_version_do_not_generate(trainer: int) -> None:
    engine = engine_at(1)
    with pytest.raises(RuntimeError, match=f"version 1, .* {trainer};"):
        engine.generate(REQUESTS, SETTINGS, trainer)


def test_half_written_weights_do_not_generate() -> None:
    engine = engine_at(1)
    engine.begin_update()
    with pytest.raises(RuntimeError, match="sync"):
        engine.generate(REQUESTS, SETTINGS, 1)


@pytest.mark.parametrize("keeps", [True, False])
def test_weights_that_are_kept_come_back_with_their_bits_and_version(keeps: bool) -> None:
    """Over several updates, each of which adds to what the one before left."""
    engine = EngineDouble(keeps_weights=keeps)
    update(engine, 0)
    wanted = {name: view.clone() for name, view in engine.weight_views().items()}
    for version in range(1, 4):
        for _ in range(2):  # freeing and waking twice changes nothing
            engine.free_cache()
            engine.free_weights()
            engine.free_weights()
            with pytest.raises(RuntimeError, match="are freed"):
                engine.begin_update()
            engine.wake_weights()
            engine.wake_weights()
        assert engine.weights_version == (version - 1 if keeps else -1)
        engine.begin_update()
        for number, (name, view) in enumerate(engine.weight_views().items()):
            same = torch.equal(view, wanted[name])
            assert same if keeps else not view.any(), name
            view.add_(number + version)
            wanted[name].copy_(view)
        engine.finish_update(version)
        engine.wake_cache()
        assert len(answers(engine, version)) == 2


def test_experts_that_are_packed_in_place_have_lost_their_bits_at_the_next_update() -> None:
    """So that changes cannot be added to them; all others have kept theirs."""
    engine = EngineDouble(keeps_weights=True)
    assert engine.keeps_bits
    experts = torch.nn.Module()
    experts.w13_weight, experts.w2_weight = (torch.nn.Parameter(torch.ones(2, 4, 4)) for _ in "ab")
    kernel = SimpleNamespace(fused_experts=SimpleNamespace(isa="vec"))
    experts.quant_method = SimpleNamespace(moe_kernel=kernel)  # type: ignore[assignment]
    engine._derived = DerivedState(torch.nn.Sequential(experts), torch.float32)
    assert not engine.keeps_bits
    engine.begin_update()
    assert not experts.w13_weight.any() and not experts.w2_weight.any()


def test_weights_of_an_update_that_did_not_finish_are_kept_by_no_version() -> None:
    engine = EngineDouble(keeps_weights=True)
    update(engine, 5)
    engine.free_cache()
    engine.begin_update()
    engine.free_weights()
    engine.wake_weights()
    assert engine.weights_version == -1
    with pytest.raises(RuntimeError, match="no update has begun"):
        engine.finish_update(6)


@given(st.lists(st.sampled_from(CALLS), max_size=25), st.data())
@settings(deadline=None)
def test_no_order_of_calls_generates_with_wrong_weights(
    calls: list[str], data: st.DataObject
) -> None:
    """Against a model of the state: generate works when awake and synced, else it raises."""
    engine = EngineDouble()
    weights, cache, version, updating = True, True, -1, False
    for call in calls:
        if call == "free cache":
            engine.free_cache()
            cache = False
        elif call == "free weights":
            with nullcontext() if not cache else pytest.raises(RuntimeError, match="leaves first"):
                engine.free_weights()
                weights, version, updating = False, -1, False
        elif call == "wake weights":
            engine.wake_weights()
            weights = True
        elif call == "wake cache":
            legal = weights or cache
            with nullcontext() if legal else pytest.raises(RuntimeError, match="come back before"):
                engine.wake_cache()
                cache = True
        elif call == "begin":
            with nullcontext() if weights else pytest.raises(RuntimeError, match="are freed"):
                engine.begin_update()
                version, updating = -1, True
        elif call == "finish":
            drawn = data.draw(st.integers(0, 2), label="version")
            with nullcontext() if updating else pytest.raises(RuntimeError, match="no update"):
                engine.finish_update(drawn)
                version, updating = drawn, False
        else:
            trainer = data.draw(st.integers(0, 2), label="trainer")
            if cache and version == trainer:
                assert len(engine.generate(REQUESTS, SETTINGS, trainer)) == 2
            else:
                with pytest.raises(RuntimeError, match="sync"):
                    engine.generate(REQUESTS, SETTINGS, trainer)
                with pytest.raises(RuntimeError, match="sync"):
                    engine.score([], 1.0, with_entropy=False, trainer_version=trainer)


def test_a_model_with_other_parameters_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight"):
        EngineDouble(missing="model.norm.weight")


def test_a_parameter_that_moved_in_memory_is_found() -> None:
    """A captured graph would go on reading the old memory."""
    engine = EngineDouble()
    engine.begin_update()
    name, param = next(iter(engine._model.named_parameters()))
    param.data = param.data.clone()
    with pytest.raises(RuntimeError, match=f"moved in memory.*{name}"):
        engine.finish_update(1)


@pytest.mark.parametrize("case", [GQA, MOE], ids=["dense", "experts"])
def test_an_engine_of_another_version_is_refused(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it keeps its weights is not guessed at."""
    monkeypatch.setattr(capabilities, "version", lambda name: "9.9.0")
    _, layout = layouts_of(case)
    with pytest.raises(ValueError, match=r"9\.9\.0.*0\.32\.0"):
        capabilities.installed_layout(layout, "cpu")


@pytest.mark.parametrize(
    ("platform", "installed"),
    [("cpu", "0.32.1+cpu"), ("cuda", "0.32.0"), ("npu", "0.23.0.post1")],
)
def test_every_platform_has_a_layout(
    platform: str, installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "version", lambda name: installed)
    _, layout = layouts_of(MOE)
    found = capabilities.installed_layout(layout, platform)
    assert found.transposed_experts is (platform == "npu")
    assert found.whole_shared_experts is (platform != "npu")
    assert found.expert_multiple == (32 if platform == "cpu" else 1)
    attention = GroupedQueryAttention(4, 4, head_dim=64)
    capabilities.check_model_support(platform, with_attention(layout.spec, attention))


def test_experts_on_cuda_stay_as_they_are_loaded() -> None:
    """Other kernels than Triton's swap the halves of an expert behind our back."""
    experts, dense = layouts_of(MOE)[1], layouts_of(GQA)[1]
    assert model_settings(experts, "cuda")["moe_backend"] == "triton"
    for layout, platform in ((experts, "cpu"), (dense, "cuda")):
        assert "moe_backend" not in model_settings(layout, platform)


@dataclass
class SmallEngineArgs:
    max_num_seqs: int = 1
    enforce_eager: bool = False
    model: str = ""


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("max_num_seq", "--vllm-max-num-seqs"),
        ("enforce_eagr", "--vllm-enforce-eager"),
        ("modell", "none"),
    ],
)
def test_options_that_the_engine_does_not_have_are_refused(
    option: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the nearest that are not reserved."""
    arg_utils = ModuleType("vllm.engine.arg_utils")
    arg_utils.EngineArgs = SmallEngineArgs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", arg_utils)
    check_option_names({"max_num_seqs": 4})
    flag = "--vllm-" + option.replace("_", "-")
    with pytest.raises(ValueError, match=f"{flag}: .*{hint}"):
        check_option_names({"max_num_seqs": 4, option: 1})


def test_a_cache_without_room_for_a_sequence_is_told_in_mib_and_with_our_flag() -> None:
    told = small_cache({"kv_cache_memory_bytes": 3 * 2**18, "max_model_len": 12})
    assert "0.75 MiB" in told and "12 tokens" in told
    assert "--rollout-kv-cache-gb must be more than 0.00073 (GiB)" in told


def test_a_model_without_kernels_of_the_engine_is_refused() -> None:
    """Before the engine is built, whose own message names no size that it has."""
    _, layout = layouts_of(MOE)
    with pytest.raises(ValueError, match="head_dim 2"):
        capabilities.check_model_support("cpu", layout.spec)
    for rank in (512, 16):
        latent = LatentAttention(4, 0, rank, nope_head_dim=32, rope_head_dim=64, v_head_dim=24)
        spec = with_attention(layout.spec, latent)
        told = r"qk_rope_head_dim 80: .* for 576 channels only"
        with nullcontext() if rank == 512 else pytest.raises(ValueError, match=told):
            capabilities.check_model_support("cpu", spec)


@pytest.mark.parametrize(
    ("dp", "ranks"), [(2, [0, 1, 2, 3, 0, 1, 2, 3]), (1, list(range(8))), (4, list(range(8)))]
)
def test_ranks_are_counted_within_their_replica(
    dp: int, ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes the data-parallel rank from RANK // tp, which must stay below dp."""
    found = []
    fake = ModuleType("vllm")

    def build(model: str) -> SimpleNamespace:
        found.append(int(os.environ["RANK"]))
        return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=None))

    vars(fake)["LLM"] = build
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(shared_memory_names, "own", lambda: None)
    for rank in range(8):
        monkeypatch.setenv("RANK", str(rank))
        engine = object.__new__(VllmEngine)
        vars(engine).update(_rank=rank, _layout=SimpleNamespace(engine=EngineLayout(8, 2, dp)))
        with preserved_environment():  # as the engine is built
            engine._build("model", {})
        assert os.environ["RANK"] == str(rank), "the rest of the process has its own rank"
    assert found == ranks
    assert dp == 1 or max(found) // 2 < dp
