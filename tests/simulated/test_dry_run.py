"""``--rl-dry-run``: recipes, verdicts and suggestions, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from support.published import PUBLISHED
from support.recipes import recipe_flags

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.config.arguments import parse
from mindspeed_rl.core.memory import MemoryPhase
from mindspeed_rl.models.flops import active_parameters, attention_flops
from mindspeed_rl.planning.dry_run import DOES_NOT_FIT, FITS, dry_run
from mindspeed_rl.planning.findings import Findings, find_out, world_size
from mindspeed_rl.planning.suggestions import plan_of

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
DEEPSEEK = "grpo_deepseek_r1_671b_a3.sh"
QWEN = "grpo_qwen3_235b_a22b_a3.sh"
_BLOCKER = """
import sys, runpy
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "megatron", "vllm", "transformers"):
            raise ImportError(f"{name} is not there on a laptop")
sys.meta_path.insert(0, Blocker())
module = sys.argv.pop(1)
sys.argv[0] = module
runpy.run_module(module, run_name="__main__")
"""


@pytest.fixture(scope="session")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A python whose ``-m`` finds no heavy library."""
    folder = tmp_path_factory.mktemp("laptop")
    blocker, script = folder / "blocker.py", folder / "python"
    blocker.write_text(_BLOCKER)
    script.write_text(f'#!/bin/sh\nshift\nexec "{sys.executable}" "{blocker}" "$@"\n')
    script.chmod(0o755)
    return script


