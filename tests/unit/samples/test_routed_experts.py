"""The experts of a response: which rows of which steps of the engine they were."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.rl_run import make_run

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.types import Completion, Prompt, Rollout
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.engines.vllm_ascend.routed_experts import ReturnedExperts
from mindspeed_rl.rollout.open_requests import OpenRequests
from mindspeed_rl.rollout.requests import GenerationRequest
from mindspeed_rl.samples.columns import experts_column, response_columns
from mindspeed_rl.samples.device_cache import TensorCache
from mindspeed_rl.samples.exchange import Redistribution
from mindspeed_rl.samples.rollout_info import RolloutInfo, SampleKey
from mindspeed_rl.samples.store import as_train_samples, keep_rollouts, responses_in
from mindspeed_rl.vllm_patches.routed_experts import ExpertRecorder

LAYERS, TOP_K = 4, 2
EXPERT_LAYERS = (1, 3)


def expert(position: int, layer: int, slot: int, who: int) -> int:
    """A number that says of whom it is; the token at a position is the position."""
    return (16 * who + 4 * position + 2 * (layer == 3) + slot) % 256


class Capturer:
    """vLLM's buffer of a step: rows of all layers."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []

    def snapshot_routing_data(self, num_tokens: int) -> torch.Tensor:
        """[tokens, layers, k] uint8; a layer without experts is never written."""
        assert num_tokens == len(self.rows)
        values = [
            [
                [expert(p, layer, s, who) if layer in EXPERT_LAYERS else 255 for s in range(TOP_K)]
                for layer in range(LAYERS)
            ]
            for who, p in self.rows
        ]
        return torch.tensor(values, dtype=torch.uint8)


class Engine:
    """A recorder and the steps of a model runner."""

    def __init__(self) -> None:
        self.recorder = ExpertRecorder(EXPERT_LAYERS)
        self.capturer = Capturer()
        self.recorder._capturer = self.capturer

    def step(self, wrong: int = 0, **scheduled: tuple[int, int]) -> None:
        """Each request computes so many tokens from a position on.

        The last ``wrong`` ones are of drafts that are not kept.
        """
        self.capturer.rows = [
            (ord(name) + 5 * (i >= count - wrong), first + i)
            for name, (first, count) in scheduled.items()
            for i in range(count)
        ]
        token_ids = torch.arange(100).repeat(len(scheduled), 1)
        for row, (first, count) in zip(token_ids, scheduled.values(), strict=True):
            row[first + count - wrong :] = 99
        runner = SimpleNamespace(
            input_batch=SimpleNamespace(
                req_ids=list(scheduled),
                token_ids_cpu=token_ids.numpy(),
                num_computed_tokens_cpu=torch.tensor([f for f, _ in scheduled.values()]).numpy(),
            )
        )
        counts = {name: count for name, (_, count) in scheduled.items()}
        output = SimpleNamespace(
            num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values())
        )
        self.recorder.note(runner, output)


def taken(engine: Engine, name: str, first: int, count: int) -> bytes:
    """The experts of a response of so many tokens, the first of which a position predicted."""
    output = SimpleNamespace(token_ids=list(range(first + 1, first + 1 + count)))
    return engine.recorder.take(name, output, first, count)


def wanted(name: str, first: int, count: int) -> bytes:
    return bytes(
        expert(first + i, layer, slot, ord(name))
        for i in range(count)
        for layer in EXPERT_LAYERS
        for slot in range(TOP_K)
    )


def test_rows_belong_to_the_requests_of_a_step() -> None:
    """Prompts of different lengths, one behind a cached prefix; another order in a later step."""
    engine = Engine()
    engine.step(a=(0, 3), b=(4, 1))
    engine.step(b=(5, 1), a=(3, 1), c=(0, 2))
    engine.step()
    engine.step(a=(4, 1))
    assert taken(engine, "a", 2, 3) == wanted("a", 2, 3)
    assert taken(engine, "b", 4, 2) == wanted("b", 4, 2)
    with pytest.raises(RuntimeError, match="request a"):
        taken(engine, "a", 2, 3)
    engine.recorder.clear()
    with pytest.raises(RuntimeError, match="request c"):
        taken(engine, "c", 1, 1)


def test_a_request_that_was_put_off_is_computed_again() -> None:
    """Its experts stay those that predicted its tokens; the second time there may be others."""
    engine = Engine()
    engine.step(a=(0, 2))
    engine.step(a=(2, 1))
    with mock.patch(f"{__name__}.ord", lambda name: 3, create=True):
        engine.step(a=(1, 2))  # its first block was still there
    engine.step(a=(3, 2))
    assert taken(engine, "a", 1, 4) == wanted("a", 1, 4)


