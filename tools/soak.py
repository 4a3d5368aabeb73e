"""Trains a tiny model twice, once left alone and once under attack, and compares: tools/soak.py.

The second run loses reward workers and whole ranks to kill -9, its rewards fail, its disk is full
at times, and its log is rotated under it. It must end with the same metrics and the same bits as
the first, and no process of either may grow: memory, descriptors, threads and shared memory stay
flat after a warm-up. It needs no accelerator.

  python tools/soak.py --minutes 3                 half of that for each run
  python tools/soak.py --steps 2000 --seed 7       as long as it takes

The disk is a tmpfs of its own, mounted in a user namespace, so that the kernel itself says "No
space left on device". Where namespaces are not allowed the limit of the size of files
(RLIMIT_FSIZE) of the ranks takes its place; the first lines say which.

Exit code 0: all is well; 1: something is not, and the report says what; 2: a wrong flag.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import needs_environment  # noqa: F401
from compare_runs import metrics
from make_task_data import generate_task, write_jsonl
from make_tiny_model import write_tiny_model
from tqdm import tqdm

from mindspeed_rl.checkpoint.resume import find_latest, step_of
from mindspeed_rl.metrics.equality import row_differences

ROOT = Path(__file__).resolve().parents[1]
INSIDE = "MINDSPEED_RL_SOAK_NAMESPACE"
DISK_MIB = 96
ENDLESS = 1_000_000
SAVE_INTERVAL = 5
KINDS = ("worker", "disk", "worker", "log", "rank")
PERIOD_S = 0.25
FULL_S = 20.0  # longest time that the disk stays full
NOTICES = ("wait in memory until", "earlier checkpoints are untouched")
"""What a run says of a full disk: of its logs, and of the checkpoint that ends it."""
WARM_UP = 4  # steps of a process that are not judged: its first ones, and a resume
LEAST_SAMPLES = 10  # steps of a process, to say whether it grows
GROWTH = {"memory": (0.05, 24.0), "descriptors": (0.0, 3.0), "threads": (0.0, 2.0)}
"""What counts as growth from the first to the last third of a process: a part, and an amount."""
REWARD = """
import zlib


def score(request):
    number = zlib.crc32(request.response.encode())
    if number % 29 == 0:
        raise ValueError("a reward that fails")
    return number % 8 / 8
"""


@dataclass
class Usage:
    """Samples of one process, one a step: MiB, descriptors and threads."""

    name: str
    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class Watch:
    """What the processes of the runs use, by process id, and the shared memory of all of them."""

    processes: dict[int, Usage] = field(default_factory=dict)
    shared_mib: list[float] = field(default_factory=list)

    def sample(self, ranks: Sequence[int]) -> None:
        """Take a sample of every rank."""
        for number, pid in enumerate(ranks):
            with suppress(OSError, ValueError):
                usage = self.processes.setdefault(pid, Usage(f"rank {number} (pid {pid})"))
                for name, value in usage_of(pid).items():
                    usage.values[name].append(value)
        names = Path("/dev/shm").glob("*mindspeed_rl-*")
        sizes = [_size(path) for path in names]
        self.shared_mib.append(sum(sizes) / 2**20)

    def findings(self) -> Iterator[str]:
        """Yield what has grown, one line each."""
        for usage in self.processes.values():
            for name, values in usage.values.items():
                if grown := growth(values, *GROWTH[name]):
                    yield f"{usage.name}: {name} {grown}"
        if grown := growth(self.shared_mib, 0.05, 8.0):
            yield f"shared memory {grown}"


def growth(values: Sequence[float], part: float, amount: float) -> str:
    """Say how values grow from their first to their last third; empty where they are flat."""
    if len(values) < LEAST_SAMPLES:
        return ""
    third = len(values) // 3
    before, after = median(values[:third]), median(values[-third:])
    if after - before <= part * before + amount:
        return ""
    return f"grew from {before:.4g} to {after:.4g}"


def usage_of(pid: int) -> dict[str, float]:
    """Return the memory of a process of its own in MiB, its descriptors and its threads."""
    folder = Path("/proc") / str(pid)
    status = dict(
        line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
    )
    kib = sum(float(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return {
        "memory": kib / 2**10,
        "descriptors": float(len(os.listdir(folder / "fd"))),
        "threads": float(status["Threads"]),
    }


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it has just gone
        return 0


def descendants(pid: int) -> dict[int, str]:
    """Return the living processes below a process, in order of their ids, with their commands."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(folder.name)] = int(fields[1])
    found, edge = dict[int, str](), {pid}
    while edge:
        edge = {child for child, parent in parents.items() if parent in edge}
        for child in edge:
            with suppress(OSError):
                command = (Path("/proc") / str(child) / "cmdline").read_bytes()
                found[child] = command.replace(b"\0", b" ").decode(errors="replace")
    return dict(sorted(found.items()))


