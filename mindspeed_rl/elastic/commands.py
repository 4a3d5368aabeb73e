"""Command lines of a node for other numbers of nodes, and whether the layout allows those."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from mindspeed_rl.core.ranks import counted
from mindspeed_rl.elastic.meeting import AttemptRound
from mindspeed_rl.planning.dry_run import DOES_NOT_FIT

_LAUNCHER = 3  # words of it: python -m mindspeed_rl.launch.bound_store


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """The command line of a node's launcher, as ``pretrain_scripts/launch.sh`` writes it.

    Attributes:
        launcher: Words that start torchrun.
        ranks_per_node: Ranks on every node.
        nodes: Number of nodes.
        node: Rank of this node.
        address: Address of the first node.
        port: Port of its store.
        module: Module of the entry.
        arguments: Arguments of the entry, without the number of ranks.
    """

    launcher: tuple[str, ...]
    ranks_per_node: int
    nodes: int
    node: int
    address: str
    port: str
    module: str
    arguments: tuple[str, ...]

    @classmethod
    def parse(cls, command: Sequence[str]) -> NodeCommand:
        """Read a command line. ``SystemExit`` where it is another one."""
        parser = argparse.ArgumentParser(prog="mindspeed_rl.launch.restart", allow_abbrev=False)
        for name in ("--nproc-per-node", "--nnodes", "--node-rank"):
            parser.add_argument(name, type=int, required=True)
        for name in ("--master-addr", "--master-port", "-m"):
            parser.add_argument(name, required=True)
        at = list(command).index("-m", _LAUNCHER) + 2 if "-m" in command[_LAUNCHER:] else 0
        given = parser.parse_args(command[_LAUNCHER:at])
        own = list(command[at:])
        if own[:1] == ["--rl-world-size"]:
            own = own[2:]
        return cls(
            tuple(command[:_LAUNCHER]), given.nproc_per_node, given.nnodes, given.node_rank,
            given.master_addr, given.master_port, given.m, tuple(own),
        )  # fmt: skip

    def line(self) -> list[str]:
        """Return the command line."""
        return [
            *self.launcher, "--nproc-per-node", str(self.ranks_per_node),
            "--nnodes", str(self.nodes), "--node-rank", str(self.node),
            "--master-addr", self.address, "--master-port", self.port, "-m", self.module,
            "--rl-world-size", str(self.ranks_per_node * self.nodes), *self.arguments,
        ]  # fmt: skip


def in_round(command: NodeCommand, decided: AttemptRound) -> NodeCommand:
    """Return the command line of a node in an attempt that it takes part in."""
    return replace(
        command,
        nodes=len(decided.nodes),
        node=decided.nodes.index(command.node),
        address=decided.addresses[0],
    )


def layout_problem(module: str, arguments: Sequence[str], num_ranks: int) -> str:
    """Ask the dry run of an entry why it cannot run on a number of ranks; empty: it can. Local."""
    asked = [sys.executable, "-m", module, "--rl-dry-run", "--rl-world-size", str(num_ranks)]
    own = without(arguments, ("--rl-dry-run-json", "--rl-world-size"))
    done = subprocess.run([*asked, *own], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    if done.returncode == DOES_NOT_FIT:
        return "it needs more memory than a device has (--rl-dry-run tells of what)"
    told = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    return told.partition("error: ")[2] or told


def without(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return a command line without some flags that take a value."""
    kept, skips = list[str](), False
    for word in arguments:
        flag, _, value = word.replace("_", "-").partition("=")
        if not skips and flag not in flags:
            kept.append(word)
        skips = not skips and flag in flags and not value
    return kept


def smaller_problem(
    module: str, arguments: Sequence[str], ranks_per_node: int
) -> Callable[[int], str]:
    """Return a function that says why a job cannot run on a number of nodes; empty: it can."""

    @cache
    def problem_of(nodes: int) -> str:
        ranks = nodes * ranks_per_node
        problem = layout_problem(module, arguments, ranks)
        size = f"{counted(nodes, 'node')} ({counted(ranks, 'rank')})"
        return f"with {size} it cannot run: {problem}" if problem else ""

    return problem_of


def value_of(flag: str, arguments: Sequence[str]) -> str:
    """Return the last value of a flag on a command line; empty: it is not there."""
    words = [word.replace("_", "-") for word in arguments]
    found = ""
    for at, word in enumerate(words):
        if word.startswith(f"{flag}="):
            found = arguments[at].partition("=")[2]
        elif word == flag and at + 1 < len(words):
            found = arguments[at + 1]
    return found
