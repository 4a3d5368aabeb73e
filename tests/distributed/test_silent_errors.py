"""Errors that change nothing but the result: each has one test, on real ranks and a real engine.

They were found by research, not by crashes; what each test guards is in its docstring.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.rollout_worlds import (
    KV_BYTES,
    NUM_REQUESTS,
    SHARED_MEMORY,
    EngineFacts,
    engine_world,
    killed_world,
)
from support.spawn import RankError, run_ranks
from support.tiers import slow_but
from support.training_layouts import LAYOUT_PARAMETERS

from mindspeed_rl.core import owned_folders

if TYPE_CHECKING:
    from support.training_worlds import WorldResult

    from mindspeed_rl.core.types import Completion

pytestmark = pytest.mark.distributed

# Largest |log p(engine) - log p(reference)| of one token in nats, fp32.
MISMATCH_TOLERANCE = 2e-5
WORLDS = ("replicas", "tensor-parallel", "tied")
WORLD_PARAMETERS = slow_but(WORLDS, {"replicas"})
Facts = Callable[[str], list[EngineFacts]]


@pytest.fixture(scope="module")
def penalised_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a generation_config.json that would change the sampler."""
    import shutil

    folder = tmp_path_factory.mktemp("models") / "penalised"
    shutil.copytree(tiny_model, folder)
    settings = '{"do_sample": true, "repetition_penalty": 1.1, "top_k": 5, "temperature": 0.3}'
    (folder / "generation_config.json").write_text(settings)
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks that die write their last words."""
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def facts(
    penalised_model: Path,
    tied_model: Path,
    killed: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Facts:
    """What every rank of a world saw; each runs once. Another TP2 engine dies beside the first."""
    folder = tmp_path_factory.mktemp("engines")

    def run(name: str, num_ranks: int, trainer_tp: int, engine_tp: int) -> list[EngineFacts]:
        work = folder / name
        work.mkdir()
        model = tied_model if name == "tied" else penalised_model
        args = (str(model), trainer_tp, engine_tp, str(work))
        return run_ranks(engine_world, num_ranks, work_dir=work, args=args)

    def tensor_parallel() -> list[EngineFacts]:
        with ThreadPoolExecutor() as pool:
            dying = pool.submit(
                run_ranks, killed_world, 2, work_dir=killed, args=(str(tied_model), str(killed))
            )
            result = run("tensor-parallel", 2, 1, 2)
            error = dying.exception()
        assert isinstance(error, RankError), error
        assert -signal.SIGKILL in error.returncodes, error
        return result

    @cache
    def facts_of(world: str) -> list[EngineFacts]:
        if world == "tensor-parallel":
            return tensor_parallel()
        return run(world, 2, 2, 1) if world == "replicas" else run(world, 1, 1, 1)

    return facts_of


def completed(samples: list[Completion]) -> list[tuple[int, ...]]:
    return [c.token_ids for c in samples]


def match_share(a: list[Completion], b: list[Completion]) -> float:
    """Share of tokens that are equal, position by position."""
    pairs = list(zip(completed(a), completed(b), strict=True))
    equal = sum(x == y for p, q in pairs for x, y in zip(p, q, strict=False))
    return equal / sum(max(len(p), len(q)) for p, q in pairs)


@pytest.mark.parametrize("layout", LAYOUT_PARAMETERS)
def test_training_leaves_no_megatron_module_with_the_real_torch(
    layout: str, trained: Callable[[str], WorldResult]
) -> None:
    """A module imported late would run the CUDA branch, or another random state."""
    world = trained(layout)
    assert world.num_megatron_modules > 100
    assert world.unshimmed_modules == []
    assert not world.cuda_available


@pytest.mark.parametrize("world", WORLD_PARAMETERS)
def test_engine_leaves_the_process_as_it_was(world: str, facts: Facts) -> None:
    """Generators, environment (LOCAL_WORLD_SIZE, LD_PRELOAD), threads, groups, platform.

    Replicas generate batches of different sizes, which draw different amounts of random numbers.
    """
    for rank in facts(world):
        assert rank.changed_by_build == []
        assert rank.changed_by_generate == []
        assert rank.unshimmed_modules == []
        assert not rank.cuda_available
        assert rank.groups_stay, "what frees the engine must leave the trainer its groups"


@pytest.mark.parametrize("world", WORLD_PARAMETERS)
def test_samples_depend_on_their_seeds_alone(world: str, facts: Facts) -> None:
    """Equal in another batch, on another rank and in another engine layout."""
    for rank in facts(world):
        assert len(rank.samples) == NUM_REQUESTS
        assert len(set(completed(rank.samples))) > NUM_REQUESTS // 2, "samples must be diverse"
        assert match_share(rank.samples, rank.other_batches) >= 0.99
        assert completed(rank.samples) == completed(facts(world)[0].samples)


@pytest.mark.slow
def test_samples_do_not_depend_on_the_engine_layout(facts: Facts) -> None:
    """Two engines of one rank against one engine of two."""
    first, second = (facts(world)[0].samples for world in ("replicas", "tensor-parallel"))
    assert match_share(first, second) >= 0.99


@pytest.mark.parametrize("world", WORLD_PARAMETERS)
def test_engine_logprobs_are_those_of_the_tempered_trainer(world: str, facts: Facts) -> None:
    """At temperature 0.6, with a generation_config.json that asks for a penalty."""
    for rank in facts(world):
        assert rank.sampled_mismatch <= MISMATCH_TOLERANCE


@pytest.mark.parametrize("world", WORLD_PARAMETERS)
def test_three_syncs_equal_a_fresh_load(world: str, facts: Facts) -> None:
    """With tied embeddings too, where a packed head would keep the first weights."""
    for number, rank in enumerate(facts(world)):
        assert len(rank.syncs) == 3
        for sync in rank.syncs:
            assert sync.change > 0.01, "the update must show"
            assert sync.trainer <= MISMATCH_TOLERANCE
            assert sync.transformers <= MISMATCH_TOLERANCE
            assert sync.greedy_gap <= MISMATCH_TOLERANCE
        assert number or all(sync.transformers > 0.0 for sync in rank.syncs)


@pytest.mark.parametrize("world", WORLD_PARAMETERS)
def test_cached_prefix_is_not_served_after_an_update(world: str, facts: Facts) -> None:
    """With its negative control: a cache that is kept answers with old keys and values."""
    for rank in facts(world):
        assert rank.cached_prefix["kept"] > 100 * MISMATCH_TOLERANCE
        assert rank.cached_prefix["reset"] <= MISMATCH_TOLERANCE


@pytest.mark.parametrize("world", WORLD_PARAMETERS)
def test_generating_needs_the_weights_of_the_trainer(world: str, facts: Facts) -> None:
    """Asleep, at another version, or in the middle of an update."""
    for rank in facts(world):
        assert "the engine is without its cache" in rank.refusals["asleep"]
        assert "weights of version 0, the trainer is at 1" in rank.refusals["other version"]
        assert "weights of version -1" in rank.refusals["update begun"]


@pytest.mark.slow
def test_tensor_parallel_ranks_must_agree(facts: Facts) -> None:
    """VLLM answers different prompts of one engine with nonsense, without an error."""
    for rank in facts("tensor-parallel"):
        assert "ranks [1] of engine 0 were given other prompts" in rank.disagreement


@pytest.mark.parametrize("world", WORLD_PARAMETERS)
def test_sleep_gives_the_cache_back_to_the_system(world: str, facts: Facts) -> None:
    """Resident memory of the process, in two cycles of sleep and wake."""
    for rank in facts(world):
        assert min(rank.freed_bytes) > 0.9 * KV_BYTES


@pytest.mark.slow
def test_shared_memory_of_two_jobs_is_apart_and_leaves_no_name(facts: Facts, killed: Path) -> None:
    """Two TP2 engines ran at the same time, and one was killed; vLLM's own names would collide."""
    alive = facts("tensor-parallel")
    words = [(killed / f"killed-{rank}").read_text().split() for rank in range(2)]
    nonces = {rank.nonce for rank in alive} | {nonce for nonce, _ in words}
    assert len(nonces) == 2, "one name per job"
    assert all(int(num_tokens) > 0 for _, num_tokens in words)
    assert [rank.shared_memory for rank in alive] == [[], []], "unlinked while in use"
    owned_folders.sweep()
    left = [path.name for path in SHARED_MEMORY.iterdir()]
    assert not [name for name in left if any(nonce in name for nonce in nonces)]
