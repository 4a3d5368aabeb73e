"""``--rl-dry-run``: recipes, verdicts and suggestions, without torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.published import PUBLISHED, published_config
from support.recipes import recipe_flags

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.memory import MemoryPhase
from mindspeed_rl.models.flops import active_parameters, attention_flops
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.planning.dry_run import DOES_NOT_FIT, FITS, dry_run
from mindspeed_rl.planning.findings import Findings, find_out, world_size

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
DEEPSEEK = "grpo_deepseek_r1_671b_a3.sh"
WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(["torch", "megatron", "vllm", "transformers"]))
"""


def bash(
    folder: Path, recipe: str, *flags: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A recipe's dry run by a Python that finds no heavy library."""
    (folder / "sitecustomize.py").write_text(WITHOUT_TORCH)
    return subprocess.run(
        ["bash", str(ROOT / "pretrain_scripts" / recipe), "--rl-dry-run", *flags],
        env={"PATH": os.environ["PATH"], "PYTHON": sys.executable, "PYTHONPATH": str(folder)}
        | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment", [{}, {"ROLLOUT_DP": "128", "ROLLOUT_EP": "256"}], ids=["ep128x2", "ep256"]
)
def test_deepseek_r1_on_256_dies_fits(environment: dict[str, str], tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    done = bash(tmp_path, DEEPSEEK, "--rl-dry-run-json", str(target), **environment)
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


def test_a_recipe_that_does_not_fit_says_so_and_what_helps(tmp_path: Path) -> None:
    done = bash(tmp_path, DEEPSEEK, "--device-memory-gb", "32")
    assert done.returncode == DOES_NOT_FIT
    assert (
        "DOES NOT FIT" in done.stdout
        and "--rollout-kv-cache-gb 10: 46.16 GiB in phase rollout" in done.stdout
    )
    # and what follows the last optimizer step, whether it fits or not
    assert "a single plan for gather and weight sync, from" in done.stdout
    assert "engine, would not be worthwhile: it could leave out" in done.stdout
    assert re.search(
        r"the last optimizer step .*: if they overlapped, at most .* ms would be saved, 0\.\d+% of",
        done.stdout,
    )


def test_a_bad_flag_is_one_line_before_anything_starts(tmp_path: Path) -> None:
    done = bash(tmp_path, DEEPSEEK, "--num-experts", "128")
    assert done.returncode == 2 and done.stdout == ""
    assert "--num-experts 128 but the deepseek_v3 model has 256" in done.stderr
    assert "Traceback" not in done.stderr


# --- the same predictions in this process ----------------------------------------------------


def found(*flags: str) -> Findings:
    config = parse(RLRunConfig, [*recipe_flags(DEEPSEEK), *flags], "test").config
    return find_out(config, world_size(config, {}))


@pytest.mark.slow
def test_deepseek_runs_out_of_memory_at_8192_batched_tokens_and_not_at_1024() -> None:
    """The recipe's report, under an expert imbalance of 12 (stated): docs/memory.md."""
    imbalance = ("--rl-dry-run-expert-imbalance", "12")
    small = found(*imbalance)
    large = found(*imbalance, "--vllm-max-num-batched-tokens", "8192")
    even = found("--vllm-max-num-batched-tokens", "8192")
    assert small.fits and even.fits
    assert not large.fits and large.peak.phase is MemoryPhase.ROLLOUT
    best = next(s for s in large.suggestions if s.flags.startswith("--vllm-max-num-batched"))
    assert best.flags == "--vllm-max-num-batched-tokens 1024"
    assert best.peak == small.peak and small.suggestions == ()


def test_engines_without_expert_parallelism_are_told_to_share_their_experts() -> None:
    """512 ranks with a slice of each of 256 experts on every one of 8: 158 GiB of weights each."""
    sizes = ("--rollout-tp", "8", "--rollout-dp", "1", "--rollout-ep", "1")
    run = found(*sizes, "--rl-world-size", "512")
    assert not run.fits and run.peak.phase is MemoryPhase.ROLLOUT
    best = run.suggestions[0]
    assert best.flags == "--rollout-dp 32 --rollout-ep 256" and best.peak.num_bytes < 62 * GIB
    eager = next(s for s in run.suggestions if s.flags == "--rollout-graph-mode eager")
    # 16 graphs of 256 MiB are not captured
    assert run.peak.num_bytes - eager.peak.num_bytes == 4 * GIB


def test_operations_of_published_models() -> None:
    """The models' names: 37e9 of 671e9, 22e9 of 235e9, without the embedding; attention by hand."""
    deepseek = spec_from_hf_config(published_config("deepseek-v3"))
    qwen = spec_from_hf_config(published_config("qwen3-235b-a22b"))
    assert active_parameters(deepseek) == pytest.approx(36.6e9, rel=0.01)
    assert active_parameters(qwen) == pytest.approx(21.6e9, rel=0.01)
    # 94 layers of 64 heads of 128 + 128 channels; half of 8192 tokens are before
    assert attention_flops(qwen, 8192) == 94 * 64 * (128 + 128) * 2 * 4096


def test_world_size_comes_from_the_flag_or_the_environment() -> None:
    config = parse(RLRunConfig, ["--rl-world-size", "8"], "test").config
    assert world_size(config, {"WORLD_SIZE": "4"}) == 8
    config = parse(RLRunConfig, [], "test").config
    assert world_size(config, {"WORLD_SIZE": "4"}) == 4
    assert world_size(config, {}) == 1
    with pytest.raises(UsageError, match=r"WORLD_SIZE=none: .*--rl-world-size N"):
        world_size(config, {"WORLD_SIZE": "none"})


@pytest.mark.parametrize(("gigabytes", "fits"), [(8, False), (640, True)])
def test_a_supervised_run_has_no_rollout_and_its_own_device(
    gigabytes: int, fits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--device-memory-gb`` is read here as in an RL run; ``--json -`` prints JSON alone."""
    flags = f"--hf-checkpoint {PUBLISHED['qwen3-8b']} --train-iters 1 --bf16 --seq-length 4096 "
    flags += "--global-batch-size 64 --use-distributed-optimizer --sft-data not-there.jsonl "
    flags += f"--rl-world-size 8 --rl-dry-run --device-memory-gb {gigabytes}"
    config = parse(PretrainRunConfig, flags.split(), "test").config
    assert dry_run(config, {}) == (FITS if fits else DOES_NOT_FIT)
    printed = capsys.readouterr().out
    assert "engine_weights" not in printed and "weight update" not in printed
    config = parse(PretrainRunConfig, [*flags.split(), "--json", "-"], "test").config
    dry_run(config, {})
    report = json.loads(capsys.readouterr().out)
    assert report["fits"] is fits and report["weight_update"] == []
    assert report["rank_classes"][0]["bytes"].keys() == {"load", "train_idle", "train"}
