"""What docs/rewards.md tells a user to type and to write is accepted."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from mindspeed_rl.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.environments import resolve_environment
from mindspeed_rl.orchestration.rl_rewards import reward_settings
from mindspeed_rl.rewards import RewardRequest, RewardSpec, known_rewards, resolve_reward
from mindspeed_rl.rewards.code import parse_tests

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def arrays() -> list[tuple[str, str]]:
    return [
        (block, name) for block in blocks("bash") for name in re.findall(r"^(\w+)=\(", block, re.M)
    ]


@pytest.mark.parametrize(("block", "name"), arrays())
def test_flags_are_accepted(block: str, name: str) -> None:
    script = f'{block}\nprintf "%s\\n" "${{{name}[@]}}"'
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    config = parse(RLRunConfig, done.stdout.splitlines(), "test").config
    specs = [RewardSpec.parse(text) for text in config.rewards.reward_function]
    settings = reward_settings(config)
    for spec in specs:
        if ":" not in spec.name and spec.name != "code":
            resolve_reward(spec, settings)
        assert ":" in spec.name or spec.name in known_rewards()
    if "rl-eval-data" in block:
        assert config.prompts.eval_files == {"": "heldout.jsonl", "hard": "hard.jsonl"}


def test_rows_are_read() -> None:
    rows = [json.loads(block) for block in blocks("json")]
    assert [row["prompt"][:5] for row in rows] == ["What ", "Write"]
    assert len(parse_tests(rows[1]["tests"])) == 2


def test_code_runs(tmp_path: Path) -> None:
    brevity, riddle = blocks("python")
    (tmp_path / "rewards.py").write_text(brevity)
    (tmp_path / "riddle.py").write_text(riddle)
    function = resolve_reward(f"{tmp_path}/rewards.py:brevity")
    assert function(RewardRequest(0, "", "", "", "stop", 3)) == 1.0
    assert resolve_environment(f"{tmp_path}/riddle.py:Riddle").__name__ == "Riddle"  # type: ignore[attr-defined]


def test_every_reward_is_described() -> None:
    for name in known_rewards():
        assert f"| `{name}` |" in TEXT, name
