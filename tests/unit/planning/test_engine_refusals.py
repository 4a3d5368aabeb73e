"""A dry run refuses what the engine of its machine would refuse, by the same checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.published import PUBLISHED, published_config

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core import installed
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.planning.findings import find_out
from mindspeed_rl.planning.run_plan import check_engine
from mindspeed_rl.planning.suggestions import plan_of

MOE, DENSE = "qwen3-30b-a3b", "qwen2.5-7b"


def config_of(machine: str, flags: str, checkpoint: Path) -> RLRunConfig:
    words = f"""
        --hf-checkpoint {checkpoint} --train-iters 1 --bf16 --rl-dry-run-machine {machine}
        --grpo-prompts-per-step 4 --grpo-group-size 4 --rollout-tp 4 --rollout-kv-cache-gb 8
        --vllm-max-num-seqs 16 --tensor-model-parallel-size 4 --sequence-parallel
    """
    return parse(RLRunConfig, [*words.split(), *flags.split()], "test").config


REFUSED = [
    ("a3", DENSE, "--rollout-sleep kv --reshard-deltas device", "--reshard-deltas device: coding"),
    ("a3", DENSE, "--rollout-sleep kv --reshard-deltas host", "--reshard-deltas host: coding"),
    ("a3", MOE, "--rl-routing-replay rollout --rollout-ep 4", "--rl-routing-replay rollout"),
    ("h200", MOE, "--rl-routing-replay rollout", "--rl-routing-replay rollout"),
    ("h200", DENSE, "--rollout-graph-mode piecewise", "--rollout-graph-mode piecewise"),
    (
        "h200",
        MOE,
        "--rollout-graph-mode full-decode --rollout-tp 2 --rollout-dp 2 --rollout-ep 4",
        "--rollout-graph-mode full-decode with --rollout-dp 2",
    ),
    ("cpu", MOE, "--rollout-multistream-moe", "--rollout-multistream-moe"),
    ("h200", MOE, "--rollout-dp-sync packed", "--rollout-dp-sync packed"),
    ("h200", DENSE, "--vllm-enforce-eager false", "--vllm-enforce-eager: use"),
    ("h200", MOE, "--vllm-moe-backend auto", "--vllm-moe-backend"),
    ("a3", DENSE, "--vllm-enforce-eager true", "--vllm-enforce-eager"),
    (
        "a3",
        DENSE,
        '--vllm-additional-config {"rl_config":{"enabled":true}}',
        "--vllm-additional-config rl_config",
    ),
    (
        "a3",
        DENSE,
        '--vllm-compilation-config {"cudagraph_capture_sizes":[3]}',
        "--vllm-compilation-config.cudagraph_capture_sizes",
    ),
    ("cpu", DENSE, "--vllm-max-num-batched-tokens 100", "--vllm-max-num-batched-tokens 100"),
    (
        "h200",
        DENSE,
        "--vllm-max-num-batched-tokens 100 --vllm-enable-chunked-prefill false",
        "--vllm-max-num-batched-tokens 100",
    ),
    (
        "a3",
        DENSE,
        "--vllm-max-num-batched-tokens 100 --rollout-chunked-prefill off",
        "--vllm-max-num-batched-tokens 100",
    ),
    ("h200", DENSE, "--vllm-max-num-batched-tokens 15", "give at least 16"),
    ("h200", DENSE, "--swap-optimizer --use-distributed-optimizer", "--swap-optimizer"),
    (
        "a3",
        MOE,
        "--rollout-expert-map m.json --rollout-ep 4 --reshard-path stream",
        "--reshard-path",
    ),
    (
        "h200",
        MOE,
        "--rollout-expert-placement trainer --rollout-ep 4 "
        "--vllm-all2all-backend deepep_low_latency",
        "--vllm-all2all-backend deepep_low_latency",
    ),
    ("h200", MOE, "--rollout-expert-placement balanced", "set --rollout-ep"),
    ("a3", MOE, "--rollout-expert-placement balanced --rollout-ep 4", "--rollout-graph-mode eager"),
    (
        "h200",
        MOE,
        "--rollout-expert-placement balanced --rollout-ep 4 --rollout-graph-mode full-decode",
        "graphs are captured before tokens are counted",
    ),
    ("h200", DENSE, "--rollout-expert-placement trainer", "set --rollout-ep"),
    (
        "h200",
        MOE,
        "--rollout-expert-placement trainer --rollout-ep 4 --reshard-path stream",
        "--reshard-path",
    ),
]


@pytest.mark.parametrize(("machine", "model", "flags", "named"), REFUSED)
def test_flags_that_the_engine_of_the_machine_lacks_are_refused(
    machine: str, model: str, flags: str, named: str
) -> None:
    with pytest.raises(UsageError) as refused:
        find_out(config_of(machine, flags, PUBLISHED[model]), 4)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("machine", "changes", "named"),
    [("cpu", {"head_dim": 48}, "head_dim 48"), ("a3", {"index_topk": 2048}, "index_topk")],
)
def test_models_that_the_engine_of_the_machine_lacks_are_refused(
    machine: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published_config("qwen3-8b") | changes))
    config = config_of(machine, "", tmp_path)
    with pytest.raises(UsageError, match=named):
        check_engine(config, plan_of(config, 4), {"a3": "npu"}.get(machine, machine))


@pytest.mark.parametrize(
    ("machine", "flags"),
    [
        ("cpu", "--rl-routing-replay rollout --rollout-rebalance waiting"),
        ("cpu", "--vllm-enforce-eager false"),
        ("cpu", "--rollout-sleep kv --reshard-deltas host"),
        ("h200", "--rollout-sleep kv --reshard-deltas device"),
        ("h200", "--vllm-max-num-batched-tokens 100"),
        ("a3", "--vllm-max-num-batched-tokens 100 --rollout-chunked-prefill on"),
        ("a3", "--rollout-rebalance all --rollout-graph-sizes 8 16 --rollout-multistream-moe"),
        ("h200", "--rl-routing-replay trainer --rollout-rebalance all"),
    ],
)
def test_what_the_engine_has_passes(machine: str, flags: str) -> None:
    config = config_of(machine, flags, PUBLISHED[MOE])
    platform = {"cpu": "cpu", "a3": "npu", "h200": "cuda"}[machine]
    check_engine(config, plan_of(config, 4), platform)


def test_a_dry_run_is_for_its_machine_not_for_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags that only NPUs refuse, for a CPU, where torch_npu is installed."""
    config = config_of("cpu", "--rl-routing-replay rollout --rollout-ep 4", PUBLISHED[MOE])
    found = installed.find_spec
    monkeypatch.setattr(
        installed, "find_spec", lambda name: object() if name == "torch_npu" else found(name)
    )
    assert installed.resolve_platform("auto") == "npu"
    check_engine(config, plan_of(config, 4), "cpu")
    with pytest.raises(UsageError, match="--rl-routing-replay rollout"):
        check_engine(config, plan_of(config, 4), "npu")
