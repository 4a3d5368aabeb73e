"""Training checkpoints: exact resume, other layouts, killed saves, clear refusals."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support.family_models import FAMILY_CASES, write_family_model
from support.spawn import RankError, run_ranks

from mindspeed_rl.checkpoint.resume import TRACKER, find_latest, read_record
from mindspeed_rl.config.training import CheckpointConfig
from mindspeed_rl.launch.bootstrap import World

if TYPE_CHECKING:
    from mindspeed_rl.config import RLRunConfig
    from mindspeed_rl.launch.job import Job
    from mindspeed_rl.planning.run_plan import RLPlan
    from mindspeed_rl.trainer.checkpoint import LoadedState
    from mindspeed_rl.trainer.train_engine import TrainEngine

pytestmark = pytest.mark.distributed

NUM_STEPS = 4
# Warm-up and decay, so that a schedule that counts wrongly shows; dropout, so that a wrong random
# state shows. 307 ids pad to 312 rows on one tensor-parallel rank and to 320 on two.
FLAGS = ("--lr", "1e-3", "--lr-warmup-iters", "1", "--lr-decay-iters", "8",
         "--lr-decay-style", "cosine", "--weight-decay", "0.1",
         "--make-vocab-size-divisible-by", "8")  # fmt: skip
DROPOUT = ("--hidden-dropout", "0.1")
SHARDED = ("--use-distributed-optimizer",)
TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
EXTRA = {"sampler": {"position": 7}, "version": 2}
# Two steps further in another layout, relative: losses and gradient norms (measured: 1.5e-7), and
# whole weights, of which AdamW moves small ones by the sign of their gradient (measured: 4.3e-5).
STEP_TOLERANCE = 1e-6
WEIGHT_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Trace:
    """What the steps of a part of a run gave.

    Attributes:
        steps: (loss, gradient norm, learning rate) of each.
        local: this rank's parameters after the last step.
        weights: the whole model by HF name, on rank 0.
        step_tensors: (optimizer step, number of its distinct tensors, parameters).
    """

    steps: list[tuple[float, float, float]]
    local: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    step_tensors: tuple[float, int, int]


def build(
    world: World, flags: Sequence[str], model: str
) -> tuple[Job[RLRunConfig, RLPlan], TrainEngine]:
    """A job and its policy, with all random states as at the start of a run."""
    from support.training_worlds import start_job

    job = start_job(world, model, [*FLAGS, *flags])
    return job, rebuild(job)


def rebuild(job: Job[RLRunConfig, RLPlan]) -> TrainEngine:
    """Another policy in the same world, with random states as at the start of a run."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from mindspeed_rl.launch.bootstrap import seed_everything
    from mindspeed_rl.rl.build_models import build_engine

    model_parallel_cuda_manual_seed(job.config.train.seed)
    seed_everything(job.config.train.seed)
    return build_engine(job, "policy", NUM_STEPS)


def train(job: Job[RLRunConfig, RLPlan], engine: TrainEngine, start: int, stop: int) -> Trace:
    """Steps start+1 .. stop, each on samples of its own."""
    from support.batches import local_batches
    from support.training_worlds import in_hf_coordinates, make_samples

    from mindspeed_rl.algorithms.losses import supervised_loss
    from mindspeed_rl.metrics.metric_set import Mean, MetricSet, reduce_metrics
    from mindspeed_rl.trainer.optimizer import torch_optimizers

    steps = []
    for step in range(start + 1, stop + 1):
        samples = make_samples(307, seed=step)
        num_tokens = sum(s.num_trained for s in samples)
        found = engine.forward_backward(
            local_batches(job, engine, samples),
            partial(supervised_loss, num_tokens=num_tokens),
        )
        stats = engine.step()
        silent: MetricSet = MetricSet({"loss": Mean(0.0, 0.0)})
        loss = reduce_metrics(silent.merge(found))["loss"]
        steps.append((loss, stats.grad_norm, stats.learning_rate))
    tensors = [
        state["step"]
        for optimizer in torch_optimizers(engine.optimizer)
        for state in optimizer.state.values()
    ]
    counted = (float(tensors[0]), len({t.data_ptr() for t in tensors}), len(tensors))
    parameters = engine.named_parameters()
    local = {name: p.detach().clone() for name, p in parameters.items()}
    floats = {name: p.detach().float() for name, p in parameters.items()}
    return Trace(steps, local, in_hf_coordinates(job, floats), counted)


