"""Training checkpoints: exact resume, other layouts, killed saves, clear refusals."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoint_tensors import differing, whole_tensors
from support.family_models import FAMILY_CASES, write_family_model
from support.spawn import RankError, run_ranks

from mindspeed_rl.checkpoint.resume import TRACKER, find_latest, marks_of, read_record
from mindspeed_rl.config.training import CheckpointConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.launch.bootstrap import World

if TYPE_CHECKING:
    from mindspeed_rl.config import RLRunConfig
    from mindspeed_rl.launch.job import Job
    from mindspeed_rl.planning.run_plan import RLPlan
    from mindspeed_rl.trainer.train_engine import TrainEngine
    from mindspeed_rl.trainer_state.checkpoint import LoadedState

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

    from mindspeed_rl.building.models import build_engine
    from mindspeed_rl.launch.bootstrap import seed_everything

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

    from mindspeed_rl.trainer_state.checkpoint import save_checkpoint

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
    from mindspeed_rl.trainer_state.checkpoint import load_checkpoint

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
    from mindspeed_rl.rl.export import export_policy
    from mindspeed_rl.trainer_state.checkpoint import load_checkpoint, save_checkpoint

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


def save_again(world: World, flags: Sequence[str], model: str, source: str, target: str) -> str:
    """Rank function: load a checkpoint and save the state at once; the folder of the new one."""
    from mindspeed_rl.trainer_state.checkpoint import load_checkpoint, save_checkpoint

    _, engine = build(world, flags, model)
    loaded = load_checkpoint(source, engine, CheckpointConfig())
    return str(save_checkpoint(target, loaded.step, engine, EXTRA))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_apart", "optimizer"), [(False, ()), (True, SHARDED)], ids=["divided", "joined"]
)
def test_the_optimizer_of_experts_is_divided_and_joined(
    saved_apart: bool, optimizer: tuple[str, ...], tmp_path: Path
) -> None:
    """Expert-parallel size 1 to 2, or back: the run goes on, and no bit of its state changes."""
    case = FAMILY_CASES["qwen3-moe"]
    case = replace(case, changes={**case.changes, "vocab_size": 307})
    model, folder = str(write_family_model(case, tmp_path / "model")), str(tmp_path / "save")
    sides = (optimizer, (*optimizer, "--expert-model-parallel-size", "2"))
    before, after = reversed(sides) if saved_apart else sides
    args: tuple[Any, ...] = (before, model, folder)
    whole, _ = run_ranks(train_whole_and_half, 2, work_dir=tmp_path, args=args)[0]
    args = (after, model, folder, str(tmp_path / "again"))
    again = Path(run_ranks(save_again, 2, work_dir=tmp_path, args=args)[0])
    saved = find_latest(folder).path
    assert saved is not None and differing(saved, again) == []
    args = (after, model, str(again.parent))
    rest, loaded = run_ranks(resume_and_train, 2, work_dir=tmp_path, args=args)[0]
    assert loaded.step == 2
    for found, expected in zip(rest.steps, whole.steps[2:], strict=True):
        assert found == pytest.approx(expected, rel=STEP_TOLERANCE)
    for name, value in rest.weights.items():
        error = float((value - whole.weights[name]).norm() / whole.weights[name].norm())
        assert error <= WEIGHT_TOLERANCE, (name, error)


def die_in_second_save(world: World, model: str, folder: str) -> None:
    """Rank function: rank 1 is killed when the tensors of its second save are half written."""
    from mindspeed_rl.trainer_state.checkpoint import save_checkpoint
    from mindspeed_rl.trainer_state.patches.planned_save import PlannedSave

    job, engine = build(world, SHARDED, model)
    train(job, engine, 0, 1)
    save_checkpoint(folder, 1, engine, {})
    train(job, engine, 1, 2)
    if world.rank == 1:

        def die(*args: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        with mock.patch.object(PlannedSave, "write", die):
            save_checkpoint(folder, 2, engine, {})
    save_checkpoint(folder, 2, engine, {})


def die_in_background(world: World, model: str, folder: str) -> None:
    """Rank function: both ranks are killed in a step, while rank 1 writes the step before.

    Each says before it what lies on its disk, of rank 1 a file that is not whole, and how often the
    ranks have agreed which of them writes which weights.
    """
    import threading

    import torch.distributed as dist
    from megatron.core.dist_checkpointing.strategies import fully_parallel

    from mindspeed_rl.checkpoint import checksums
    from mindspeed_rl.checkpoint.background import BackgroundWriter
    from mindspeed_rl.trainer_state.checkpoint import plan_checkpoint

    job, engine = build(world, SHARDED, model)
    flags = {"with_optimizer": True, "with_rng": True, "companions": {}}
    writer, torn, write = BackgroundWriter(), threading.Event(), checksums.HashingFile.write

    def slowly(self: Any, data: bytes | memoryview) -> int:
        size = write(self, data)
        if self.tell() > 20_000:  # on the disk, with more to come
            self._file.flush()
            torn.set()
            threading.Event().wait()
        return size

    name = "determine_main_replica_uniform_distribution"
    agree = mock.Mock(side_effect=getattr(fully_parallel, name))
    setattr(fully_parallel, name, agree)
    train(job, engine, 0, 1)
    writer.start(plan_checkpoint(folder, 1, engine, {}, **flags))
    assert writer.wait() is not None
    train(job, engine, 1, 2)
    with mock.patch.object(checksums.HashingFile, "write", slowly if world.rank == 1 else write):
        writer.start(plan_checkpoint(folder, 2, engine, {}, **flags))
        train(job, engine, 2, 3)
        assert world.rank == 0 or torn.wait(60)
        files = Path(folder, "iter_0000002.partial").glob(f"__{world.rank}_*.distcp")
        sizes = [file.stat().st_size for file in files]
        told = [str(writer.poll()), agree.call_count, sorted(sizes)]
        Path(folder, f"told-{world.rank}").write_text(json.dumps(told))
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


DAMAGES: dict[str, tuple[str, int]] = {
    # File, and byte of it that is changed, counted from the end where negative.
    "weights": ("__0_0.distcp", 1000),
    "another rank's file": ("__1_0.distcp", -2000),
    "index": (".metadata", 300),
    "format": ("metadata.json", 5),
    "record": ("checkpoint.json", 400),
    "common state": ("common.pt", 200),
}


def load_damaged(world: World, model: str, folder: str) -> dict[str, tuple[int, str, bool]]:
    """Rank function: step, notes and equal weights of loads from copies with one damage each."""
    import shutil

    import torch.distributed as dist

    from mindspeed_rl.checkpoint.saving import UnwrittenCheckpoint
    from mindspeed_rl.trainer.optimizer import torch_optimizers
    from mindspeed_rl.trainer_state.checkpoint import load_checkpoint, save_checkpoint

    job, engine = build(world, SHARDED, model)
    root = Path(folder)
    train(job, engine, 0, 1)
    save_checkpoint(root / "sound", 1, engine, EXTRA)
    kept = {name: p.detach().clone() for name, p in engine.named_parameters().items()}
    train(job, engine, 1, 2)
    save_checkpoint(root / "sound", 2, engine, EXTRA)
    results = {}

    def attempt(name: str, damaged: str = "iter_0000002") -> None:
        dist.barrier()
        loaded = load_checkpoint(root / name, engine, CheckpointConfig())
        equal = all(torch.equal(p, kept[n]) for n, p in engine.named_parameters().items())
        if loaded.damaged or name == "sound":
            assert [path.name for path in loaded.damaged] == [damaged]
        results[name] = (loaded.step, " ".join(loaded.notes), equal)

    for name, (file, position) in DAMAGES.items():
        if world.rank == 0:
            shutil.copytree(root / "sound", root / name)
            damaged = bytearray((root / name / "iter_0000002" / file).read_bytes())
            damaged[position] ^= 0x40
            (root / name / "iter_0000002" / file).write_bytes(damaged)
        attempt(name)
    # Values that are not finite: a weight, and a moment of the rank that has a share of it.
    engine.named_parameters()["decoder.layers.1.mlp.linear_fc2.weight"].data[3, 5] = float("nan")
    (states,) = [optimizer.state for optimizer in torch_optimizers(engine.optimizer)]
    if world.rank == 1:
        next(iter(states.values()))["exp_avg_sq"][2] = float("inf")
    with pytest.raises(FloatingPointError) as refused:
        save_checkpoint(root / "sound", 3, engine, EXTRA)
    dist.barrier()
    results["refused"] = (0, str(refused.value), (root / "sound/iter_0000003.partial").exists())
    dist.barrier()  # The next save makes this folder again.
    with mock.patch.object(UnwrittenCheckpoint, "check_values"):
        save_checkpoint(root / "sound", 3, engine, EXTRA)
    attempt("sound", "iter_0000003")
    return results


def test_a_damaged_checkpoint_is_named_and_the_older_one_is_loaded(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Bytes that changed in any file, and values that are not finite, on every rank alike."""
    args = (str(tiny_model), str(tmp_path))
    for results in run_ranks(load_damaged, 2, work_dir=tmp_path, args=args):
        for name, (file, _) in DAMAGES.items():
            step, notes, equal = results[name]
            assert (step, equal) == (1, True), name
            assert f"ignored {tmp_path / name}/iter_0000002: {file} is" in notes, notes
        for where in ("refused", "sound"):
            step, told, kept = results[where]
            assert "decoder.layers.mlp.linear_fc2.weight at [1, 0, 0]: NaN in 1 of" in told, told
            assert "exp_avg_sq" in told and "infinity in 1 of" in told and "(rank " in told
            assert (step, kept) == ({"refused": 0, "sound": 2}[where], False)
    assert find_latest(tmp_path / "sound").path == tmp_path / "sound" / "iter_0000003"


