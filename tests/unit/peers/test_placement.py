"""Who keeps whose copies, and which of them are taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mindspeed_rl.peers.files import (
    CopyId,
    list_copies,
    problem_of_copy,
    read_copy,
    remove_all_but,
    write_copy,
)
from mindspeed_rl.peers.placement import Nodes, newest_complete


def test_every_copy_has_a_keeper_on_the_next_node() -> None:
    nodes = Nodes.of(["a", "a", "a", "b", "b", "c", "c", "c"])
    assert nodes.ranks == ((0, 1, 2), (3, 4), (5, 6, 7))
    for rank in range(8):
        assert nodes.node_of(nodes.keeper(rank)) == (nodes.node_of(rank) + 1) % 3
        assert rank in nodes.kept_by(nodes.keeper(rank))
    assert sum(len(nodes.kept_by(rank)) for rank in range(8)) == 8
    alone = Nodes.of(["a", "a"])
    assert alone.keeper(1) == 1 and not alone.kept_by(0) and not alone.kept_by(1)


def test_the_newest_step_that_all_ranks_have_is_taken() -> None:
    nodes, runs = Nodes.of(["a", "b"]), ["x", "y"]

    def copies(*of_node: tuple[int, int]) -> dict[CopyId, str]:
        return {CopyId(step, rank): runs[rank] for step, rank in of_node}

    both = [copies((2, 0), (4, 0), (2, 1), (4, 1)), copies((2, 1), (2, 0), (4, 1))]
    found = newest_complete(nodes, both, runs)
    assert found is not None and (found.step, found.node_of_copy) == (4, (0, 1))
    lost = newest_complete(nodes, [both[0], {}], runs)
    assert lost is not None and (lost.step, lost.node_of_copy) == (4, (0, 0))
    damaged = {(0, CopyId(4, 0))}
    older = newest_complete(nodes, both, runs, damaged)
    assert older is not None and older.step == 2
    assert newest_complete(nodes, [copies((4, 0)), copies((2, 1))], runs) is None
    assert newest_complete(nodes, both, ["x", "another layout"]) is None


def test_a_copy_comes_back_as_it_was_and_damage_is_found(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    tensors = {
        "part": whole[:, 1:3], "bf16": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
        "step": torch.tensor(7.0), "empty": torch.empty(0, 3),
        "bytes": torch.tensor([3, 200], dtype=torch.uint8),
    }  # fmt: skip
    plain = {"rng": {"torch": torch.get_rng_state()}, "updates": {"": 3}}
    copy = CopyId(5, 2)
    write_copy(tmp_path, copy, "run", tensors, plain)
    write_copy(tmp_path, CopyId(6, 2), "run", {"part": whole}, plain)
    assert list_copies(tmp_path) == {copy: "run", CopyId(6, 2): "run"}
    found, values = read_copy(tmp_path, copy)
    assert found.keys() == tensors.keys() and values["updates"] == {"": 3}
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert torch.equal(values["rng"]["torch"], plain["rng"]["torch"])  # type: ignore[arg-type]
    assert not problem_of_copy(tmp_path, copy)
    state = tmp_path / f"{copy.name}.state"
    content = bytearray(state.read_bytes())
    content[70] ^= 1
    state.write_bytes(content)
    assert "xxh3" in problem_of_copy(tmp_path, copy)
    record = tmp_path / f"{copy.name}.json"
    record.write_text(record.read_text().replace('"step": 5', '"step": 8'))
    assert copy not in list_copies(tmp_path)


def test_only_whole_copies_of_kept_steps_stay(tmp_path: Path) -> None:
    for step, rank in ((1, 0), (2, 0), (1, 1)):
        write_copy(tmp_path, CopyId(step, rank), "run", {"a": torch.ones(3)}, {})
    (tmp_path / ".owner").write_text("")
    (tmp_path / f"{CopyId(3, 0).name}.state").write_text("half")
    remove_all_but(tmp_path, [2, 3], rank=0)
    assert list_copies(tmp_path).keys() == {CopyId(2, 0), CopyId(1, 1)}
    remove_all_but(tmp_path, [])
    assert [path.name for path in tmp_path.iterdir()] == [".owner"]


def test_a_copy_that_does_not_fit_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(OSError, match="shared memory"):
        write_copy(tmp_path, CopyId(1, 0), "run", {"a": torch.ones(100)}, {})
    assert not list(tmp_path.iterdir())


def test_a_copy_whose_record_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    copy = CopyId(1, 0)
    (tmp_path / f"{copy.name}.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_copy(tmp_path, copy, "run", {"a": torch.ones(100)}, {})
    assert [path.name for path in tmp_path.iterdir()] == [f"{copy.name}.json"]
