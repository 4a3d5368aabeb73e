"""A node of a job that goes on with fewer of them, under torchrun: what its starter does."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.ranks import counted
from mindspeed_rl.elastic.commands import (
    NodeCommand,
    in_round,
    smaller_problem,
    value_of,
)
from mindspeed_rl.elastic.meeting import AttemptRound, JobEnd, JobSize, Meeting

FOLDER = ".nodes"  # in --save
NODE_ADDR = "NODE_ADDR"  # address of this node for the others; by default as the route to the first


@dataclass(frozen=True, slots=True)
class Start:
    """An attempt of this node.

    Attributes:
        command: Command line of its launcher.
        restarts: How often the job was started before.
        began: Time of the first start, in seconds of the epoch.
    """

    command: list[str]
    restarts: int
    began: float


class ElasticNode:
    """A node of a job that goes on with fewer of them.

    Args:
        command: Command line of the node's launcher for the whole job.
        fewest: ``--elastic-min-nodes``.
        wait_s: ``--elastic-wait-s``.
        say: Prints a line.

    Raises:
        UsageError: The layout does not allow the fewest nodes, or nodes cannot meet.
    """

    def __init__(
        self, command: NodeCommand, fewest: int, wait_s: float, say: Callable[[str], None]
    ) -> None:
        self._command, self._say = command, say
        self._problem_of = smaller_problem(
            command.module, command.arguments, command.ranks_per_node
        )
        if not 1 <= fewest <= command.nodes:
            raise UsageError(
                f"--elastic-min-nodes {fewest}: from 1 to the number of nodes, {command.nodes}"
            )
        save = value_of("--save", command.arguments)
        if not save:
            raise UsageError(
                "--elastic-min-nodes needs --save, a folder that all nodes see: they meet there "
                "after a node is lost, and go on from its newest checkpoint"
            )
        if problem := self._problem_of(fewest):
            raise UsageError(f"--elastic-min-nodes {fewest}: {problem}; name more nodes")
        size = JobSize(command.nodes, fewest, wait_s)
        try:
            folder = Path(save, FOLDER)
            self._meeting = Meeting(folder, size, command.node, own_address(command), say)
        except OSError as error:
            raise UsageError(
                f"--elastic-min-nodes: nodes cannot meet in --save {save}: {error}"
            ) from error

    def next(self, restarts: int, stopped: Callable[[], object]) -> Start | JobEnd | None:
        """Return this node's part of the next attempt; ``None``: stopped meanwhile.

        Args:
            restarts: How often this node has started its ranks before.
            stopped: Whether to wait no longer.
        """
        try:
            decided = self._meeting.join(restarts, self._problem_of, stopped)
        except ValueError as error:
            return JobEnd(1, str(error))
        if not isinstance(decided, AttemptRound):
            return decided
        command = in_round(self._command, decided)
        self._say(nodes_line(decided, self._command.nodes, self._command.ranks_per_node))
        return Start(command.line(), decided.restarts, decided.began)

    def leave(self, code: int, text: str) -> None:
        """Tell the other nodes that the job has ended here, and why."""
        self._meeting.leave(code, text)


def nodes_line(decided: AttemptRound, nodes: int, ranks_per_node: int) -> str:
    """Return the line that tells who takes part in an attempt."""
    lacking = [str(node) for node in range(nodes) if node not in decided.nodes]
    missing = f" (without node {', '.join(lacking)})" if lacking else ""
    count = len(decided.nodes)
    return (
        f"attempt {decided.restarts + 1} runs on {count} of {nodes} nodes{missing}, "
        f"{counted(count * ranks_per_node, 'rank')}"
    )


def own_address(command: NodeCommand) -> str:
    """Return the address at which other nodes reach this one. Local; no packet is sent."""
    if given := os.environ.get(NODE_ADDR):
        return given
    if command.node == 0:
        return command.address
    family, kind, _, _, first = socket.getaddrinfo(
        command.address, int(command.port), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(first)
        return str(probe.getsockname()[0])
