"""What a rank runs on: sizes of devices that a prediction cannot take from the flags."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """One rank's device.

    Attributes:
        name: as ``--rl-dry-run-machine`` has it.
        platform: ``"npu"``, ``"cuda"`` or ``"cpu"``.
        memory_gib: of the device; the vendor's number.
        reserved_gib: of it taken by driver, runtime and allocator rounding (assumed).
        ranks_per_node: ranks of one node.
        communicator_mib: device buffers of one process group in use.
        graph_mib: of one captured step size of the engine (assumed).
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
"""The first of each platform is what a run there is predicted with."""
