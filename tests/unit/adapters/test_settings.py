"""Flags of adapters: the scale, the layers, what is refused, and the answers to other names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mindspeed_rl.algorithms.lora import LINEAR_LAYERS, NO_ADAPTERS, LoraSettings
from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.flag_checks.algorithms import check_algorithms

BASE = ("--hf-checkpoint", "model", "--prompt-data", "data", "--train-iters", "1")


GROUPED = [
    f"model.layers.0.{name}_proj.weight"
    for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.down", "mlp.up")
]
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
LATENT = [f"model.layers.0.self_attn.{name}.weight" for name in (*_LATENT, "o_proj")]


def parsed(*flags: str) -> RLRunConfig:
    config: RLRunConfig = parse(RLRunConfig, [*BASE, *flags], "test").config
    return config


def test_scale() -> None:
    """Alpha / r, and alpha / sqrt(r) with rank-stabilised LoRA."""
    plain = LoraSettings(lora_rank=16, lora_alpha=40.0)
    assert plain.scale == 2.5
    assert replace(plain, lora_rslora=True).scale == 10.0
    assert plain.is_on and not NO_ADAPTERS.is_on


def test_layers() -> None:
    assert LoraSettings(4).layers == LINEAR_LAYERS
    some = LoraSettings(4, lora_target=("up_proj", "k_proj", "up_proj"))
    assert some.layers == ("k_proj", "up_proj")
    latent = {
        ("linear_q_down_proj", "linear_kv_up_proj"): ("q_a_proj", "kv_b_proj"),
        ("linear_kv_down_proj", "linear_q_up_proj"): ("q_b_proj", "kv_a_proj_with_mqa"),
        ("linear_qb", "linear_kvb"): ("q_b_proj", "kv_b_proj"),
        ("linear_qkv",): ("q_a_proj", "kv_a_proj_with_mqa"),
        ("all-linear",): ("o_proj", *_LATENT),
    }
    for names, expected in latent.items():
        assert LoraSettings(4, lora_target=names).layers_among(LATENT) == expected, names
    assert LoraSettings(4).layers_among([*LATENT, "model.layers.0.mlp.gate.weight"])[0] == "o_proj"
    fused = LoraSettings(4, lora_target=("linear_fc1", "linear_proj"))
    assert fused.layers == ("o_proj", "gate_proj", "up_proj")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.self_attn.k_proj.weight", True),
        ("model.layers.3.mlp.experts.11.up_proj.weight", True),
        ("model.layers.3.mlp.shared_expert.up_proj.weight", True),
        ("model.layers.3.self_attn.k_proj.bias", False),
        ("model.layers.3.self_attn.q_proj.weight", False),
        ("model.layers.3.mlp.gate.weight", False),
        ("model.embed_tokens.weight", False),
    ],
)
def test_covered_names(name: str, expected: bool) -> None:
    assert LoraSettings(4, lora_target=("k_proj", "up_proj")).covers(name) is expected


def test_names_of_mindspeed_llm() -> None:
    theirs = parsed(
        "--lora-r", "8", "--lora-alpha", "16", "--lora-target-modules", "linear_qkv", "linear_fc2"
    )
    ours = parsed(
        "--lora-rank", "8", "--lora-alpha", "16",
        "--lora-target", "q_proj", "k_proj", "v_proj", "down_proj",
    )  # fmt: skip
    assert theirs.lora.layers_among(GROUPED) == ours.lora.layers_among(GROUPED) == ours.lora.layers
    assert theirs.lora.scale == ours.lora.scale == 2.0


def test_refused_together() -> None:
    flags = ("--ref-update-interval", "2", "--grpo-kl-beta", "0.1")
    check_algorithms(parsed(*flags))
    with pytest.raises(UsageError, match=rf"--lora-rank 4: not with {flags[0]}"):
        check_algorithms(parsed(*flags, "--lora-rank", "4"))


def test_alpha_without_a_rank_is_refused() -> None:
    with pytest.raises(UsageError, match="--lora-alpha"):
        check_algorithms(parsed("--lora-alpha", "4"))
