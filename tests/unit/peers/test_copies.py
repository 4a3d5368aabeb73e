"""A copy counts as whole only when it has reached its keeper, whatever went wrong on the way."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_rl.peers import copies, files
from mindspeed_rl.peers.copies import PeerCopies
from mindspeed_rl.peers.files import CopyId, list_copies, write_copy
from mindspeed_rl.peers.placement import Nodes


class _Wire:
    """``send`` and ``recv`` of one direction between two threads."""

    def __init__(self) -> None:
        self._sent: queue.Queue[torch.Tensor] = queue.Queue()

    def send(self, tensor: torch.Tensor, to: int, group: object) -> None:
        self._sent.put(tensor.clone())

    def recv(self, tensor: torch.Tensor, giver: int, group: object) -> None:
        tensor.copy_(self._sent.get(timeout=20))

    def is_empty(self) -> bool:
        return self._sent.empty()


def copies_of(folder: Path, told: list[str]) -> PeerCopies:
    """The copies of rank 0 of two nodes, whose last whole copy is that of step 2."""
    made = object.__new__(PeerCopies)
    made._rank, made._folder, made._nodes = 0, folder, Nodes.of(["a", "b"])
    made._group = made._thread = None
    made._whole, made._started, made._problem = 2, 4, ""
    made._job = type("Job", (), {"log_rank0": lambda _, *lines: told.extend(lines)})()
    for step in (2, 4):
        write_copy(folder, CopyId(step, 0), "run", {"w": torch.arange(3.0)}, {"n": step})
    return made


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ValueError("the record is damaged")]
)
@pytest.mark.parametrize("end", ["_send", "_receive"])
def test_a_transfer_that_fails_leaves_the_copy_before(
    end: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise error

    monkeypatch.setattr(copies, "_send", lambda *_: "")
    monkeypatch.setattr(copies, "_receive", lambda *_: "")
    monkeypatch.setattr(copies, end, fail)
    monkeypatch.setattr(copies, "gather_objects", lambda value, _: [value, ([], "")])
    told: list[str] = []
    made = copies_of(tmp_path, told)
    made._exchange(4)
    assert str(error) in made._problem
    made._settle(6, [])
    assert made._whole == 2 and set(list_copies(tmp_path)) == {CopyId(2, 0)}
    assert "those after step 2 stay" in told[0] and "rank 0: " in told[0]


def test_a_transfer_that_succeeds_replaces_the_copy_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_send", lambda *_: "")
    monkeypatch.setattr(copies, "_receive", lambda *_: "")
    monkeypatch.setattr(copies, "gather_objects", lambda value, _: [value, ([], "")])
    made = copies_of(tmp_path, [])
    made._exchange(4)
    made._settle(6, [])
    assert made._whole == 4 and set(list_copies(tmp_path)) == {CopyId(4, 0)}


def transfer(giver: Path, taker: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Send a copy from one folder to another; what either end tells."""
    wire, told = _Wire(), [""]
    monkeypatch.setattr(copies.dist, "send", wire.send)
    monkeypatch.setattr(copies.dist, "recv", wire.recv)
    group: Any = None

    def send() -> None:
        told[0] = copies._send(giver, CopyId(4, 0), 1, group)

    thread = threading.Thread(target=send)
    thread.start()
    received = copies._receive(taker, CopyId(4, 0), 0, group)
    thread.join(20)
    assert not thread.is_alive() and wire.is_empty(), "both ends agree on the number of bytes"
    return told[0], received


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    giver, taker = tmp_path / "giver", tmp_path / "taker"
    giver.mkdir()
    taker.mkdir()
    write_copy(giver, CopyId(4, 0), "run", {"w": torch.arange(500.0)}, {"n": 1})
    return giver, taker


def test_a_copy_arrives_as_it_was(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_CHUNK_BYTES", 700)
    assert transfer(*folders, monkeypatch) == ("", "")
    assert files.problem_of_copy(folders[1], CopyId(4, 0)) == ""


def test_a_state_that_cannot_be_read_to_its_end_stops_nobody(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __enter__(self) -> Broken:
            return self

        def __exit__(self, *_: object) -> None: ...

        def read(self, _: int) -> bytes:
            raise OSError(5, "Input/output error")

    place = files.state_path(folders[0], CopyId(4, 0))

    class Place:
        stat = staticmethod(place.stat)
        open = staticmethod(lambda _: Broken())

    monkeypatch.setattr(copies, "state_path", lambda *_: Place)
    sent, received = transfer(*folders, monkeypatch)
    assert "cannot be read: Input/output error" in sent and "changed on its way" in received
    assert not list_copies(folders[1])


def test_a_record_that_is_damaged_on_its_way_stops_nobody(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = files.read_record(folders[0], CopyId(4, 0))

    class Damaged:
        def to_text(self) -> str:
            return replace(record, step=5).to_text().replace('"step": 5', '"step": 6')

    monkeypatch.setattr(copies, "read_record", lambda *_: Damaged())
    sent, received = transfer(*folders, monkeypatch)
    assert (sent, received) == ("", f"{CopyId(4, 0).name}: the record is damaged")
    assert not list_copies(folders[1])
