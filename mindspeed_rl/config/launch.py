"""Flags of the driver of the ranks: torchrun or Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.flag import Needs, flag

_WITH_RAY = Needs("--orchestrator", ("ray",))


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Who starts the ranks.

    The same ranks do the same work, to the last bit, under torchrun and under Ray. With Ray the
    entry is started once, as a plain command: it starts a local Ray, or joins a cluster, puts one
    actor per rank on its nodes and waits for their end. It never sees a tensor.

    Example: python -m mindspeed_rl.train_rl --orchestrator ray --ray-ranks-per-node 8 ...
    """

    orchestrator: str = flag(
        "torchrun",
        "Who starts the ranks: torchrun, on every node, or this command in a Ray cluster (ray; "
        "needs the extra ray).",
        choices=("torchrun", "ray"),
    )
    ray_address: str = flag(
        "",
        "A running Ray cluster: auto for that of this node, or host:port. Empty: RAY_ADDRESS of "
        "the environment if set, else a local Ray for the time of the run.",
        needs=_WITH_RAY,
    )
    ray_num_nodes: int = flag(1, "Nodes of the Ray cluster to use.", minimum=1, needs=_WITH_RAY)
    ray_ranks_per_node: int = flag(
        0,
        "Ranks on each of them; on NPUs and GPUs each rank takes one device.",
        minimum=0,
        needs=_WITH_RAY,
    )
    max_restarts: int = flag(
        0,
        "How often the job is started again, from the newest checkpoint of --save, after a crash, "
        "a hang or a lost node. A fault that comes again at the same step ends it earlier. Under "
        "torchrun it is a flag of pretrain_scripts/launch.sh.",
        minimum=0,
        needs=_WITH_RAY,
    )
    restart_backoff_s: float = flag(
        10.0,
        "Pause before a restart; it doubles with each one in a row that gets no further, up to "
        "300 s.",
        minimum=0.0,
        needs=Needs("--max-restarts"),
    )
    elastic_min_nodes: int = flag(
        0,
        "Go on with as few nodes as this when others are lost, where the layout allows it. "
        "0: wait for all nodes. Under torchrun it is a flag of pretrain_scripts/launch.sh.",
        minimum=0,
        needs=Needs("--max-restarts"),
    )
    elastic_wait_s: float = flag(
        30.0,
        "How long to wait for a lost node to come back before going on without it.",
        minimum=0.0,
        needs=Needs("--elastic-min-nodes"),
    )

    @property
    def num_ranks(self) -> int:
        return self.ray_num_nodes * self.ray_ranks_per_node


def check_launch(launch: LaunchConfig, environ: Mapping[str, str], prog: str) -> None:
    """Check the flags against the way in which this process was started. Local.

    Raises:
        UsageError: The message names the flag and the fix.
    """
    if launch.orchestrator == "torchrun":
        return
    if "RANK" in environ:
        raise UsageError(
            "--orchestrator ray under torchrun: Ray starts the ranks; start this entry once, with "
            f"python -m {prog} ..."
        )
    if not launch.ray_ranks_per_node:
        raise UsageError(
            "--orchestrator ray: how many ranks has a node? Add --ray-ranks-per-node, the number "
            "of its devices (on a CPU: of processes)"
        )
    if launch.elastic_min_nodes > launch.ray_num_nodes:
        raise UsageError(
            f"--elastic-min-nodes {launch.elastic_min_nodes}: at most the number of nodes, "
            f"--ray-num-nodes {launch.ray_num_nodes}"
        )
    if launch.ray_address.startswith("ray://"):
        raise UsageError(
            f"--ray-address {launch.ray_address}: the ranks must reach this process, so it runs on "
            "a node of the cluster: take host:port or auto there, or ray job submit"
        )
    if launch.ray_num_nodes > 1 and not (launch.ray_address or environ.get("RAY_ADDRESS")):
        raise UsageError(
            f"--ray-num-nodes {launch.ray_num_nodes}: a local Ray has one node; name the cluster "
            "with --ray-address (auto on one of its nodes)"
        )
