"""Reads the tables of ``npu-smi info``. Pure.

The first table has two lines per die, the second one a line per process::

    | 3     910B2         | OK            | 95.4   36       0    / 0             |
    | 0                   | 0000:41:00.0  | 0      0    / 0      3401 / 65536    |
    | NPU     Chip        | Process id    | Process name | Process memory(MB) | ...
    | 3       0           | 485946        | python       | 5175               | NA

Newer drivers add a column with the process id in its container, and A3 boards the physical number
of the die behind the chip.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# npu-smi's answer when the devices of this container are held by another one.
_HELD = re.compile(r"because the device is used|ret is -8020")


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process on a device.

    Attributes:
        device: Position of the die in the table, which is the number that CANN gives it.
        board: Number of the board, npu-smi's "NPU".
        chip: Number of the die on its board.
        pid: Process id on the host.
        name: Name of the process; empty if npu-smi does not see it.
        mib: Memory of the device that it holds, in MiB.
    """

    device: int
    board: int
    chip: int
    pid: int
    name: str
    mib: int


def soc_of(table: str) -> str:
    """Return ``a2`` or ``a3`` from the output of ``npu-smi info``; empty if it shows neither.

    A2 boards show the name of their chip (910B2), A3 boards do not.
    """
    if re.search(r"\b910B", table):
        return "a2"
    return "a3" if re.search(r"\b(Ascend910|910_93|910C)", table) else ""


def held_elsewhere(output: str) -> bool:
    """Whether npu-smi says that another container holds the devices."""
    return bool(_HELD.search(output))


def processes_of(table: str) -> tuple[DeviceProcess, ...]:
    """Return the processes that ``npu-smi info`` lists, in its order."""
    dies = {die: device for device, die in enumerate(_dies(table))}
    found = []
    for cells in _rows(table):
        die = _numbers(cells[0])
        if len(cells) < 4 or len(die) != 2 or not (cells[1].isdecimal() and cells[3].isdecimal()):
            continue
        npu, chip = die
        device = dies.get((npu, chip), npu)
        found.append(DeviceProcess(device, npu, chip, int(cells[1]), cells[2], int(cells[3])))
    return tuple(found)


def _dies(table: str) -> Iterator[tuple[int, int]]:
    """Yield board and chip of every die, from the second line of each in the first table."""
    npu = None
    for cells in _rows(table):
        numbers = _numbers(cells[0])
        if len(cells) == 3 and numbers and npu is not None and _is_bus(cells[1]):
            yield npu, numbers[0]
        elif named := re.fullmatch(r"(\d+)\s+(\S*[A-Za-z_]\S*)", cells[0]):
            npu = int(named[1])


def _is_bus(text: str) -> bool:
    return ":" in text or text == "NA"


def _rows(table: str) -> Iterator[list[str]]:
    for line in table.splitlines():
        if line.strip().startswith("|"):
            yield [cell.strip() for cell in line.strip().strip("|").split("|")]


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a cell that has nothing else; otherwise none."""
    parts = text.split()
    return tuple(map(int, parts)) if parts and all(p.isdecimal() for p in parts) else ()
