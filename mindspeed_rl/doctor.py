"""``python -m mindspeed_rl.doctor``: can a run start here? Every red row of the answer has a fix.

Started alone it checks packages, environment and devices, imports no torch and takes seconds. Under
torchrun it also runs an all-reduce and an all-to-all in every process group of the layout, with a
limit of 60 seconds for each group. With the flags of a run it checks that run.

With --checkpoint DIR it looks at nothing but a checkpoint, or at all of a --save folder: it reads
every file and compares it with the checksum that was written with it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core import versions
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.diagnosis.devices import device_rows
from mindspeed_rl.diagnosis.environment import environment_rows
from mindspeed_rl.diagnosis.facts import gather, guess_platform
from mindspeed_rl.diagnosis.packages import package_rows
from mindspeed_rl.diagnosis.rows import DoctorRow, Status, green, lines, note, red, verdict
from mindspeed_rl.launch import bootstrap, machine
from mindspeed_rl.planning.budget import machine_on
from mindspeed_rl.planning.communicators import RunGroups
from mindspeed_rl.planning.hccl_buffers import VARIABLE, hccl_buffers
from mindspeed_rl.planning.phase_limits import phase_limits
from mindspeed_rl.planning.prediction import MemoryPrediction
from mindspeed_rl.planning.run_plan import RLPlan
from mindspeed_rl.planning.suggestions import plan_of

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from mindspeed_rl.platforms.base import Platform

PROG = "mindspeed_rl.doctor"
PREFLIGHT_S = 60.0
_LAYOUT = "layout"
_CHECKPOINT = "checkpoint"
_MEETING = "MASTER_ADDR and MASTER_PORT must be those of the first node, and open"


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the doctor's own flags; all other flags are those of train_rl."""
    parser = argparse.ArgumentParser(
        PROG,
        usage="[torchrun ... -m | python -m] mindspeed_rl.doctor [flags] [flags of train_rl]",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--preflight-timeout-s",
        type=float,
        default=PREFLIGHT_S,
        metavar="X",
        help="limit of one process group under torchrun (default: %(default)s)",
    )
    parser.add_argument(
        "--checkpoint",
        default="",
        metavar="DIR",
        help="verify a checkpoint (SAVE/iter_0000012), or all of a --save folder, and nothing else",
    )
    parser.add_argument("--json", default="", metavar="FILE", help="write the rows here as well")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rows and return 1 if one of them is red, 2 for wrong flags."""
    own, rest = build_parser().parse_known_args(argv)
    world = bootstrap.World.from_environment()
    if own.checkpoint:
        return _verify_checkpoints(own.checkpoint, rest, own.json)
    try:
        config = parse(RLRunConfig, rest, PROG).config
    except UsageError as error:
        if world.rank == 0:
            print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2
    platform = config.parallel.platform
    platform = guess_platform() if platform == "auto" else platform
    plan, layout = layout_rows(config, platform, world)
    rows = [*local_rows(config, platform, world, plan), *layout]
    if "RANK" in os.environ and world.size > 1:
        rows += collective_rows(config, platform, world, plan, rows, own.preflight_timeout_s)
    return _report(rows, own.json) if world.rank == 0 else 0


def _report(rows: Sequence[DoctorRow], json_file: str) -> int:
    """Print the rows, write them to a file if one is named, and return the exit status."""
    print("\n".join(lines(rows, colour=sys.stdout.isatty())))
    print(verdict(rows), flush=True)
    if json_file:
        found = [asdict(row) | {"status": row.status.value} for row in rows]
        Path(json_file).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any(row.status is Status.RED for row in rows))


def _verify_checkpoints(directory: str, other_flags: Sequence[str], json_file: str) -> int:
    """Verify checkpoints and report; return the exit status. Local."""
    from mindspeed_rl.checkpoint.inspection import Verdict, inspect_checkpoints

    fix = "copy it again from where it was kept, or resume from another one"
    try:
        if other_flags:
            raise UsageError(
                f"{' '.join(other_flags)}: --checkpoint looks at a checkpoint alone; leave the "
                "other flags out"
            )
        findings = inspect_checkpoints(Path(directory))
    except UsageError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2
    rows = [
        red(_CHECKPOINT, finding.text, fix)
        if finding.verdict is Verdict.DAMAGED
        else (green if finding.verdict is Verdict.SOUND else note)(_CHECKPOINT, finding.text)
        for finding in findings
    ]
    return _report(rows, json_file)


def local_rows(
    config: RLRunConfig, platform: str, world: bootstrap.World, plan: RLPlan | None
) -> Iterator[DoctorRow]:
    """Check what can be seen on this node alone. Local."""
    longest_phase_s = config.logging.phase_limit_s
    if plan is not None:
        longest_phase_s = phase_limits(config, plan, platform).longest
    environ = dict(os.environ)
    bootstrap.set_defaults(platform, environ, longest_phase_s)
    facts = gather(platform, environ, ask_devices=world.local_rank == 0)
    matrix = versions.read_matrix()
    # Flags of a run are those of train_rl, which has an engine.
    yield from package_rows(facts, platform, matrix, engine=bool(config.model.hf_checkpoint))
    yield from environment_rows(
        facts,
        platform,
        longest_phase_s=longest_phase_s,
        several_nodes=world.local_size < world.size,
    )
    yield from device_rows(facts, platform, matrix)


def layout_rows(
    config: RLRunConfig, platform: str, world: bootstrap.World
) -> tuple[RLPlan | None, list[DoctorRow]]:
    """Return the plan of the flags, if they name a model, and its communicators as rows. Local.

    The plan is for the ranks that run now, or for ``--rl-world-size`` if there is only one.
    """
    size = world.size if world.size > 1 else config.dry_run.rl_world_size or 1
    if not config.model.hf_checkpoint:
        tip = "give the flags of the run (or bash recipe.sh --doctor) to have its groups looked at"
        return None, [note(_LAYOUT, f"no --hf-checkpoint: {tip}")]
    try:
        plan = plan_of(config, size)
    except UsageError as error:
        return None, [red(_LAYOUT, str(error), "change the flag that it names")]
    assert isinstance(plan, RLPlan)
    given = config.dry_run.rl_world_size
    if given not in (0, size):
        what = f"--rl-world-size {given}, and torchrun started {size} ranks: the run is refused"
        return plan, [red(_LAYOUT, what, "give the number of ranks, or leave the flag out")]
    machine = machine_on(config, "npu")
    held = MemoryPrediction(config, plan, machine).group_bytes(0)
    sizes = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in held.items())
    rows = [
        note(
            _LAYOUT,
            f"rank 0 of {size} is in {len(held)} groups; MiB that each takes on NPUs once it is "
            f"used: {sizes or 'none'}; {sum(held.values()) / 2**20:.0f} MiB in all (predicted)",
        )
    ]
    try:
        line = hccl_buffers(config, plan, machine.name, os.environ).line()
    except UsageError as error:
        fix = f"unset {VARIABLE}: a run sets what it needs"
        return plan, [*rows, red(_LAYOUT, str(error), fix)] if platform == "npu" else rows
    return plan, [*rows, note(_LAYOUT, f"on NPUs: {line}")] if line else rows


def collective_rows(
    config: RLRunConfig,
    platform_name: str,
    world: bootstrap.World,
    plan: RLPlan | None,
    local: Sequence[DoctorRow],
    limit_s: float,
) -> list[DoctorRow]:
    """Return findings of other nodes and of all groups, under torchrun. Collective: the world."""
    from datetime import timedelta

    bootstrap.quiet_libraries()
    try:
        if platform_name == "npu":
            machine.import_torch_npu(os.environ)
        import torch.distributed as dist

        from mindspeed_rl.launch.failure_store import connect
        from mindspeed_rl.launch.preflight import Preflight, wait_for
        from mindspeed_rl.platforms.registry import select_platform
    except (ImportError, UsageError) as error:
        return [red("collectives", f"not tried: {error}", "fix the rows of packages first")]
    found: list[DoctorRow] = []
    try:
        store = connect(world.rank, limit_s)
        found += rows_of_other_nodes(store, world, local, limit_s)
        # A rank with a device is a process that others would find on it.
        store.set(f"looked/{world.rank}", "")
        wait_for(store, [f"looked/{rank}" for rank in range(world.size)], limit_s)
        platform = select_platform(platform_name)
        if refused := _refused_devices(store, world, platform, limit_s):
            return [*found, *refused]
        dist.init_process_group(platform.backend, timeout=timedelta(seconds=4 * limit_s))
    except (RuntimeError, ValueError) as error:
        what = f"ranks do not meet: {str(error).partition(chr(10))[0]}"
        return [*found, red("collectives", what, _MEETING)]
    everyone = {"world": (tuple(range(world.size)),)}
    groups = RunGroups.of(config, plan).of_all_ranks() if plan else everyone
    found += Preflight(world, platform, store, groups, limit_s).run()
    dist.destroy_process_group()
    return found


def _refused_devices(
    store: Store, world: bootstrap.World, platform: Platform, limit_s: float
) -> list[DoctorRow]:
    """Bind every rank to its device; return the rows of those that cannot be. Collective."""
    from mindspeed_rl.launch.preflight import wait_for

    error = ""
    try:
        machine.bind_device(platform)
    except UsageError as refusal:
        error = str(refusal)
    store.set(f"bound/{world.rank}", error)
    keys = wait_for(store, [f"bound/{rank}" for rank in range(world.size)], limit_s)
    texts = dict.fromkeys(store.get(key).decode() for key in keys)
    return [red("devices", text, "fix it, then ask again") for text in texts if text]


def rows_of_other_nodes(
    store: Store, world: bootstrap.World, local: Sequence[DoctorRow], limit_s: float
) -> list[DoctorRow]:
    """Return, on rank 0, the red rows of other nodes that the first node does not have."""
    from mindspeed_rl.launch.preflight import wait_for

    if world.local_rank == 0:
        mine = {row.what: row.fix for row in local if row.status is Status.RED}
        store.set(f"rows/{world.rank}", json.dumps({"host": os.uname().nodename, "rows": mine}))
    if world.rank != 0:
        return []
    hosts: dict[tuple[str, str], list[str]] = {}
    keys = [f"rows/{r}" for r in range(world.local_size, world.size, world.local_size)]
    for account in (json.loads(store.get(key)) for key in wait_for(store, keys, limit_s)):
        for row in account["rows"].items():
            hosts.setdefault(row, []).append(account["host"])
    known = {row.what for row in local}
    return [
        red("other nodes", f"{', '.join(dict.fromkeys(where))}: {what}", fix)
        for (what, fix), where in hosts.items()
        if what not in known
    ]


if __name__ == "__main__":
    sys.exit(main())