def save_in_background(world: World, model: str, folder: str) -> dict[str, str]:
    """Rank function: weights change while a checkpoint waits for the disk; then a full disk.

    Also the same state as megatron-core gathers it, and folders that are not shared.
    """
    import errno
    import threading

    import torch.distributed as dist

    from mindspeed_rl.checkpoint import archives, tensor_files
    from mindspeed_rl.checkpoint.background import BackgroundWriter
    from mindspeed_rl.checkpoint.optimizer_shards import FORMAT
    from mindspeed_rl.checkpoint.shared_storage import check_listed, check_written
    from mindspeed_rl.trainer_state import checkpoint
    from mindspeed_rl.trainer_state.checkpoint import plan_checkpoint, save_checkpoint

    job, engine = build(world, SHARDED, model)
    root, writer, gate = Path(folder), BackgroundWriter(), threading.Event()
    flags = {"with_optimizer": True, "with_rng": True, "companions": {}}

    def late(*args: Any) -> archives.WrittenFile:
        assert gate.wait(120)
        return archives.write_archives(*args)

    def full(*args: Any) -> archives.WrittenFile:
        raise OSError(errno.ENOSPC, "no space", "the file")

    def gathered(optimizer: Any, model_state: Any, _: Any) -> tuple[Any, list[Any]]:
        asked = {"is_loading": False, "metadata": FORMAT}
        return optimizer.sharded_state_dict(model_state, **asked), []

    train(job, engine, 0, 1)
    save_checkpoint(root / "at-once", 1, engine, EXTRA)
    with mock.patch.object(checkpoint, "sharded_state", gathered):
        save_checkpoint(root / "gathered", 1, engine, EXTRA)
    with mock.patch.object(tensor_files, "write_archives", late):
        writer.start(plan_checkpoint(root / "later", 1, engine, EXTRA, **flags))
        train(job, engine, 1, 2)  # weights, masters and moments change
        told = {"meanwhile": f"{writer.poll()} {find_latest(root / 'later')}"}
        dist.barrier()
        gate.set()
        told["written"] = str(writer.wait())
    assert writer.wait() is None and writer.poll() is None
    unwritable = full if world.rank == 1 else archives.write_archives
    with mock.patch.object(tensor_files, "write_archives", unwritable):
        writer.start(plan_checkpoint(root / "later", 2, engine, EXTRA, **flags))
        with pytest.raises(OSError, match="rank 1") as failed:
            writer.wait()
    dist.barrier()
    found = find_latest(root / "later")
    told |= {"failed": str(failed.value), "left": f"{found.path} {found.ignored}"}
    check_written(str(root / "shared"), writes=True)
    own = root / f"of-rank-{world.rank}"
    with pytest.raises(UsageError) as unshared:
        check_written(str(own), writes=True, patience_s=0.5)
    (own / f"iter_{world.rank:07d}").mkdir()
    check_listed(str(root / "later"))
    with pytest.raises(UsageError) as unlisted:
        check_listed(str(own))
    rest = [*own.glob(".*"), *(root / "shared").iterdir()]
    return told | {"saved": str(unshared.value), "loaded": f"{unlisted.value} {rest}"}


