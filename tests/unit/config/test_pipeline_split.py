"""Stages that count the embedding or the loss as a layer: as megatron-core splits them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from mindspeed_rl.config.layouts import stage_layout
from mindspeed_rl.config.model import ModelConfig, ParallelConfig
from mindspeed_rl.core.errors import UsageError


def split(num_layers: int, pp: int, **flags: bool | int | str) -> tuple[int, ...]:
    parallel = ParallelConfig(pipeline_model_parallel_size=pp, **flags)  # type: ignore[arg-type]
    return stage_layout(ModelConfig(), parallel, num_layers).layers_per_chunk


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.booleans(), st.booleans())
@settings(deadline=None)
def test_layers_of_every_chunk_are_megatrons(
    pp: int, vpp: int, size: int, embedding: bool, loss: bool
) -> None:
    """Of the flags of a Megatron script: how many layers, and which."""
    num_layers = size * pp * vpp - embedding - loss
    assume(num_layers > 0 and (pp > 1 or vpp == 1) and (embedding or loss))
    parallel = ParallelConfig(
        pipeline_model_parallel_size=pp,
        num_virtual_stages_per_pipeline_rank=vpp,
        account_for_embedding_in_pipeline_split=embedding,
        account_for_loss_in_pipeline_split=loss,
    )
    stages = stage_layout(ModelConfig(), parallel, num_layers)
    theirs = TransformerConfig(
        num_layers=num_layers, hidden_size=8, num_attention_heads=1,
        pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        account_for_embedding_in_pipeline_split=embedding,
        account_for_loss_in_pipeline_split=loss,
    )  # fmt: skip
    for stage in range(pp):
        for chunk in range(vpp):
            vp_stage = chunk if vpp > 1 else None
            count = get_num_layers_to_build(theirs, vp_stage, stage)
            first = get_transformer_layer_offset(theirs, vp_stage, stage)
            layers = stages.layers_of(stage, chunk)
            assert len(layers) == count and (not count or layers.start == first)


def test_chunks_given_by_their_layers_count_the_embedding_too() -> None:
    """14 layers + 2 in chunks of 4 on two stages, as Megatron's arguments count them."""
    both = {
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    }
    assert split(14, 2, num_layers_per_virtual_pipeline_stage=4, **both) == (3, 4, 4, 3)
    assert split(6, 4, **both) == (1, 2, 2, 1)
    assert split(7, 1, **both) == (7,)


@pytest.mark.parametrize(
    "flags", [{}, {"num_layer_list": "5,3"}, {"decoder_last_pipeline_num_layers": 3}]
)
def test_splits_that_cannot_be_are_refused(flags: dict[str, int | str]) -> None:
    with pytest.raises(UsageError, match="--account-for"):
        split(8, 2, account_for_loss_in_pipeline_split=True, **flags)
