"""vLLM-Ascend's real engine, built by the product beside a trainer, generates on emulated NPUs.

Real: ``vllm.LLM``, vLLM-Ascend's platform, worker, runner, scheduler, sampler, models and the
bookkeeping of its sleep mode. Emulated: CANN, the kernels (CPU references), the C++ extension and
with it the virtual memory of the pool. The models are in fp32, which the attention of a device does
not have, so that log-probs can be compared closely.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend import engine_worlds
from ascend.emulator.build import ASCEND_FOLDER, OPERATORS
from ascend.npu_ranks import needs_mindspeed, run_npu_ranks

from mindspeed_rl.core.layout import EngineLayout

pytestmark = pytest.mark.ascend_emul

# In latent attention vLLM-Ascend 0.23 rounds what a prompt's attention reads to bfloat16.
TOLERANCES = {"qwen2": 2e-4, "qwen3_moe": 2e-4, "deepseek_v3": 5e-3}
# What stays replaced, and is meant to.
KEPT = {
    "torch.accelerator.empty_cache",  # lead to the functions of torch.npu
    "torch.accelerator.memory_reserved",
    "torch.accelerator.memory_stats",
    "torch.accelerator.reset_peak_memory_stats",
    "torch.cuda.set_stream",  # vLLM's, which calls the one before and remembers the stream
    "torch.jit._get_trace_graph",  # torch's own, when its compiler is imported
    "torch.jit.trace",
    "torch.jit.trace_module",
}
Life = tuple[str, list[str], dict[str, Any]]


def write_models(root: Path, family: str) -> list[str]:
    """Two checkpoints with other weights."""
    import make_tiny_model

    return [
        str(make_tiny_model.write_tiny_model(root / f"{family}-{seed}", family=family, seed=seed))
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module", params=TOLERANCES)
def life(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Life:
    """A family, its checkpoints, and what one rank saw."""
    root = tmp_path_factory.mktemp(request.param)
    folders = write_models(root, request.param)
    world = engine_worlds.whole_life
    (found,) = run_npu_ranks(
        world, 1, work_dir=root / "ranks", args=(folders, "float32", EngineLayout(1, 1))
    )
    return request.param, folders, found


def logprobs(
    folder: str, prompt: Sequence[int], tokens: Sequence[int], temperature: float
) -> list[float]:
    """What transformers' model says about the tokens after a prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    scores = (logits / temperature).log_softmax(-1)
    return [float(row[token]) for row, token in zip(scores, tokens, strict=True)]


def assert_logprobs(folder: str, sampled: engine_worlds.Sampled, tolerance: float) -> None:
    """Of every token, those of the distribution that it was sampled from."""
    settings = engine_worlds.SETTINGS
    for number, (tokens, found) in sampled.items():
        assert len(tokens) == settings.max_response_tokens
        prompt = engine_worlds.PROMPTS[number]
        expected = logprobs(folder, prompt, tokens, settings.temperature)
        assert found == pytest.approx(expected, abs=tolerance), number


def test_its_logprobs_are_those_of_what_it_samples_from(life: Life) -> None:
    """At temperature 0.7, from a checkpoint that its loaders wrote."""
    family, folders, found = life
    first, again = found["sampled"]
    assert len({tokens for tokens, _ in first.values()}) == len(engine_worlds.PROMPTS)
    assert first == again, "the seed of a request fixes its tokens"
    assert_logprobs(folders[0], first, TOLERANCES[family])


def test_weights_that_are_written_after_sleep_are_read(life: Life) -> None:
    """Bits of all parameters; and log-probs of the other checkpoint."""
    family, folders, found = life
    assert found["different"] == []
    assert_logprobs(folders[1], found["other"], TOLERANCES[family])
    tokens = found["other"][3][0]
    expected = logprobs(folders[1], engine_worlds.PROMPTS[3], tokens, 1.0)
    scored = [score for score, _ in found["scored"][0]]
    assert scored[-len(tokens) :] == pytest.approx(expected, abs=TOLERANCES[family])


def test_it_is_built_beside_a_trainer_and_gives_its_memory_back(life: Life) -> None:
    _, _, found = life
    assert found["trainer_bytes"] > 0.55 * 61 * engine_worlds.GIB
    assert found["freed"] == found["owned"] > 32 * 2**20
    assert found["format"].startswith("engine weights: not in NZ")


def test_what_is_saved_are_tensors(life: Life) -> None:
    """Not the free memory of the pool, whose segments have 2 MiB and more."""
    family, _, found = life
    assert 0 < found["saved"] < 2**20, (family, found["saved"])


def assert_restored(found: dict[str, Any]) -> None:
    """Functions of torch and Python that are others after the engine was built."""
    replaced = {n: change for n, change in found["replaced"].items() if n not in KEPT}
    twice = {n for n, (was, _) in replaced.items() if was.startswith("<module 'torch_npu.npu.")}
    assert replaced.keys() == twice, "vLLM-Ascend imports modules of torch_npu by a second name"


