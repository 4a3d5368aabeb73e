"""Reading Hugging Face configs, and weight tables that cover every tensor exactly once."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from support.layout_cases import GQA, layouts_of, spec_of, with_attention
from support.published import published_config

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import EngineLayout, ParallelLayout
from mindspeed_rl.core.stages import even_stages
from mindspeed_rl.models.attention_rules import GroupedQKV, StackedQKV
from mindspeed_rl.models.layers import DenseMLP, GroupedQueryAttention, LayerSpec
from mindspeed_rl.models.registry import spec_from_hf_config, weight_table
from mindspeed_rl.models.rope import RopeSpec
from mindspeed_rl.models.rules import Share
from mindspeed_rl.models.spec import ModelSpec, eos_ids_of, read_hf_config
from mindspeed_rl.rollout.vllm.layout import VllmLayout
from mindspeed_rl.weights.layouts.megatron import MegatronLayout

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 24, "hidden_size": 896,
    "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
    "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "max_position_embeddings": 32768, "tie_word_embeddings": True, "use_sliding_window": False,
    "hidden_act": "silu", "eos_token_id": 151645,
}  # fmt: skip
MODERN = {k: v for k, v in CONFIG.items() if k != "rope_theta"} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}
}


@pytest.mark.parametrize("config", [CONFIG, MODERN])
def test_a_config_becomes_a_spec(config: dict[str, Any]) -> None:
    """Qwen2.5-0.5B in the spelling of transformers 4 and of transformers 5."""
    attention = GroupedQueryAttention(14, 2, 64, qkv_bias=True)
    assert spec_from_hf_config(config) == ModelSpec(
        family="qwen2",
        layers=(LayerSpec(attention, DenseMLP(4864)),) * 24,
        hidden_size=896,
        intermediate_size=4864,
        vocab_size=151936,
        norm_eps=1e-6,
        rope=RopeSpec(1e6),
        max_position_embeddings=32768,
        tie_embeddings=True,
        eos_token_ids=(151645,),
    )


def test_optional_keys_of_a_config() -> None:
    spec = spec_from_hf_config(CONFIG | {"head_dim": 128, "num_key_value_heads": None})
    assert spec.attention == GroupedQueryAttention(14, 14, 128, qkv_bias=True)
    assert spec.dims(("hidden_size", "q_size")) == (896, 14 * 128)


@pytest.mark.parametrize(("eos", "ids"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))])
def test_end_tokens(eos: object, ids: tuple[int, ...]) -> None:
    assert eos_ids_of({"eos_token_id": eos}) == ids


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel.*known: .*Qwen2ForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"type": "su", "factor": 4.0}}, "'su'"),
        ({"rope_scaling": {"type": "llama3"}}, "'factor'"),
        ({"rope_theta": None}, "rope_theta"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"head_dim": 33}, "33 rotated"),
        ({"intermediate_size": None}, "'intermediate_size'"),
        # values of wrong types
        ({"hidden_size": "4096"}, "hidden_size '4096'"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers 2.5"),
        ({"num_attention_heads": True}, "num_attention_heads True"),
        ({"vocab_size": -1}, "vocab_size -1"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps '1e-6'"),
        ({"rope_theta": float("nan")}, "rope_theta nan"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings 1"),
        ({"hidden_act": 3}, "hidden_act 3"),
        ({"rope_scaling": []}, r"rope_scaling \[\]"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, r"factor '4'"),
    ],
    ids=str,
)
def test_models_that_are_not_computed_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        spec_from_hf_config(CONFIG | change)


def test_null_means_as_much_as_no_key() -> None:
    config = published_config("qwen3-8b")
    absent = {k: v for k, v in config.items() if k not in ("head_dim", "rms_norm_eps")}
    nulls = {"head_dim": None, "rms_norm_eps": None}
    assert spec_from_hf_config(config | nulls) == spec_from_hf_config(absent)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_unreadable_configs(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=f"--hf-checkpoint {tmp_path}"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize("model", ["tiny_model", "tied_model"])
def test_tables_name_the_tensors_of_a_checkpoint(
    model: str, request: pytest.FixtureRequest
) -> None:
    """Every tensor of the file, with its shape, on both sides; nothing else."""
    folder: Path = request.getfixturevalue(model)
    spec = spec_from_hf_config(read_hf_config(folder))
    with safe_open(folder / "model.safetensors", "pt") as file:
        real = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    trainer = MegatronLayout(
        spec, ParallelLayout.build(world=4, stages=even_stages(spec.num_layers, 2), tp=2), 128
    )
    assert dict(trainer.hf_shapes) == real
    assert dict(VllmLayout(spec, EngineLayout(4, 4)).hf_shapes) == real


def test_every_row_has_a_name_of_its_own() -> None:
    spec = spec_of(GQA)
    table = weight_table(spec.family)
    for rows in (table.trainer_rows(spec), table.engine_rows(spec, "vllm")):
        assert len({row.param for row in rows}) == len(rows)
    with pytest.raises(LookupError, match="no weight table for"):
        weight_table("mamba")


def test_ranks_share_a_key_value_head() -> None:
    """Four query heads, a key and a value of two channels: runs of 12 / 4 rows, by hand."""
    spec = with_attention(spec_of(GQA), GroupedQueryAttention(4, 1, 2))
    row = GroupedQKV("qkv", hf="{p}", bias=True)
    held = [
        [(c.hf_name, c.hf_box.lo[0], c.param_box.lo[0], c.hf_box.size[0]) for c in cuts]
        for cuts in (row.cuts(spec, Share(tp, 4)) for tp in range(4))
    ]
    assert held == [
        [("q", 0, 0, 3)],
        [("q", 3, 0, 3)],
        [("q", 6, 0, 2), ("k", 0, 2, 1)],
        [("k", 1, 0, 1), ("v", 0, 1, 2)],
    ]


def test_heads_that_cannot_be_shared() -> None:
    spec = spec_of(GQA)
    layout = ParallelLayout.build(world=3, stages=even_stages(4), tp=3)
    with pytest.raises(UsageError, match="--tensor-model-parallel-size 3"):
        MegatronLayout(spec, layout, 8)
    for tp in (5, 24):
        with pytest.raises(UsageError, match=f"--rollout-tp {tp}"):
            VllmLayout(spec, EngineLayout(tp, tp))


def test_engines_replicate_key_value_heads() -> None:
    """2 heads on 4 ranks: ranks 0 and 1 hold the first, and the query heads are still split."""
    spec = spec_of(GQA)
    row = StackedQKV("qkv", hf="{p}", bias=True)
    cuts = [{c.hf_name: c.hf_box for c in row.cuts(spec, Share(rank, 4))} for rank in range(4)]
    assert [c["k"].lo for c in cuts] == [(0,), (0,), (2,), (2,)]
    assert [c["q"].lo for c in cuts] == [(0,), (6,), (12,), (18,)]


def test_training_interleaves_heads_by_group() -> None:
    """Per key/value head: its queries, its key, its value; never thirds of the rows."""
    cuts = list(GroupedQKV("qkv", hf="{p}", bias=True).cuts(spec_of(GQA), Share()))
    rows = [(c.hf_name, c.hf_box.lo[0], c.param_box.lo[0], c.param_box.size[0]) for c in cuts]
    assert rows == [
        ("q", 0, 0, 12), ("k", 0, 12, 2), ("v", 0, 14, 2),
        ("q", 12, 16, 12), ("k", 2, 28, 2), ("v", 2, 30, 2),
    ]  # fmt: skip


def test_no_cut_reaches_into_the_padding() -> None:
    """67 tokens: the trainer pads to 80 on 2 ranks, the engine to 128 on 4."""
    rows = {}
    for layout in layouts_of(GQA):
        shards = layout.shards("lm_head.weight")
        rows[type(layout)] = [(s.piece.hf_box.lo[0], s.piece.hf_box.size[0]) for s in shards]
    assert rows == {MegatronLayout: [(0, 40), (40, 27)], VllmLayout: [(0, 32), (32, 32), (64, 3)]}


def test_layouts_travel_without_what_they_remember() -> None:
    for layout in layouts_of(GQA):
        assert layout.held_names(0), "fills the caches"
        copy = pickle.loads(pickle.dumps(layout))
        assert copy == layout and copy.held_names(0) == layout.held_names(0)
        assert copy.local_shapes(0) == layout.local_shapes(0)
