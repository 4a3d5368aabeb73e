"""Recipes of pretrain_scripts: which there are, and what they hand to their entry."""

from __future__ import annotations

import os
import subprocess
from functools import cache

from support.architecture import ROOT

SCRIPTS = ROOT / "pretrain_scripts"
RECIPES = tuple(
    sorted(
        p.name
        for stage in ("grpo", "dapo", "ppo", "distill")
        for p in SCRIPTS.glob(f"{stage}_*.sh")
    )
)


@cache
def recipe_flags(recipe: str, *environment: tuple[str, str]) -> tuple[str, ...]:
    """The arguments that a recipe starts its entry with."""
    done = subprocess.run(
        ["bash", str(SCRIPTS / recipe), "--rl-dry-run"],
        env={"PATH": os.environ["PATH"], "PYTHON": "echo", **dict(environment)},
        capture_output=True,
        text=True,
        check=True,
    )
    minus_m, module, *words = done.stdout.split()
    assert (minus_m, module) == ("-m", "mindspeed_rl.train_rl")
    return tuple(words)