def train_whole_and_half(
    world: World, flags: Sequence[str], model: str, folder: str
) -> tuple[Trace, int]:
    """Rank function: all steps without saving; then, anew, the first half and a save.

    Also returns how many processes the save has left.
    """
    import multiprocessing

    from mindspeed_rl.trainer.checkpoint import save_checkpoint

    job, engine = build(world, flags, model)
    whole = train(job, engine, 0, NUM_STEPS)
    engine = rebuild(job)
    train(job, engine, 0, 2)
    save_checkpoint(folder, 2, engine, EXTRA)
    return whole, len(multiprocessing.active_children())


def resume_and_train(
    world: World, flags: Sequence[str], model: str, folder: str
) -> tuple[Trace, LoadedState]:
    """Rank function: the rest of the run, in new processes."""
    from mindspeed_rl.trainer.checkpoint import load_checkpoint

    job, engine = build(world, flags, model)
    torch.rand(17)  # a random state that is not restored would now be another
    loaded = load_checkpoint(folder, engine, CheckpointConfig())
    return train(job, engine, loaded.step, NUM_STEPS), loaded


@pytest.mark.parametrize(
    "flags",
    [
        (*SHARDED, *DROPOUT),
        pytest.param((*TP2, "--sequence-parallel", *DROPOUT), marks=pytest.mark.slow),
        pytest.param((*TP2, "--bf16"), marks=pytest.mark.slow),
    ],
    ids=["dp2-sharded", "tp2-sp", "tp2-bf16"],
)
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    flags: tuple[str, ...], tiny_model: Path, tmp_path: Path
) -> None:
    """Losses, gradient norms, learning rates and parameters, on every rank."""
    args = (flags, str(tiny_model), str(tmp_path / "save"))
    before = run_ranks(train_whole_and_half, 2, work_dir=tmp_path, args=args)
    after = run_ranks(resume_and_train, 2, work_dir=tmp_path, args=args)
    for (whole, _), (rest, loaded) in zip(before, after, strict=True):
        assert loaded.step == 2 and loaded.extra == EXTRA
        assert rest.steps == whole.steps[2:]
        assert rest.local.keys() == whole.local.keys()
        for name, value in rest.local.items():
            assert torch.equal(value, whole.local[name]), name
        step, num_distinct, num_parameters = rest.step_tensors
        assert step == NUM_STEPS and num_distinct == num_parameters > 1
    rates = [rate for _, _, rate in before[0][0].steps]
    assert len(set(rates)) == NUM_STEPS, "a constant rate would hide a wrong position"
    assert (tmp_path / "save" / TRACKER).read_text() == "2\n"
    assert [num_children for _, num_children in before] == [0, 0], "a manager process was spawned"


def resume_and_export(
    world: World, flags: Sequence[str], model: str, folder: str
) -> tuple[Trace, str]:
    """Rank function: the rest of the run in new processes, another save, and an export."""
    from mindspeed_rl.trainer.checkpoint import load_checkpoint, save_checkpoint
    from mindspeed_rl.trainer.export import export_policy

    job, engine = build(world, flags, model)
    loaded = load_checkpoint(folder, engine, CheckpointConfig())
    rest = train(job, engine, loaded.step, NUM_STEPS)
    save_checkpoint(folder, NUM_STEPS, engine, EXTRA)
    export_policy(job, engine, f"{folder}-hf", NUM_STEPS)
    return rest, f"{folder}-hf"