class Disk:
    """The disk of the runs, which can be full."""

    def __init__(self, folder: Path, *, mounted: bool) -> None:
        self.folder, self.mounted = folder, mounted
        self._ballast = folder / "ballast"
        self.is_full = False

    def fill(self, ranks: Sequence[int]) -> None:
        """Leave no room for another byte."""
        self.is_full = True
        if not self.mounted:
            for pid in ranks:
                self._limit(pid, 1)
            return
        with suppress(OSError), self._ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def empty(self, ranks: Sequence[int]) -> None:
        """Give the room back."""
        self.is_full = False
        self._ballast.unlink(missing_ok=True)
        if not self.mounted:
            for pid in ranks:
                self._limit(pid, resource.RLIM_INFINITY)

    def _limit(self, pid: int, num_bytes: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, hard))


class SoakRun:
    """One run of train_rl below the supervisor that restarts it.

    Args:
        folder: Folder with the model and the data; the log is written there.
        disk: Disk that takes the results.
        name: Name of the folder of the results.
        flags: Further flags of the run.
        num_ranks: Number of ranks.
    """

    def __init__(
        self, folder: Path, disk: Disk, name: str, flags: Sequence[str], num_ranks: int
    ) -> None:
        self.start_s = 0.0  # until its first step
        self.output = disk.folder / name
        self.save = self.output / "save"
        self.log = folder / f"{name}.log"
        command = [
            sys.executable, "-m", "mindspeed_rl.launch.restart", "--max-restarts", str(ENDLESS),
            "--restart-backoff-s", "0.5", "--", sys.executable, "-m", "torch.distributed.run",
            "--nproc-per-node", str(num_ranks), "--master-addr", "127.0.0.1",
            "--master-port", str(free_port()), "-m", "mindspeed_rl.train_rl", *flags,
            "--output-dir", str(self.output), "--save", str(self.save),
        ]  # fmt: skip
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with self.log.open("ab") as log:
            # The limit of files would hold for the log of the ranks, too, so another process
            # writes it then.
            out: Any = log if disk.mounted else subprocess.PIPE
            self._process = subprocess.Popen(
                command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, stdout=out,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            if self._process.stdout is not None:
                with self._process.stdout as read:
                    subprocess.Popen(["cat"], stdin=read, stdout=log)  # ends with the run

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def code(self) -> int | None:
        return self._process.returncode

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks, while they live."""
        found = descendants(self._process.pid).items()
        return [p for p, c in found if "-m mindspeed_rl.train_rl" in c and "distributed" not in c]

    def workers(self) -> list[int]:
        """Return the process ids of the reward workers."""
        found = descendants(self._process.pid).items()
        return [pid for pid, command in found if "mindspeed_rl.rewards.worker" in command]

    def steps(self) -> int:
        """Return the step of the last row of the metrics."""
        with suppress(OSError, ValueError, IndexError, KeyError):
            last = (self.output / "metrics.jsonl").read_bytes().rpartition(b"\n")[0]
            return int(json.loads(last.rpartition(b"\n")[2])["step"])
        return 0

    def told(self) -> str:
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        """End all of it."""
        below = [self._process.pid, *descendants(self._process.pid)]
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


@dataclass
class Attack:
    """What is done to a run, drawn from a seed: at most one thing in a step."""

    run: SoakRun
    disk: Disk
    rng: random.Random
    plan: list[tuple[int, str]]
    done: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _full_since: float = 0.0
    _noticed_before: int = 0

    def advance(self, step: int) -> None:
        """Do what is due after ``step``.

        A full disk is done when the run has told that it waits for room or that a checkpoint found
        none, before a restart meets the same full disk and the job stops for good; where it has not
        written meanwhile, the disk is filled again in a later step.
        """
        if self.disk.is_full:
            noticed = self._notices() > self._noticed_before
            if noticed:
                self.done["disk"] += 1
            elif time.monotonic() - self._full_since > FULL_S:
                self.plan = sorted([*self.plan, (step + 1, "disk")])
            else:
                return
            self.disk.empty(self.run.ranks())
        elif self.plan and step >= self.plan[0][0] and self._do(self.plan[0][1]):
            kind = self.plan.pop(0)[1]
            self.done[kind] += kind != "disk"

    def _notices(self) -> int:
        """Return how often the run has told that it has no room."""
        told = self.run.told()
        return sum(told.count(notice) for notice in NOTICES)

    def _do(self, kind: str) -> bool:
        """Return whether there was something to do it to."""
        ranks = self.run.ranks()
        if not ranks:
            return False
        if kind == "disk":
            self._full_since, self._noticed_before = time.monotonic(), self._notices()
            self.disk.fill(ranks)
        elif kind == "log":
            for file in (self.run.output / "rollouts.jsonl", self.run.log):
                shutil.copy(file, file.with_suffix(".old"))
                os.truncate(file, 0)  # as logrotate does with copytruncate
        else:
            targets = idle(self.run.workers()) if kind == "worker" else ranks
            if not targets:
                return False
            with suppress(ProcessLookupError):
                os.kill(self.rng.choice(targets), signal.SIGKILL)
        return True


def idle(pids: Sequence[int]) -> list[int]:
    """Return the processes that have started and use no processor now."""

    def used(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = {}
    for pid in pids:
        with suppress(OSError):
            before[pid] = used(pid)
    time.sleep(0.3)
    found = []
    for pid, ticks in before.items():
        with suppress(OSError):
            if ticks > 10 and used(pid) == ticks:
                found.append(pid)
    return found


def planned(
    num_steps: int, rng: random.Random, most_deaths: float = math.inf
) -> list[tuple[int, str]]:
    """Draw what happens after which step; a rank dies only behind the first checkpoint.

    Where there are fewer steps than that it dies before the last one. Deaths of ranks beyond
    ``most_deaths`` are those of workers instead.
    """
    plan, step, number = list[tuple[int, str]](), 1, rng.randrange(len(KINDS))
    while step < num_steps - 1:
        plan.append((step, KINDS[number % len(KINDS)]))
        number += 1
        step += rng.randint(2, max(2, min(12, num_steps // 5)))
    kinds = {kind for _, kind in plan}
    lacking = [kind for kind in ("rank", "disk", "log", "worker") if kind not in kinds]
    plan += [(max(1, num_steps // 2), kind) for kind in lacking]
    deaths = [place for place, (_, kind) in enumerate(plan) if kind == "rank"]
    kept = deaths[:: max(1, math.ceil(len(deaths) / most_deaths))]
    for place in set(deaths) - set(kept):
        plan[place] = (plan[place][0], "worker")
    first = min(SAVE_INTERVAL + 1, num_steps - 1)
    return sorted((max(step, first) if kind == "rank" else step, kind) for step, kind in plan)


def deaths_within(seconds: float, whole_s: float, start_s: float) -> int:
    """Return how many ranks may die for a run to end within a time; at least one.

    Args:
        seconds: Time for the run under attack.
        whole_s: How long the run took that was left alone.
        start_s: How much of that its start took; a restart takes as long.
    """
    return max(1, int((seconds - whole_s) / max(1.0, start_s)))


def free_port() -> int:
    """Return a port that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_inputs(folder: Path, seed: int) -> list[str]:
    """Write a model, prompts and a reward; return the flags that use them."""
    write_tiny_model(folder / "model")
    write_jsonl(folder / "train.jsonl", generate_task("digit_sort", 64, seed=seed))
    (folder / "reward.py").write_text(REWARD)
    return [
        "--hf-checkpoint", "model", "--platform", "cpu", "--make-vocab-size-divisible-by", "8",
        "--prompt-data", "train.jsonl", "--reward-function", "reward.py:score",
        "--reward-max-error-rate", "1", "--grpo-prompts-per-step", "4", "--grpo-group-size", "4",
        "--micro-batch-size", "8", "--max-prompt-length", "24", "--vllm-max-num-seqs", "16",
        "--rollout-max-response-length", "8", "--rl-max-logprob-diff", "0", "--lr", "1e-3",
        "--seed", str(seed), "--save-interval", str(SAVE_INTERVAL), "--save-total-limit", "2",
        "--log-rollouts", "4",
        "--rollout-kv-cache-gb", "0.05",  # else free memory decides how many rows a step has
    ]  # fmt: skip


def follow(
    run: SoakRun, watch: Watch, bar: tqdm[None], limit_s: float, attack: Attack | None
) -> bool:
    """Watch a run to its end; return whether it ended well within its limit, and time its start."""
    began, last, changes, known = time.monotonic(), 0, 0, list[int]()
    while run.is_alive and time.monotonic() - began < limit_s:
        step = run.steps()
        bar.n = max(bar.n, min(step, bar.total or step))
        bar.set_postfix(attack.done if attack else {}, refresh=True)
        if attack is not None:
            attack.advance(step)
        if step != last:
            ranks = run.ranks()
            run.start_s = run.start_s or time.monotonic() - began
            changes, last, known = (changes + 1 if ranks == known else 0), step, ranks
            if changes >= WARM_UP:
                watch.sample(ranks)
        time.sleep(PERIOD_S)
    return run.code == 0


def marks(save: Path) -> tuple[int, Mapping[str, object]]:
    """Return the step of the newest checkpoint and the checksums of its tensors."""
    path = find_latest(save).path
    if path is None:
        return 0, {}
    files = json.loads((path / "checkpoint.json").read_text())["files"]
    return step_of(path), {
        n: m for n, m in files.items() if n.endswith((".distcp", ".safetensors"))
    }


def differences(quiet: SoakRun, attacked: SoakRun) -> Iterator[str]:
    """Yield what the two runs computed differently, one line each."""
    rows = [metrics(run.output) for run in (quiet, attacked)]
    if len(rows[0]) != len(rows[1]):
        yield f"metrics.jsonl: {len(rows[0])} rows and {len(rows[1])}"
    for mine, other in zip(*rows, strict=False):
        for name, a, b in row_differences(mine, other):
            yield f"step {mine['step']}: {name}: {a!r} and {b!r}"
    ends = [marks(run.save) for run in (quiet, attacked)]
    if ends[0] != ends[1] or not ends[0][1]:
        yield f"the last checkpoints, of the steps {ends[0][0]} and {ends[1][0]}, have other bytes"


def soak(folder: Path, disk: Disk, options: argparse.Namespace) -> list[str]:
    """Do both runs; return what is wrong, one line each."""
    flags, watch = write_inputs(folder, options.seed), Watch()
    limit_s = 60 * options.minutes if not options.steps else float("inf")
    own = ["--train-iters", str(options.steps or ENDLESS)]
    if not options.steps:
        own += ["--exit-duration-in-mins", f"{0.35 * options.minutes:g}"]
    quiet, began = SoakRun(folder, disk, "quiet", [*flags, *own], options.ranks), time.monotonic()
    try:
        with tqdm(total=options.steps or None, desc="left alone", unit="step") as bar:
            good = follow(quiet, watch, bar, limit_s, None)
    finally:
        quiet.close()
    num_steps, whole_s = marks(quiet.save)[0], time.monotonic() - began
    if not good or not num_steps:
        return [f"the run that was left alone ended with {quiet.code}:\n{quiet.told()[-2000:]}"]
    attacked = SoakRun(
        folder, disk, "attacked", [*flags, "--train-iters", str(num_steps)], options.ranks
    )
    rng, most = random.Random(options.seed), math.inf
    if not options.steps:
        most = deaths_within(limit_s - whole_s, whole_s, quiet.start_s)
    attack = Attack(attacked, disk, rng, planned(num_steps, rng, most))
    try:
        with tqdm(total=num_steps, desc="attacked", unit="step") as bar:
            good = follow(attacked, watch, bar, 20 * limit_s, attack)
    finally:
        disk.empty(attacked.ranks())
        attacked.close()
    if not good:
        return [f"the attacked run ended with {attacked.code}:\n{attacked.told()[-4000:]}"]
    return [*report(num_steps, attack, watch), *differences(quiet, attacked), *watch.findings()]


def report(num_steps: int, attack: Attack, watch: Watch) -> list[str]:
    """Print what was done and used; return what was planned and not done."""
    done = ", ".join(f"{count} x {kind}" for kind, count in sorted(attack.done.items()))
    print(f"{num_steps} steps; attacks: {done}")
    for name in GROWTH:
        ends = [u.values[name] for u in watch.processes.values() if u.values[name]]
        if ends:
            print(f"  {name}: {min(map(min, ends)):.4g} to {max(map(max, ends)):.4g} a rank")
    print(f"  shared memory: at most {max(watch.shared_mib, default=0.0):.4g} MiB")
    return [f"never done: {kind}" for kind in sorted(set(KINDS)) if not attack.done[kind]]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="soak.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=3.0,
        help="about how long both runs take together; the steps follow from it (default 3)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=0, help="steps of each run, in place of time")
    parser.add_argument("--seed", type=int, default=0, help="of data, run and attacks (default 0)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of a run (default 2)")
    parser.add_argument("--keep", action="store_true", help="keep the folder with logs and results")
    options = parser.parse_args(argv)
    if options.minutes <= 0 or options.steps < 0 or options.ranks < 1:
        parser.error("--minutes and --ranks must be above 0, and --steps not below")
    return options


def in_namespace(argv: Sequence[str]) -> None:
    """Start again in a user namespace with mounts of its own, where the machine allows that."""
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    probe = [*unshare, "mount", "-t", "tmpfs", "none", "/mnt"]
    if os.environ.get(INSIDE) or not shutil.which("unshare"):
        return
    if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        command = [*unshare, sys.executable, str(Path(__file__).resolve()), *argv]
        os.execvpe("unshare", command, os.environ | {INSIDE: "1"})


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    options = parse(argv)
    in_namespace(argv)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the runs as well
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    place, mounted = folder / "disk", bool(os.environ.get(INSIDE))
    place.mkdir()
    if mounted:
        size = f"size={DISK_MIB}m"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "soak", str(place)], check=True)
    how = f"a tmpfs of {DISK_MIB} MiB" if mounted else "the limit of files (RLIMIT_FSIZE)"
    print(f"soak in {folder}; the disk is {how}", flush=True)
    try:
        wrong = soak(folder, Disk(place, mounted=mounted), options)
    finally:
        if mounted:
            if options.keep:
                shutil.copytree(place, folder / "results")
            subprocess.run(["umount", str(place)], check=False)
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    for line in wrong[:40]:
        print(f"WRONG: {line}")
    print("the same bits, nothing grew" if not wrong else f"{len(wrong)} findings")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
