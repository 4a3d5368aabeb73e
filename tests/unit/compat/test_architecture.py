"""Architecture flags of a script against the HF config."""

import pytest
from support.published import published_config
from support.published_scripts import script_flags

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.compat.architecture import check_foreign_architecture, value_in
from mindspeed_rl.compat.foreign_flags import Disposition, foreign_flags
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.launch.job import check_script

COMPARED = {
    name: flag.comparison
    for name, flag in foreign_flags().items()
    if flag.disposition is Disposition.COMPARED
}

QWEN2 = {"model_type": "qwen2", "num_hidden_layers": 2, "rope_theta": 1e4}
NORMED = {"spec.qk_norm": True}
QWEN3_MOE = published_config("qwen3-235b-a22b") | {"num_hidden_layers": 94} | NORMED
DEEPSEEK_V3 = published_config("deepseek-v3") | NORMED
LLAMA3_ROPE = {
    "model_type": "llama",
    "rope_parameters": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "long_factor": [1.0, 1.5],
        "original_max_position_embeddings": 8192,
    },
}


def check(argv, config):
    parsed = parse(RLRunConfig, argv if isinstance(argv, list) else argv.split(), "train_rl")
    check_foreign_architecture(parsed.checked_arch, config)


def contradiction(argv, config):
    with pytest.raises(ValueError, match="--hf-checkpoint") as caught:
        check(argv, config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("script", "config"),
    [
        (script_flags("qwen3_moe/pretrain_qwen3_235b_a22b_4k_A3_ptd.sh"), QWEN3_MOE),
        (script_flags("deepseek3/pretrain_deepseek3_671b_4k_A3_ptd.sh"), DEEPSEEK_V3),
        (script_flags("qwen3/pretrain_qwen3_8b_4K_ptd_A3.sh"), {"model_type": "qwen3"} | NORMED),
    ],
    ids=["qwen3-235b", "deepseek3-671b", "qwen3-8b"],
)
def test_published_scripts_agree_with_their_model(script, config):
    check(script, config)


@pytest.mark.parametrize(
    ("model", "normed"), [("qwen2.5-7b", False), ("qwen3-8b", True), ("deepseek-v3", True)]
)
def test_query_and_key_norms_are_those_of_the_model_that_is_built(model, normed):
    """Whatever the name of its family, and whether or not its config.json says so."""
    parsed, config = parse(RLRunConfig, ["--qk-layernorm"], "train_rl"), published_config(model)
    assert parsed.checked_arch
    if normed:
        check_script(parsed, config)
    else:
        with pytest.raises(UsageError, match="--qk-layernorm"):
            check_script(parsed, config)


DEEPSEEK_VALUES = [
    (used.flag, used.values)
    for used in parse(
        RLRunConfig, script_flags("deepseek3/pretrain_deepseek3_671b_4k_A3_ptd.sh"), "x"
    ).checked_arch
    if used.values
]


@pytest.mark.parametrize(("flag", "values"), DEEPSEEK_VALUES, ids=lambda v: str(v))
def test_any_other_value_of_a_deepseek_script_contradicts(flag, values):
    wrong = "softmax" if values == ("sigmoid",) else "llama3" if values == ("yarn",) else "77"
    text = contradiction(f"{flag} {wrong}", DEEPSEEK_V3)
    assert f"{flag} {wrong} " in text


def test_dense_model_names_every_flag_of_an_moe_script():
    text = contradiction(script_flags("deepseek3/pretrain_deepseek3_671b_4k_A3_ptd.sh"), QWEN2)
    for named in ("--num-experts 256", "--kv-lora-rank 512", "--multi-latent-attention",
                  "--qk-layernorm", "--mtp-num-layers 1"):  # fmt: skip
        assert named in text
    assert "--qk-head-dim" not in text  # 128 is Megatron's default


@pytest.mark.parametrize("flag", sorted(COMPARED.keys() - {"--norm-topk-prob"}))
def test_every_flag_is_compared_on_a_dense_model(flag):
    row = COMPARED[flag]
    assert value_in(QWEN2, row.where) is None
    switch = foreign_flags()[flag].nargs == "0"
    text = contradiction(flag if switch else f"{flag} 99", QWEN2)
    assert flag in text and row.feature in text
    for value in row.unset:
        check(f"{flag} {value}", QWEN2)


def test_normalised_top_k_weights_mean_nothing_without_experts():
    """A published script of a dense model passes the flag."""
    check("--norm-topk-prob", QWEN2)
    check("--norm-topk-prob", QWEN3_MOE | {"norm_topk_prob": True})
    assert "normalised" in contradiction("--norm-topk-prob", QWEN3_MOE | {"norm_topk_prob": False})


def test_unused_values_of_mindspeed_scripts_are_no_contradiction():
    check("--moe-layer-freq -1 --first-k-dense-replace -1", QWEN2)
    check("--moe-layer-freq -1 --first-k-dense-replace -1", DEEPSEEK_V3)


@pytest.mark.parametrize(
    ("pattern", "config", "agrees"),
    [
        ("([0]*3+[1]*58)", DEEPSEEK_V3, True),
        ("[0,0,0]+[1]*58", DEEPSEEK_V3, True),
        ("[0]*2+[1]*59", DEEPSEEK_V3, False),
        ("[1]*94", QWEN3_MOE, True),
        ("[1]*93+[0]", QWEN3_MOE | {"mlp_only_layers": [93]}, True),
        ("[0,1]*47", QWEN3_MOE | {"decoder_sparse_step": 2}, True),
        ("[1,0]*47", QWEN3_MOE | {"decoder_sparse_step": 2}, False),
        ("[1]*2", QWEN2, False),
    ],
)
def test_layer_patterns(pattern, config, agrees):
    argv = ["--moe-layer-freq", pattern]
    if agrees:
        check(argv, config)
    else:
        assert f"--moe-layer-freq {pattern} " in contradiction(argv, config)


@pytest.mark.parametrize("pattern", ["[0]*", "[x]", "__import__('os')[0]", "[0]-[1]", "[0]**3"])
def test_layer_patterns_are_not_evaluated(pattern):
    with pytest.raises(ValueError, match="--moe-layer-freq"):
        check(["--moe-layer-freq", pattern], DEEPSEEK_V3)


def test_rope_of_both_spellings_of_the_config():
    check("--use-rope-scaling --rope-scaling-type llama3 --rope-scaling-factor 8", LLAMA3_ROPE)
    check("--low-freq-factor 1 --long-factor 1,1.5", LLAMA3_ROPE)
    assert "has [1.0, 1.5]" in contradiction("--long-factor 1,2", LLAMA3_ROPE)
    assert "has llama3" in contradiction("--rope-scaling-type yarn", LLAMA3_ROPE)
    default = {"model_type": "qwen2", "rope_parameters": {"rope_type": "default"}}
    check("--rope-type rope", default)
    assert "no rope scaling" in contradiction("--use-rope-scaling", default)


def test_shared_experts_of_qwen_and_deepseek():
    qwen = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 5632}
    check("--moe-shared-expert-intermediate-size 5632 --moe-shared-expert-gate", qwen)
    two = DEEPSEEK_V3 | {"n_shared_experts": 2}
    check("--n-shared-experts 2 --moe-shared-expert-intermediate-size 4096", two)
    assert "no gated shared expert" in contradiction("--shared-expert-gate", two)
