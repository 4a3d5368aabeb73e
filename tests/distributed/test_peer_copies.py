"""Copies in the memory of neighbours: exact, always whole, and enough when a node is lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from distributed.test_checkpoint import EXTRA, NUM_STEPS, SHARDED, TP2, Trace, build, rebuild, train
from support.spawn import run_ranks

from mindspeed_rl.launch.attempt import PEER_FOLDER
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.planning.prediction import MemoryPrediction

if TYPE_CHECKING:
    from mindspeed_rl.trainer_state.checkpoint import LoadedState

pytestmark = pytest.mark.distributed

FLAGS = (*TP2, *SHARDED, "--bf16", "--hidden-dropout", "0.1", "--peer-checkpoint-steps", "1")


def on_node(world: World, root: str) -> Path:
    """Two ranks are a node; its folder, which the ranks are told."""
    folder = Path(root, f"node{world.rank // 2}")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[PEER_FOLDER] = str(folder)
    return folder


def train_whole_and_copy(
    world: World, flags: Sequence[str], model: str, root: str
) -> tuple[Trace, str]:
    """Rank function: all steps; then, anew, two steps with a copy after each, and a refused one."""
    from mindspeed_rl.peers.copies import open_copies

    on_node(world, root)
    job, engine = build(world, flags, model)
    whole = train(job, engine, 0, NUM_STEPS)
    engine = rebuild(job)
    copies = open_copies(job)
    assert copies is not None and copies.load({"": engine}) is None
    for step in (1, 2):
        train(job, engine, step - 1, step)
        copies.take(step, {"": engine}, {**EXTRA, "step": step})
    copies.wait()
    if world.rank == 1:
        next(iter(engine.named_parameters().values())).data.view(-1)[3] = torch.inf
    refused = ""
    try:
        copies.take(3, {"": engine}, {})
    except FloatingPointError as error:
        refused = str(error)
    from mindspeed_rl.peers.files import CopyId, read_record, state_path

    copy = CopyId(2, world.rank)
    folder = Path(os.environ[PEER_FOLDER])
    archive = read_record(folder, copy).plain[1]  # counters and random states
    stored = state_path(folder, copy).stat().st_size - archive
    predicted = MemoryPrediction(job.config, job.plan).peer_copies(world.rank)
    assert predicted == pytest.approx(2 * stored, rel=0.05), "the dry run; two steps on one node"
    return whole, refused


def recover(
    world: World, flags: Sequence[str], model: str, cases: Sequence[str], save: str
) -> list[tuple[LoadedState | None, Trace | None, list[str]]]:
    """Rank function: each case's state, the rest of the run from it, and files of a node."""
    from mindspeed_rl.peers.copies import open_copies

    results = []
    job: Any = None
    for root in cases:
        folder = on_node(world, root)
        if job is None:
            job, engine = build(world, (*flags, "--save", save), model)
        engine = rebuild(job)
        copies = open_copies(job)
        assert copies is not None
        torch.rand(17)  # a random state that is not restored would now be another
        loaded = copies.load({"": engine})
        rest = train(job, engine, loaded.step, NUM_STEPS) if loaded else None
        results.append((loaded, rest, sorted(path.name for path in folder.iterdir())))
        copies.forget()  # as a run does that goes back to an earlier checkpoint
        assert not any(folder.iterdir()) and copies.load({"": engine}) is None
    return results


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def test_a_job_goes_on_from_the_newest_whole_copies(tiny_model: Path, tmp_path: Path) -> None:
    """Undisturbed; with a node lost; with damage on one node, on both; with a rank's state gone."""
    model, first = str(tiny_model), tmp_path / "whole"
    save = str(tmp_path / "save")
    flags = (*FLAGS, "--save", save)
    before = run_ranks(train_whole_and_copy, 4, work_dir=tmp_path, args=(flags, model, str(first)))
    assert all("infinity" in refused and "rank 1" in refused for _, refused in before)
    names = ("lost", "damaged", "older", "none")
    for name in names:
        shutil.copytree(first, tmp_path / name)
    (newest,) = {path.name for path in first.glob("node0/rank00001-step*2.state")}
    assert (first / "node0" / newest).stat().st_mode & 0o077 == 0
    shutil.rmtree(tmp_path / "lost" / "node1")
    flip(tmp_path / "damaged" / "node0" / newest)
    for node in ("node0", "node1"):
        flip(tmp_path / "older" / node / newest)
        for path in (tmp_path / "none" / node).glob("rank00003-*.json"):
            path.unlink()
    cases = [str(tmp_path / name) for name in ("whole", *names)]
    after = run_ranks(recover, 4, work_dir=tmp_path, args=(FLAGS, model, cases, save))
    for rank, ((whole, _), found) in enumerate(zip(before, after, strict=True)):
        for name, (loaded, rest, files) in zip(("whole", *names), found, strict=True):
            if name == "none":
                assert loaded is None and not files, "incomplete copies are taken, or stay"
                continue
            assert loaded is not None and rest is not None
            step = 1 if name == "older" else 2
            assert loaded.step == step and loaded.extra == {**EXTRA, "step": step}
            assert any("came from the next node" in n for n in loaded.notes) == (
                name in ("lost", "damaged")
            )
            assert rest.steps == whole.steps[step:], (name, rank)
            for parameter, value in rest.local.items():
                assert torch.equal(value, whole.local[parameter]), (name, rank, parameter)
            assert {f.split("-")[1].split(".")[0] for f in files} == {f"step000000{step}"}