def bash(
    python: Path, recipe: str, *flags: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A recipe's dry run."""
    return subprocess.run(
        ["bash", str(ROOT / "pretrain_scripts" / recipe), "--rl-dry-run", *flags],
        env={"PATH": os.environ["PATH"], "PYTHON": str(python), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment", [{}, {"ROLLOUT_DP": "128", "ROLLOUT_EP": "256"}], ids=["ep128x2", "ep256"]
)
def test_deepseek_r1_on_256_dies_fits(
    environment: dict[str, str], laptop: Path, tmp_path: Path
) -> None:
    target = tmp_path / "report.json"
    done = bash(laptop, DEEPSEEK, "--rl-dry-run-json", str(target), **environment)
    assert done.returncode == 0, done.stderr
    assert "nothing was measured" in done.stdout and "fits" in done.stdout
    report = json.loads(target.read_text())
    assert report["predicted"] is True and report["world"] == 256 and report["fits"]
    assert report["communicators"]["world"] == 256
    phases = report["rank_classes"][2]["bytes"]
    # 671e9 weights in bf16 over 256 dies, and their gradients in fp32
    assert 5.5 * GIB < phases["train"]["parameters"] < 7 * GIB
    assert phases["train"]["grad_buffers"] == 2 * phases["train"]["parameters"]
    experts = 256 // int(environment.get("ROLLOUT_EP", 128))
    weights = phases["rollout"]["engine_weights"]
    expert_gb = experts * 58 * 3 * 7168 * 2048 * 2
    latent = 61 * 128 * (128 + 128) * 512 // 2 * 2  # its up projection once more, over TP2
    others = weights - expert_gb - latent
    assert 16 * GIB < others < 17 * GIB, "half of the 17e9 other weights, and norms"
    assert len(report["weight_update"]) == 3


def test_a_recipe_that_does_not_fit_says_so_and_what_helps(laptop: Path) -> None:
    done = bash(laptop, DEEPSEEK, "--device-memory-gb", "32")
    assert done.returncode == DOES_NOT_FIT
    assert "DOES NOT FIT" in done.stdout and "--rollout-kv-cache-gb 10: 42.00 GiB" in done.stdout


def test_a_bad_flag_is_one_line_before_anything_starts(laptop: Path) -> None:
    done = bash(laptop, DEEPSEEK, "--num-experts", "128")
    assert done.returncode == 2 and done.stdout == ""
    assert "--num-experts 128 but the deepseek_v3 model has 256" in done.stderr
    assert "Traceback" not in done.stderr


# --- the same predictions in this process ----------------------------------------------------


def config_of(recipe: str, *flags: str) -> tuple[RLRunConfig, int]:
    parsed = parse(RLRunConfig, [*recipe_flags(recipe), *flags], "test")
    assert parsed.config.ascend.swap_optimizer
    return parsed.config, world_size(parsed.config, {})


@cache
def found(recipe: str, *flags: str) -> Findings:
    config, world = config_of(recipe, *flags)
    return find_out(config, world)


@pytest.mark.slow
def test_deepseek_runs_out_of_memory_at_8192_batched_tokens_and_not_at_1024() -> None:
    """The recipe's report, under an expert imbalance of 12 (stated): docs/memory.md."""
    imbalance = ("--rl-dry-run-expert-imbalance", "12")
    small = found(DEEPSEEK, *imbalance)
    large = found(DEEPSEEK, *imbalance, "--vllm-max-num-batched-tokens", "8192")
    even = found(DEEPSEEK, "--vllm-max-num-batched-tokens", "8192")
    assert small.fits and even.fits
    assert not large.fits and large.peak.phase is MemoryPhase.ROLLOUT
    best = next(s for s in large.suggestions if s.flags.startswith("--vllm-max-num-batched"))
    assert best.flags == "--vllm-max-num-batched-tokens 1024"
    assert best.peak == small.peak and small.suggestions == ()


def test_active_parameters_of_published_models() -> None:
    """The models' names: 37e9 of 671e9, 22e9 of 235e9, without the embedding."""
    config, world = config_of(DEEPSEEK)
    assert active_parameters(plan_of(config, world).spec) == pytest.approx(36.6e9, rel=0.01)
    config, world = config_of(QWEN)
    assert active_parameters(plan_of(config, world).spec) == pytest.approx(21.6e9, rel=0.01)


def test_flops_of_a_token_by_hand() -> None:
    """Qwen3-235B: 94 layers of 64 heads of 128 + 128 channels; half of 8192 tokens are before."""
    config, world = config_of(QWEN)
    spec = plan_of(config, world).spec
    attention = 94 * 64 * (128 + 128) * 2 * 4096
    assert attention_flops(spec, 8192) == attention


def test_world_size_comes_from_the_flag_or_the_environment() -> None:
    config = parse(RLRunConfig, ["--rl-world-size", "8"], "test").config
    assert world_size(config, {"WORLD_SIZE": "4"}) == 8
    config = parse(RLRunConfig, [], "test").config
    assert world_size(config, {"WORLD_SIZE": "4"}) == 4
    with pytest.raises(ValueError, match="--rl-world-size N"):
        world_size(config, {})


def test_a_supervised_run_has_no_rollout(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--hf-checkpoint", str(PUBLISHED["qwen3-8b"]), "--train-iters", "1", "--bf16"]
    argv += ["--global-batch-size", "64", "--seq-length", "4096", "--rl-world-size", "8"]
    argv += ["--use-distributed-optimizer", "--rl-dry-run", "--sft-data", "not-there.jsonl"]
    config = parse(PretrainRunConfig, argv, "test").config
    findings = find_out(config, 8)
    phases = set(findings.classes[0].table)
    assert phases == {MemoryPhase.LOAD, MemoryPhase.TRAIN_IDLE, MemoryPhase.TRAIN}
    assert findings.volume == ()
    assert dry_run(config, {}) == (FITS if findings.fits else DOES_NOT_FIT)
    printed = capsys.readouterr().out
    assert "engine_weights" not in printed and "weight update" not in printed


def test_a_supervised_run_that_does_not_fit_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    """``--device-memory-gb`` is read here as in an RL run; ``--json -`` prints JSON alone."""
    flags = f"--hf-checkpoint {PUBLISHED['qwen3-8b']} --train-iters 1 --bf16 --seq-length 4096 "
    flags += "--global-batch-size 64 --use-distributed-optimizer --sft-data not-there.jsonl "
    flags += "--rl-world-size 8 --rl-dry-run --json -"
    fits = {}
    for gigabytes in (8, 640):
        words = f"{flags} --device-memory-gb {gigabytes}".split()
        config = parse(PretrainRunConfig, words, "test").config
        code = dry_run(config, {})
        report = json.loads(capsys.readouterr().out)
        assert code == (FITS if report["fits"] else DOES_NOT_FIT)
        fits[gigabytes] = report["fits"]
    assert fits == {8: False, 640: True}
