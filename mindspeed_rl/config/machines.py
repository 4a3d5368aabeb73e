"""Sizes of devices that a prediction needs and cannot take from the flags."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """The device of one rank, and the node that it is part of.

    Attributes:
        name: Value of ``--rl-dry-run-machine``.
        platform: ``"npu"``, ``"cuda"`` or ``"cpu"``.
        memory_gib: Memory of the device; the vendor's number.
        reserved_gib: Part of the memory that driver, runtime and allocator rounding take (assumed).
        ranks_per_node: Number of ranks on one node.
        communicator_mib: Device buffers of one process group in use.
        graph_mib: Memory of one captured step size of the engine (assumed).
    """

    name: str
    platform: str
    memory_gib: float
    reserved_gib: float
    ranks_per_node: int
    communicator_mib: float
    graph_mib: float


MACHINES = {
    machine.name: machine
    for machine in (
        # One die of an Atlas A3; HCCL holds 2 x HCCL_BUFFSIZE (200 MB) per group in use.
        Machine("a3", "npu", 64.0, 2.0, 16, 400.0, 256.0),
        Machine("a2", "npu", 64.0, 2.0, 8, 400.0, 256.0),  # Atlas 800T A2
        Machine("h200", "cuda", 131.0, 2.0, 8, 150.0, 128.0),
        Machine("cpu", "cpu", 8.0, 1.0, 8, 0.0, 0.0),  # a core of a server: the quickstart
    )
}
"""Machines by name; a run is predicted with the first machine of its platform."""
