"""Flags of the dry run, and the sizes of machines that it cannot take from the flags."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.core.flag import Needs, flag


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
        Machine("h100", "cuda", 74.0, 2.0, 8, 150.0, 128.0),
        Machine("gpu24", "cuda", 22.5, 1.0, 1, 150.0, 128.0),  # one consumer card of 24 GB
        Machine("cpu", "cpu", 8.0, 1.0, 8, 0.0, 0.0),  # a core of a server: the quickstart
    )
}
"""Machines by name; a run is predicted with the first machine of its platform."""


@dataclass(frozen=True, slots=True)
class DryRunConfig:
    """Dry run.

    Prints what a run would do and need, without devices, weights or torchrun: the batch arithmetic,
    bytes per phase and rank, what a weight update moves, seconds of a step where constants are
    known, whether it fits, and which single changes would help. All of it is predicted. It ends
    with code 3 when the run does not fit.

    Example: bash recipe.sh --rl-dry-run --device-memory-gb 64
    """

    rl_dry_run: bool = flag(False, "Predict the run instead of starting it.")
    rl_world_size: int = flag(
        0,
        "Ranks of the run. A dry run takes them as given (0: WORLD_SIZE of the environment); a run "
        "is refused when torchrun starts another number.",
        minimum=0,
    )
    rl_dry_run_machine: str = flag(
        "a3",
        "What a rank runs on: its platform, the memory of a device (see --device-memory-gb), and "
        "what communicators and graphs take of it. a3 is one die of an Atlas A3.",
        choices=tuple(MACHINES),
    )
    rl_dry_run_expert_imbalance: float = flag(
        1.0,
        "Tokens of the busiest expert-parallel rank as a multiple of the mean, in training and in "
        "rollouts.",
        minimum=1.0,
    )
    rl_dry_run_mean_length: float = flag(
        0.0,
        "Mean tokens of a sequence, prompt and response, with which the packing of micro-batches "
        "and the seconds of a step are predicted; lengths are drawn from a log-normal distribution "
        "that is cut at the longest. 0 takes a third of the longest.",
        minimum=0.0,
    )
    rl_dry_run_mean_response_length: float = flag(
        0.0,
        "Mean tokens of a response, in place of --rl-dry-run-mean-length; prompts count with a "
        "third of --max-prompt-length. 0 leaves it to that flag.",
        minimum=0.0,
        needs=Needs("--rl-dry-run"),
    )
    rl_dry_run_json: str = flag(
        "",
        "File for everything that was predicted, as JSON; - prints it instead of the report.",
        names=("--rl-dry-run-json", "--json"),
        needs=Needs("--rl-dry-run"),
    )
