"""A mistake of the user ends a real job within seconds, told once, with the way out.

Every job has two ranks and starts like a user's; none of them gets as far as to start an engine.
One mistake for each place where a run can find one: unit tests hold the messages of the others.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import load_file, save_file
from support.jobs import ROOT, TorchrunJob
from support.whole_runs import run_entry, write_inputs

from mindspeed_rl.api import RLTrainer

pytestmark = pytest.mark.e2e

LIMIT_S = 300.0  # on a busy machine; 8 s on a quiet one
ENTRY = ["-m", "mindspeed_rl.train_rl"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good input; each test spoils a piece of it by a flag."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_inputs(folder, 16)
    return folder


FLAGS = {
    "--hf-checkpoint": "model", "--platform": "cpu", "--prompt-data": "train.jsonl",
    "--make-vocab-size-divisible-by": "8", "--train-iters": "2",
    "--grpo-prompts-per-step": "4", "--grpo-group-size": "2", "--micro-batch-size": "4",
    "--lr": "1e-3", "--reward-function": "format", "--reward-num-workers": "1",
    "--max-prompt-length": "24", "--rollout-max-response-length": "6", "--output-dir": "out",
}  # fmt: skip


def arguments(changes: dict[str, str]) -> list[str]:
    return [part for item in (FLAGS | changes).items() for part in item]


def load_file_module(folder: Path, name: str, text: str) -> ModuleType:
    """A module of a user's file, as an import makes it."""
    (folder / f"{name}.py").write_text(text)
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def no_answer(folder: Path) -> dict[str, str]:
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    del rows[3]["answer"]
    (folder / "unanswered.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"--prompt-data": "unanswered.jsonl"}


def no_reward_function(folder: Path) -> dict[str, str]:
    return {"--reward-function": "reward.py:score"}


def spoilt_model(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(folder / "model", folder / name))


def missing_tensor(folder: Path) -> dict[str, str]:
    file = spoilt_model(folder, "incomplete") / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    return {"--hf-checkpoint": "incomplete"}


def no_such_platform(folder: Path) -> dict[str, str]:
    return {"--platform": "cuda"}


def installed(folder: Path, name: str, version: str) -> None:
    """What Python finds before the real package, where the folder is on its path."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def old_versions(folder: Path) -> dict[str, str]:
    installed(folder / "old_versions", "megatron-core", "0.1.0")
    return {}


def unknown_option(folder: Path) -> dict[str, str]:
    """Looked up in vLLM itself, before the trainer is built."""
    return {"--vllm-max-num-seq": "4"}


MISTAKES = {
    no_answer: r"unanswered\.jsonl:4: --answer-key 'answer' gives None.*Fix the row",
    no_reward_function: r"reward\.py.*score",
    missing_tensor: r"--hf-checkpoint incomplete.*1 of 27 tensors.*model\.norm\.weight",
    no_such_platform: r"outside the matrix of cuda: vllm is not installed, ==",
    old_versions: r"outside the matrix of cpu: megatron-core 0\.1\.0, .*setup_env\.sh",
    unknown_option: r"--vllm-max-num-seq: vLLM has no such option; nearest: --vllm-max-num-seqs",
}


@pytest.mark.parametrize(
    "spoil",
    [pytest.param(f, id=f.__name__, marks=() if f is missing_tensor else pytest.mark.slow)
     for f in MISTAKES],
)  # fmt: skip
def test_a_mistake_is_told_once(world: Path, spoil: Callable[[Path], dict[str, str]]) -> None:
    flags = arguments(spoil(world))
    environment = {"PYTHONPATH": os.pathsep.join([str(world / spoil.__name__), str(ROOT)])}
    with TorchrunJob(world, ENTRY, flags, environment=environment, fresh=True) as job:
        ended = job.end(LIMIT_S)
    told = re.findall(r"^mindspeed_rl\.train_rl: error: (.*)$", ended.output, re.MULTILINE)
    assert len(told) == 1 and re.search(MISTAKES[spoil], told[0]), ended.output
    ours = ended.output.partition(told[0])[0]
    assert "Traceback" not in ours, "the message comes first"
    assert ended.returncodes[0] != 0 and "exitcode  : 2" in ended.output, ended.output
    report = ended.output.partition("Root Cause")[2]
    assert f"traceback : mindspeed_rl.train_rl: error: {told[0]}" in report, "and last"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("condition", "where"),
    [
        (
            "True",
            "RewardError: on prompts of the data, with their own answers as responses, 3 of 3",
        ),
        ("r.response != r.answer", "in phase reward: RewardError: 4 of 4"),
    ],
    ids=["always", "on what the model samples"],
)
def test_rewards_that_raise_end_the_job_with_the_first_traceback(
    world: Path, condition: str, where: str
) -> None:
    """Before the models are loaded, where they raise on the answers of the data, too."""
    code = f"def fails(r):\n    return {{}}['the key that nobody set'] if {condition} else 1.0\n"
    (world / "failing.py").write_text(code)
    flags = arguments({"--reward-function": "failing.py:fails"})
    ended = run_entry(world, flags, limit_s=LIMIT_S)
    assert ended.returncodes[0] != 0
    told = f"{where} rewards (100.0%) failed, above --reward-max-error-rate"
    assert told in ended.output, ended.output
    assert "KeyError: 'the key that nobody set'" in ended.output
    tried = "rewards of the answers of 3 prompts: fails 1, 1, 1"
    assert (tried in ended.output) == (condition != "True")


def python(folder: Path, *args: str, path: str) -> subprocess.CompletedProcess[str]:
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    return subprocess.run(
        [sys.executable, *args], cwd=folder, env=alone | {"PYTHONPATH": path},
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip


def test_an_entry_without_torchrun_is_a_job_of_one_rank(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the Python interface starts it, with a function as reward."""
    monkeypatch.chdir(world)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    flags = {
        name.strip("-").replace("-", "_"): value
        for name, value in FLAGS.items()
        if name not in ("--hf-checkpoint", "--prompt-data", "--reward-function", "--output-dir")
    }
    rows = [json.loads(line) for line in (world / "train.jsonl").read_text().splitlines()]
    reward = load_file_module(
        world, "lengths", "def length(request):\n    return len(request.response) / 8\n"
    )
    trainer = RLTrainer("model", rows, reward.length, output_dir="alone", flags=flags)
    result = trainer.train()
    record = json.loads((world / "alone" / "config.json").read_text())
    assert record["machine"]["ranks"] == 1
    assert [row["step"] for row in result.metrics() if "reward/mean" in row] == [1, 2]
    assert result.summary["steps"] == 2
    # The text of a sample in the file shows special tokens, too, which the reward does not get.
    scored = [(row["reward"], len(row["response"]) / 8) for row in result.rollouts()]
    assert scored and all(0 < reward <= length for reward, length in scored)
    assert len({reward for reward, _ in scored}) > 1
    two = arguments({"--output-dir": "two", "--tensor-model-parallel-size": "2"})
    ended = python(world, *ENTRY, *two, path=str(ROOT))
    assert ended.returncode == 2
    assert re.fullmatch(
        r"mindspeed_rl\.train_rl: error: world size 1 .*start torchrun with .*\n", ended.stderr
    )


def test_a_foreign_package_behind_ours_is_named(world: Path) -> None:
    foreign = world / "elsewhere" / "mindspeed_rl"
    foreign.mkdir(parents=True)
    (foreign / "__init__.py").touch()
    ended = python(
        world, *ENTRY, *arguments({}), path=os.pathsep.join([str(ROOT), str(foreign.parent)])
    )
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert f"another package named mindspeed_rl is on the path: {foreign}" in ended.stderr


def test_a_foreign_package_before_ours_is_named_by_the_scripts(world: Path) -> None:
    foreign = world / "first" / "mindspeed_rl"
    foreign.mkdir(parents=True)
    (foreign / "__init__.py").touch()
    ended = subprocess.run(
        ["bash", str(ROOT / "pretrain_scripts" / "check_package.sh"), sys.executable],
        cwd=world, env=os.environ | {"PYTHONPATH": f"{foreign.parent}:{ROOT}"},
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert str(foreign) in ended.stderr and "PYTHONPATH" in ended.stderr
    ended = subprocess.run(
        ["bash", str(ROOT / "pretrain_scripts" / "check_package.sh"), sys.executable],
        cwd=world, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=LIMIT_S,
    )  # fmt: skip
    assert ended.returncode == 0
