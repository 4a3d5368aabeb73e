"""What docs/algorithms.md tells a user to type is accepted, and its tables are complete."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from mindspeed_rl.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.algorithms import ADVANTAGE_ESTIMATORS, AGGREGATIONS, POLICY_LOSSES
from mindspeed_rl.config.check_algorithms import check_algorithms

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text()


def recipes() -> list[str]:
    (block,) = re.findall(r"```bash\n(# GRPO.*?)```", TEXT, re.DOTALL)
    return re.findall(r"RL_ARGS=\(.*?\)$", block, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("recipe", recipes())
def test_a_recipe_passes_all_checks(recipe: str) -> None:
    script = recipe + '\nprintf "%s\\n" "${RL_ARGS[@]}"'
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    words = [*done.stdout.split(), "--rollout-max-response-length", "1024"]
    check_algorithms(parse(RLRunConfig, words, "test").config)


def test_there_are_recipes() -> None:
    assert len(recipes()) == 8


@pytest.mark.parametrize("names", [ADVANTAGE_ESTIMATORS, POLICY_LOSSES, AGGREGATIONS])
def test_every_choice_has_its_row(names: tuple[str, ...]) -> None:
    rows = {word for row in re.findall(r"^\|(.*?)\|", TEXT, re.MULTILINE)
            for word in re.findall(r"`(.*?)`", row)}  # fmt: skip
    assert set(names) <= rows