def test_a_checkpoint_in_the_background_is_that_of_its_step(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Byte for byte the one that is written at once; a write that fails is told on every rank.

    Ranks write what they own, and together what a gather gives.
    """
    args = (str(tiny_model), str(tmp_path))
    results = run_ranks(save_in_background, 2, work_dir=tmp_path, args=args)
    at_once, later = (tmp_path / name / "iter_0000001" for name in ("at-once", "later"))
    for told in results:
        assert told["meanwhile"].startswith("None Found(path=None")
        assert "iter_0000001.partial: its save did not finish" in told["meanwhile"]
        assert told["written"] == str(later) and told["left"] == f"{later} ()"
        assert "the checkpoint after step 2 is not written: rank 1" in told["failed"]
        sizes = r"needs about [\d.]+ MiB, .* written, [\d.]+ [GM]iB are free"
        assert re.search(sizes, told["failed"])
        assert "no space" in told["failed"] and "earlier checkpoints are" in told["failed"]
    first, second = marks_of(at_once), marks_of(later)
    for marks in (first, second):
        del marks[".metadata"]  # it has a random number of its own
    assert first == second and sum(name.endswith(".distcp") for name in first) == 4
    assert differing(later, tmp_path / "gathered/iter_0000001") == []
    states = [name for name in whole_tensors(later) if name.startswith("optimizer.state.")]
    assert len(states) == 30 and all(whole_tensors(later)[name].isfinite().all() for name in states)
    for told in results:
        assert "is not on storage that all nodes share: rank 0 on" in told["saved"]
        assert "does not see what rank 1 on" in told["saved"] and "NFS" in told["saved"]
        assert "sees iter_0000000, rank 1 on" in told["loaded"]
        assert told["loaded"].endswith(" []"), "files of the check are left"


def go_on(world: World, model: str, folder: str) -> tuple[LoadedState, str]:
    """Rank function: resume, train a step, save again."""
    from mindspeed_rl.trainer_state.checkpoint import load_checkpoint, save_checkpoint

    job, engine = build(world, SHARDED, model)
    loaded = load_checkpoint(folder, engine, CheckpointConfig())
    train(job, engine, loaded.step, 2)
    return loaded, str(save_checkpoint(folder, 2, engine, {}))


@pytest.mark.parametrize(
    "die",
    [pytest.param(die_in_second_save, id="at once", marks=pytest.mark.slow),
     pytest.param(die_in_background, id="in the background")],
)  # fmt: skip
def test_kill_during_a_save_leaves_the_previous_checkpoint(
    die: Callable[[World, str, str], None], tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "save"
    args = (str(tiny_model), str(folder))
    with pytest.raises(RankError, match=r"rank 1.*SIGKILL"):
        run_ranks(die, 2, work_dir=tmp_path, args=args)
    assert (folder / "iter_0000002.partial").is_dir()
    for loaded, saved in run_ranks(go_on, 2, work_dir=tmp_path, args=args):
        assert loaded.step == 1
        assert any("iter_0000002.partial: its save did not finish" in n for n in loaded.notes)
        assert saved == str(folder / "iter_0000002")
    assert not (folder / "iter_0000002.partial").exists()
    assert find_latest(folder).path == folder / "iter_0000002"
    if die is die_in_background:
        told = [json.loads((folder / f"told-{rank}").read_text()) for rank in range(2)]
        assert [(saved, agreed) for saved, agreed, _ in told] == [("None", 1)] * 2
        whole = [path.stat().st_size for path in (folder / "iter_0000002").glob("__1_*.distcp")]
        torn = told[1][2]
        assert len(torn) == 2 and 20_000 < max(torn) < min(whole)


def refusals(world: World, model: str, other_model: str, folder: str) -> dict[str, str]:
    """Rank function: message by what is wrong; and what ``--finetune`` and the opt-outs do."""
    from support.training_worlds import make_job

    from mindspeed_rl.trainer_state.checkpoint import load_checkpoint, save_checkpoint

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