def test_tokens_of_a_draft_that_are_not_kept_have_no_experts() -> None:
    """Their places are computed again from the tokens that the response has."""
    engine = Engine()
    engine.step(a=(0, 3))
    engine.step(wrong=2, a=(3, 4))
    engine.step(wrong=1, a=(5, 2))
    engine.step(wrong=3, a=(4, 4))  # after the request was put off
    engine.step(a=(6, 2))
    assert taken(engine, "a", 2, 6) == wanted("a", 2, 6)


def test_experts_of_wrong_tokens_alone_are_told() -> None:
    engine = Engine()
    engine.step(a=(0, 3))
    engine.step(wrong=1, a=(3, 2))
    with pytest.raises(RuntimeError, match=r"request a .*\[2\]"):
        taken(engine, "a", 2, 3)


def test_a_token_without_experts_is_told() -> None:
    engine = Engine()
    engine.step(a=(0, 2))
    engine.step(a=(3, 1))
    with pytest.raises(RuntimeError, match=r"request a .*\[1\]"):
        taken(engine, "a", 1, 3)


class Port:
    """An engine that names requests itself."""

    def add(self, key: str, *about: Any, watched: bool) -> str:
        """The inner name of sample 0 is a."""
        return chr(ord("a") + int(key))

    def abort(self, keys: list[str]) -> None:
        """Nothing to give up."""

    def stream(self, name: str) -> None:
        """No random numbers."""


def finished(sample_id: int, first: int, num_tokens: int) -> Any:
    """The token at a position is the position."""
    token_ids = list(range(first, first + num_tokens))
    said = SimpleNamespace(
        finish_reason="length",
        token_ids=token_ids,
        logprobs=SimpleNamespace(token_ids=token_ids, logprobs=[-1.0] * num_tokens),
    )
    return SimpleNamespace(request_id=str(sample_id), outputs=[said], finished=True)


def test_completions_have_the_experts_of_the_places_that_predict_them() -> None:
    """The first token is predicted at the end of its prompt; the last one predicts nothing."""
    engine = Engine()
    open_requests = OpenRequests(Port(), 8, engine.recorder)
    requests = [GenerationRequest(i, (7,) * n, seed=i) for i, n in enumerate((3, 1))]
    open_requests.add(requests)
    engine.step(a=(0, 3), b=(0, 1))
    engine.step(a=(3, 1))
    done = open_requests.finish({0: finished(0, 3, 2), 1: finished(1, 1, 1)}, version=5)
    assert done[0].experts == wanted("a", 2, 2) and done[1].experts == wanted("b", 0, 1)
    plain = OpenRequests(Port(), 8)
    plain.add([requests[1]])
    assert plain.finish({1: finished(1, 1, 1)}, version=5)[1].experts is None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_samples_keep_them(dtype: torch.dtype) -> None:
    """From bytes to the trained tokens; nothing of a response that was cut and is left out."""
    column = experts_column(8 if dtype is torch.uint8 else 600, 4)
    assert column.dtype is dtype
    columns = response_columns(has_environment=False, experts=column)
    numbers = torch.arange(12).to(dtype) + (300 if dtype is torch.int16 else 0)
    raw = numbers.numpy().tobytes()
    half = len(raw) // 3
    pieces = (raw[: 2 * half], raw[2 * half :])
    rollouts = [
        Rollout(i, Prompt(i, (1, 2), "", ""), Completion((9,) * n, (-1.0,) * n, "length", 0,
                                                         experts=piece), 1.0)
        for i, (n, piece) in enumerate(zip((2, 1), pieces, strict=True))
    ]  # fmt: skip
    samples = [
        RolloutInfo(i, i, n, n, False, 0, 0, 1.0, key=SampleKey(1, i)) for i, n in enumerate((2, 1))
    ]
    cache = TensorCache(torch.device("cpu"))
    cache.begin_step(1)
    keep_rollouts(cache, columns, rollouts, samples)
    kept = Redistribution(cache, samples, columns, ())
    prompts = [torch.tensor([1, 2])] * 2
    responses = responses_in(kept, (0, 1), samples, columns)
    trained = as_train_samples(samples, prompts, responses)
    for sample, expected in zip(trained, numbers.view(3, 4).split([2, 1]), strict=True):
        assert torch.equal(sample.columns["experts"], expected)
        assert sample.columns["experts"].dtype is dtype and sample.num_trained == len(expected)
    for dropped in as_train_samples(samples, prompts, responses, drop_truncated=True):
        assert dropped.columns["experts"].shape == (0, 4)
        assert dropped.num_trained == 0


