"""Reading Hugging Face configs, and weight tables that cover every tensor exactly once."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from support.layout_cases import GQA, layouts_of, spec_of, with_attention
from support.published import published_config

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import EngineLayout, ParallelLayout
from mindspeed_rl.core.stages import even_stages
from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.models.attention_rules import GroupedQKV
from mindspeed_rl.models.layers import GroupedQueryAttention
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.models.rules import Share
from mindspeed_rl.models.spec import eos_ids_of, read_hf_config
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

QWEN2 = published_config("qwen2.5-7b")


def test_optional_keys_of_a_config() -> None:
    spec = spec_from_hf_config(QWEN2 | {"head_dim": 64, "num_key_value_heads": None})
    assert spec.attention == GroupedQueryAttention(28, 28, 64, qkv_bias=True)
    assert spec.dims(("hidden_size", "q_size")) == (3584, 28 * 64)


@pytest.mark.parametrize(("eos", "ids"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))])
def test_end_tokens(eos: object, ids: tuple[int, ...]) -> None:
    assert eos_ids_of({"eos_token_id": eos}) == ids


def test_null_means_as_much_as_no_key() -> None:
    config = published_config("qwen3-8b")
    absent = {k: v for k, v in config.items() if k != "head_dim"}
    assert spec_from_hf_config(config | {"head_dim": None}) == spec_from_hf_config(absent)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_unreadable_configs(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=f"--hf-checkpoint {tmp_path}"):
        read_hf_config(tmp_path)


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


def test_layouts_travel_without_what_they_remember() -> None:
    for layout in layouts_of(GQA):
        assert layout.held_names(0), "fills the caches"
        copy = pickle.loads(pickle.dumps(layout))
        assert copy == layout and copy.held_names(0) == layout.held_names(0)
        assert copy.local_shapes(0) == layout.local_shapes(0)