def test_the_process_is_as_it_was(life: Life) -> None:
    """Functions, and variables, of which CANN has read its own already."""
    _, _, found = life
    assert_restored(found)
    assert all(name.startswith("VLLM_") for name in found["variables"])
    operators = Path(os.environ["MINDSPEED_RL_ASCEND_EMULATOR"], ASCEND_FOLDER, OPERATORS)
    assert found["operators"] == str(operators), "set before the first operator"
    assert found["formats"] == ("disable", "disable"), "of the trainer's tensors"


@pytest.mark.parametrize("expert_parallel", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_data_parallel_ranks(expert_parallel: bool, tmp_path: Path) -> None:
    """Experts by rank or in slices; one rank has fewer prompts and steps along until the end."""
    folders = write_models(tmp_path, "qwen3_moe")
    layout = EngineLayout(2, 1, 2, expert_parallel)
    args = (folders, "float32", layout)
    ranks = run_npu_ranks(engine_worlds.whole_life, 2, work_dir=tmp_path / "ranks", args=args)
    for rank, found in enumerate(ranks):
        first, again = found["sampled"]
        assert set(first) == ({3} if rank else {0, 1, 2}) and first == again
        assert_logprobs(folders[0], first, TOLERANCES["qwen3_moe"])
        assert_logprobs(folders[1], found["other"], TOLERANCES["qwen3_moe"])
        assert found["different"] == [] and found["freed"] == found["owned"]
    assert ranks[0]["steps"].steps == ranks[1]["steps"].steps
    assert ranks[0]["steps"].reductions == ranks[0]["steps"].steps, "one per step"


def test_experts_move_between_ranks_with_an_update(tmp_path: Path) -> None:
    """Another way in each layer: samples stay, and tokens are counted for the same experts."""
    folder = write_models(tmp_path, "qwen3_moe")[0]
    layout = EngineLayout(2, 1, 2, expert_parallel=True)
    ranks = run_npu_ranks(
        engine_worlds.moved_experts, 2, work_dir=tmp_path / "ranks", args=(folder, layout)
    )
    for found in ranks:
        assert {n: tokens for n, (tokens, _) in found.moved.items()} == {
            n: tokens for n, (tokens, _) in found.linear.items()
        }
        assert_logprobs(folder, found.linear, TOLERANCES["qwen3_moe"])
        assert_logprobs(folder, found.moved, TOLERANCES["qwen3_moe"])
        assert found.unaware != found.moved, "the tables decide who computes an expert"
    linear, moved = (sum(found.loads[i] for found in ranks) for i in (0, 1))
    assert linear.equal(moved), "by expert, wherever it is"
    per_rank = [[int((found.loads[i] > 0).any(0).sum()) for found in ranks] for i in (0, 1)]
    assert per_rank[0] == [linear.shape[1] // 2] * 2, "each rank its own experts"
    chosen = torch.zeros_like(linear)
    for found in ranks:
        for number, (tokens, _) in found.linear.items():
            seen = experts_of(folder, [*engine_worlds.PROMPTS[number], *tokens[:-1]])
            for layer in range(seen.shape[1]):
                chosen[layer] += seen[:, layer].flatten().bincount(minlength=chosen.shape[1])
    assert bool((linear >= chosen).all()) and bool((linear - chosen).sum() < 0.5 * linear.sum())


@needs_mindspeed
def test_beside_the_real_adaptor_of_mindspeed(tmp_path: Path) -> None:
    """What it replaces in torch does not reach what the engine says."""
    folders = write_models(tmp_path, "qwen3_moe")
    args = (folders, "float32", EngineLayout(1, 1))
    (found,) = run_npu_ranks(
        engine_worlds.whole_life, 1, work_dir=tmp_path / "ranks", args=args,
        features={"use_fused_rmsnorm": True},
    )  # fmt: skip
    assert_logprobs(folders[0], found["sampled"][0], TOLERANCES["qwen3_moe"])
    assert_logprobs(folders[1], found["other"], TOLERANCES["qwen3_moe"])
    assert found["different"] == [] and found["freed"] == found["owned"]
    assert_restored(found)


def experts_of(folder: str, tokens: Sequence[int]) -> torch.Tensor:
    """What the routers of transformers' model choose: [tokens, layers with experts, k], sorted."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        scores = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    chosen = [each.topk(model.config.num_experts_per_tok).indices for each in scores]
    return torch.stack(chosen, 1).sort(-1).values


def test_it_tells_the_experts_that_predicted_each_token(tmp_path: Path) -> None:
    """Those of transformers' routers for the same tokens."""
    (folder, _) = write_models(tmp_path, "qwen3_moe")
    ((first, again),) = run_npu_ranks(
        engine_worlds.recorded_life, 1, work_dir=tmp_path / "ranks", args=(folder,)
    )
    assert first == again and set(first) == set(range(len(engine_worlds.PROMPTS)))
    seen = set()
    for number, (tokens, told) in first.items():
        prompt = engine_worlds.PROMPTS[number]
        expected = experts_of(folder, [*prompt, *tokens])[len(prompt) - 1 : -1]
        found = torch.frombuffer(bytearray(told), dtype=torch.uint8).view(expected.shape)
        assert torch.equal(found.sort(-1).values.long(), expected), number
        seen |= set(map(tuple, expected.flatten(1).tolist()))
    assert len(seen) > 8, "every token has the same experts"