def asked(tmp_path: Path, **engine: Any) -> RLRunConfig:
    """A run that replays the engine's experts."""
    config = make_run(tmp_path).config
    rollout = replace(
        config.rollout,
        rl_inference_expert_model_parallel_size=engine.pop("expert_parallel", 1),
        rollout_dp=engine.pop("data_parallel", 1),
    )
    return replace(
        config,
        rl=replace(config.rl, rl_routing_replay="rollout"),
        rollout=rollout,
        engine=replace(config.engine, **engine),
    )


def install(monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    """A build of vLLM-Ascend; none with an empty name."""

    def version(name: str) -> str:
        if not build:
            raise PackageNotFoundError(name)
        return build

    monkeypatch.setattr("mindspeed_rl.compat.ascend_builds.version", version)


def test_an_engine_that_does_not_tell_is_refused(tmp_path: Path) -> None:
    engine_provider().check_run(asked(tmp_path), "cpu")
    with pytest.raises(UsageError, match="--rl-routing-replay rollout"):
        engine_provider().check_run(asked(tmp_path), "cuda")


@pytest.mark.parametrize(
    ("build", "known"),
    [
        *(("", True), ("0.23.0", True), ("0.23.0.post1", True), ("0.23.0.post1+a3", True)),
        *(("0.22.1rc1", False), ("0.23.0rc1", False), ("0.23.0.post2", False)),
        *(("0.24.0rc1", False), ("0.26.0", False)),
    ],
)
def test_builds_of_vllm_ascend_that_tell(
    build: str, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those whose sources were read; without one the answer is that of the pinned one."""
    install(monkeypatch, build)
    if known:
        engine_provider().check_run(asked(tmp_path), "npu")
        return
    with pytest.raises(UsageError, match=f"--rl-routing-replay rollout.*{re.escape(build)}"):
        engine_provider().check_run(asked(tmp_path), "npu")
    engine_provider().check_run(make_run(tmp_path).config, "npu")


@pytest.mark.parametrize(
    ("engine", "flag"),
    [({"expert_parallel": 2}, "--rollout-ep 2"), ({"data_parallel": 4}, "--rollout-dp 4"),
     ({"rollout_flashcomm": True}, "--rollout-flashcomm")],
)  # fmt: skip
def test_ranks_of_vllm_ascend_that_exchange_tokens_do_not_tell(
    engine: dict[str, Any], flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "0.23.0.post1")
    with pytest.raises(UsageError, match=flag):
        engine_provider().check_run(asked(tmp_path, **engine), "npu")
    engine_provider().check_run(asked(tmp_path, **engine), "cpu")


def ascend_engine(layers: Sequence[int]) -> Any:
    """An engine of vLLM-Ascend that records some layers."""
    modules = {
        f"layer {n}": SimpleNamespace(layer_id=n, _ascend_routed_experts_capturer=object())
        for n in layers
    }
    others = {"attention": SimpleNamespace(), "silent": SimpleNamespace(
        layer_id=0, _ascend_routed_experts_capturer=None)}  # fmt: skip
    compilation = SimpleNamespace(static_forward_context=modules | others)
    return SimpleNamespace(
        llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=compilation))
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_what_vllm_ascend_returns_is_cut_to_the_response(dtype: torch.dtype) -> None:
    """Rows from the one that predicts the first token on, of the layers with experts."""
    rows = [[[expert(p, layer, s, 5) for s in range(TOP_K)] for layer in range(LAYERS)]
            for p in range(7)]  # fmt: skip
    output = SimpleNamespace(routed_experts=torch.tensor(rows, dtype=dtype).numpy())
    found = ReturnedExperts(ascend_engine(EXPERT_LAYERS), EXPERT_LAYERS).take("a", output, 2, 4)
    expected = torch.tensor(list(wanted("\x05", 2, 4)), dtype=dtype)
    assert found == expected.numpy().tobytes()


@pytest.mark.parametrize("known", [None, 5])
def test_tokens_that_vllm_ascend_leaves_out_are_told(known: int | None) -> None:
    rows = None if known is None else torch.zeros(known, LAYERS, TOP_K, dtype=torch.uint8).numpy()
    returned = ReturnedExperts(ascend_engine(EXPERT_LAYERS), EXPERT_LAYERS)
    with pytest.raises(RuntimeError, match="request a"):
        returned.take("a", SimpleNamespace(routed_experts=rows), 2, 4)


def test_layers_that_vllm_ascend_does_not_record_are_told() -> None:
    with pytest.raises(RuntimeError, match=r"\[0, 3\]"):
        ReturnedExperts(ascend_engine([1, 2]), [0, 1, 3])