@pytest.mark.parametrize("optimizer", [SHARDED, ()], ids=["sharded", "whole"])
def test_a_stage_without_experts_saves_resumes_and_exports(
    optimizer: tuple[str, ...], tmp_path: Path
) -> None:
    """DeepSeek with dense layers on the first stage, whose optimizer of experts is empty."""
    case = FAMILY_CASES["deepseek-plain"]
    case = replace(case, changes={**case.changes, "vocab_size": 307})
    model = str(write_family_model(case, tmp_path / "model"))
    flags = (*PP2, "--expert-model-parallel-size", "2", *optimizer)
    args = (flags, model, str(tmp_path / "save"))
    before = run_ranks(train_whole_and_half, 4, work_dir=tmp_path, args=args)
    after = run_ranks(resume_and_export, 4, work_dir=tmp_path, args=args)
    with_experts = 0
    for (whole, _), (rest, _) in zip(before, after, strict=True):
        assert rest.steps == whole.steps[2:]
        assert rest.local.keys() == whole.local.keys()
        with_experts += any("experts" in name for name in rest.local)
        for name, value in rest.local.items():
            assert torch.equal(value, whole.local[name]), name
    assert with_experts == 2, "the first stage has experts"
    exported = load_file(Path(after[0][1]) / "model.safetensors")
    for name, value in before[0][0].weights.items():
        assert torch.equal(exported[name], value), name


@pytest.mark.slow
def test_other_layouts_continue_the_run(tiny_model: Path, tmp_path: Path) -> None:
    """TP 2 x PP 2 -> one rank, TP 2, DP 2; weights, moments, step, padded vocabulary."""
    folder = str(tmp_path / "save")
    source = (*TP2, *PP2, *SHARDED)
    args = (source, str(tiny_model), folder)
    whole, _ = run_ranks(train_whole_and_half, 4, work_dir=tmp_path, args=args)[0]
    for flags, num_ranks in ((SHARDED, 1), ((*TP2, *SHARDED), 2), (SHARDED, 2)):
        args = (flags, str(tiny_model), folder)
        rest, loaded = run_ranks(resume_and_train, num_ranks, work_dir=tmp_path, args=args)[0]
        assert any("random states start from --seed" in note for note in loaded.notes)
        for found, expected in zip(rest.steps, whole.steps[2:], strict=True):
            assert found == pytest.approx(expected, rel=STEP_TOLERANCE)
        for name, value in rest.weights.items():
            error = float((value - whole.weights[name]).norm() / whole.weights[name].norm())
            assert error <= WEIGHT_TOLERANCE, (name, error)


def resume_weights(world: World, flags: Sequence[str], model: str, folder: str) -> int:
    """Rank function: a start from the weights of a checkpoint; the updates that are counted."""
    from mindspeed_rl.trainer.checkpoint import load_checkpoint

    _, engine = build(world, flags, model)
    load_checkpoint(folder, engine, CheckpointConfig(no_load_optim=True, no_load_rng=True))
    return engine.schedule.num_updates


@pytest.mark.slow
@pytest.mark.parametrize("saved_apart", [False, True])
def test_the_optimizer_of_experts_is_neither_divided_nor_joined(
    saved_apart: bool, tmp_path: Path
) -> None:
    """Refused by the flag in both directions; weights alone are taken."""
    case = FAMILY_CASES["qwen3-moe"]
    case = replace(case, changes={**case.changes, "vocab_size": 307})
    model, folder = str(write_family_model(case, tmp_path / "model")), str(tmp_path / "save")
    whole, apart = SHARDED, (*SHARDED, "--expert-model-parallel-size", "2")
    before, after = (apart, whole) if saved_apart else (whole, apart)
    run_ranks(train_whole_and_half, 2, work_dir=tmp_path, args=(before, model, folder))
    with pytest.raises(RankError, match="--expert-model-parallel-size") as refused:
        run_ranks(resume_and_train, 2, work_dir=tmp_path, args=(after, model, folder))
    assert "--no-load-optim" in str(refused.value)
    assert run_ranks(resume_weights, 2, work_dir=tmp_path, args=(after, model, folder)) == [2, 2]


