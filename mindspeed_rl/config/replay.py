"""Flags of a replay: one step of an earlier run again, and where its numbers first differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.core.flag import Needs, flag

REPLAY_FOLDER = "replay"


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """Replay of a step.

    Added to the command line of a run, --replay STEP DIR runs one of its steps again and compares
    the numbers with those in DIR, the --output-dir of the run. It starts from the newest checkpoint
    before STEP in --save (in --load where there is no --save), or, for step 1, as the run did; the
    steps from there to STEP are run with the prompts, seeds and order that they had. Nothing is
    saved, exported or evaluated, and all output goes to DIR/replay. What the step computed is kept
    there as a record; another replay of the step, with a changed flag or on other ranks, is
    compared with that record and says where the first difference arises. The exit code is 0 when
    everything is equal.

    Example: bash recipe.sh --replay 120 outputs
    """

    replay: tuple[str, ...] = flag(
        (),
        "STEP DIR: the step to run again, and the --output-dir of the run that it belongs to.",
        nargs="+",
    )
    replay_compare: str = flag(
        "",
        "Record of a replay (.npz) to compare with. Empty takes that of the first replay of the "
        "step in DIR.",
        needs=Needs("--replay"),
    )
    replay_tolerance: float | None = flag(
        None,
        "Largest relative difference that counts as equal; 0 compares bits. Unset takes 0 where "
        "the layout is the same, and for another layout, which rounds differently, 1e-4, with "
        "--bf16 5e-2.",
        minimum=0.0,
        needs=Needs("--replay"),
    )

    @property
    def active(self) -> bool:
        """Whether the run is a replay."""
        return bool(self.replay)

    @property
    def step(self) -> int:
        """The step to run again."""
        return int(self.replay[0])

    @property
    def run_folder(self) -> Path:
        """The folder with the results of the run."""
        return Path(self.replay[1])

    @property
    def folder(self) -> Path:
        """The folder of everything that replays of the step write."""
        return self.run_folder / REPLAY_FOLDER / f"step_{self.step:07d}"
