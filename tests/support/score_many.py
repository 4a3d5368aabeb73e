"""``mindspeed_rl.score`` several times in one world, which saves the start of all but the first.

usage: a list of commands (lists of flags) as a JSON file. The layout is that of the first; each is
checked, loads its model and writes its result as the entry does; the groups of the grid are those
of the first. What one run leaves in the process the next one meets, so the proof that the command
itself is right stays with runs of their own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

from mindspeed_rl import score
from mindspeed_rl.config import ScoreRunConfig
from mindspeed_rl.config.arguments import parse
from mindspeed_rl.launch import bootstrap
from mindspeed_rl.launch.job import check_run, end_job, start_job
from mindspeed_rl.planning.run_plan import check_score

PROG = "mindspeed_rl.score"


def main(commands: list[list[str]]) -> None:
    """One after the other. Collective: the world."""
    world = bootstrap.World.from_environment()
    first, *others = (
        check_run(parse(ScoreRunConfig, flags, PROG), check_score, world.size) for flags in commands
    )
    job = start_job(PROG, first, world)
    try:
        score.main(job)
        from mindspeed_rl.rl import build_models

        with mock.patch.object(build_models, "initialize_parallel"):
            for checked in others:
                assert checked.plan.parallel == first.plan.parallel, "one layout in a world"
                score.main(replace(job, config=checked.parsed.config, plan=checked.plan))
        end_job(job)
    except BaseException as error:
        job.watchdog.fail(error)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