def die_in_second_save(world: World, model: str, folder: str) -> None:
    """Rank function: rank 1 is killed when the tensors of its second save are half written."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    from mindspeed_rl.trainer.checkpoint import save_checkpoint

    job, engine = build(world, SHARDED, model)
    train(job, engine, 0, 1)
    save_checkpoint(folder, 1, engine, {})
    train(job, engine, 1, 2)
    if world.rank == 1:

        def die(*args: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        with mock.patch.object(TorchDistSaveShardedStrategy, "save", die):
            save_checkpoint(folder, 2, engine, {})
    save_checkpoint(folder, 2, engine, {})


def go_on(world: World, model: str, folder: str) -> tuple[LoadedState, str]:
    """Rank function: resume, train a step, save again."""
    from mindspeed_rl.trainer.checkpoint import load_checkpoint, save_checkpoint

    job, engine = build(world, SHARDED, model)
    loaded = load_checkpoint(folder, engine, CheckpointConfig())
    train(job, engine, loaded.step, 2)
    return loaded, str(save_checkpoint(folder, 2, engine, {}))


@pytest.mark.slow
def test_kill_during_a_save_leaves_the_previous_checkpoint(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "save"
    args = (str(tiny_model), str(folder))
    with pytest.raises(RankError, match=r"rank 1.*SIGKILL"):
        run_ranks(die_in_second_save, 2, work_dir=tmp_path, args=args)
    assert (folder / "iter_0000002.partial").is_dir()
    for loaded, saved in run_ranks(go_on, 2, work_dir=tmp_path, args=args):
        assert loaded.step == 1
        assert any("iter_0000002.partial: its save did not finish" in n for n in loaded.notes)
        assert saved == str(folder / "iter_0000002")
    assert not (folder / "iter_0000002.partial").exists()
    assert find_latest(folder).path == folder / "iter_0000002"


def refusals(world: World, model: str, other_model: str, folder: str) -> dict[str, str]:
    """Rank function: message by what is wrong; and what ``--finetune`` and the opt-outs do."""
    from support.training_worlds import make_job

    from mindspeed_rl.trainer.checkpoint import load_checkpoint, save_checkpoint

    job, engine = build(world, SHARDED, model)
    train(job, engine, 0, 1)
    save_checkpoint(f"{folder}/bare", 1, engine, EXTRA, with_optimizer=False, with_rng=False)
    save_checkpoint(f"{folder}/full", 1, engine, EXTRA)
    trained = {name: p.detach().clone() for name, p in engine.named_parameters().items()}
    messages = {}

    def attempt(name: str, where: str, loader: TrainEngine, **options: bool) -> None:
        try:
            loaded = load_checkpoint(f"{folder}/{where}", loader, CheckpointConfig(**options))
        except ValueError as error:
            messages[name] = str(error)
        else:
            messages[name] = f"step {loaded.step}, updates {loader.schedule.num_updates}"
            for key, value in loader.named_parameters().items():
                assert torch.equal(value, trained[key]), (name, key)

    attempt("no such folder", "absent", rebuild(job))
    attempt("no optimizer", "bare", rebuild(job))
    attempt("no random states", "bare", rebuild(job), no_load_optim=True)
    attempt("weights and step", "bare", rebuild(job), no_load_optim=True, no_load_rng=True)
    attempt("finetune", "full", rebuild(job), finetune=True)
    config = replace(
        job.config, parallel=replace(job.config.parallel, use_distributed_optimizer=False)
    )
    attempt("other optimizer", "full", rebuild(replace(job, config=config)))
    other = make_job(world, other_model, [*FLAGS, *SHARDED])
    attempt("other model", "full", rebuild(other))
    Path(f"{folder}/empty").mkdir(exist_ok=True)
    fresh = rebuild(job)
    fresh.schedule.num_updates = 0
    empty = load_checkpoint(f"{folder}/empty", fresh, CheckpointConfig())
    messages["empty folder"] = f"step {empty.step}: {' '.join(empty.notes)}"
    return messages


@pytest.mark.slow
def test_refusals_name_the_flag_that_helps(
    tiny_model: Path, tied_model: Path, tmp_path: Path
) -> None:
    args = (str(tiny_model), str(tied_model), str(tmp_path))
    (messages,) = run_ranks(refusals, 1, work_dir=tmp_path, args=args)
    assert "--load" in messages["no such folder"] and "no such dir" in messages["no such folder"]
    assert "add --no-load-optim" in messages["no optimizer"]
    assert "add --no-load-rng" in messages["no random states"]
    assert messages["weights and step"] == "step 1, updates 1"  # The schedule goes on
    assert messages["finetune"] == "step 0, updates 0"
    assert "--use-distributed-optimizer" in messages["other optimizer"]
    assert "tie_embeddings False (model: True)" in messages["other model"]
    assert "step 0: --load" in messages["empty folder"]
    assert "starting from --hf-checkpoint" in messages["empty folder"]
    record = read_record(tmp_path / "full" / "iter_0000001")
    assert asdict(record)["extra"] == EXTRA and record.has_rng
