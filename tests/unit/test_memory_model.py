"""The byte model against hand-computed numbers of small layouts ."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.published import published_config

from mindspeed_rl.memory.communicators import GroupUse, device_groups
from mindspeed_rl.memory.engine import EngineMemory
from mindspeed_rl.memory.head import HeadSizes, head_step
from mindspeed_rl.memory.layers import Kernels, LayerSizes, layer_tape
from mindspeed_rl.memory.model_state import model_state
from mindspeed_rl.memory.tape import (
    Step,
    backward_peak,
    forward_peak,
    inference_peak,
    kept_bytes,
    recomputed,
)
from mindspeed_rl.memory.training import chunks_in_flight
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.parallel.layout import EngineLayout, ParallelLayout
from mindspeed_rl.parallel.stages import even_stages
from mindspeed_rl.resharding.layouts.megatron import MegatronLayout
from mindspeed_rl.resharding.layouts.vllm import VllmLayout

TAPE = [Step("a", 10, 1, 2), Step("b", 20, 50, 0), Step("c", 5, 0, 40)]


def spec_of(model: str, **changes: Any) -> Any:
    return spec_from_hf_config(published_config(model) | changes)


def test_peaks_of_a_tape() -> None:
    assert kept_bytes(TAPE) == 35
    assert forward_peak(TAPE) == 10 + 20 + 50
    assert backward_peak(TAPE) == 35 + 40
    assert inference_peak(TAPE) == 20 + 50


def test_recomputation_keeps_the_input_and_pays_in_the_backward_pass() -> None:
    step = recomputed("layer", TAPE, input_bytes=4, gradient_bytes=7, left_bytes=3)
    assert (step.kept, step.forward, step.left) == (4, 70, 3)
    assert step.backward == 80 + 7
    assert backward_peak([step] * 4) == 16 + 87, "the last of four finds all inputs kept"
    leaky = [replace(step, left=9)] * 4
    assert backward_peak(leaky) == 4 + 3 * 9 + 87, "the first finds what the others left"


def test_micro_batches_in_flight() -> None:
    """One forward, one backward: the first of four stages waits for four, the last for none."""
    assert [len(chunks_in_flight(s, 4, 1, 16)) for s in range(4)] == [4, 3, 2, 1]
    assert [len(chunks_in_flight(s, 4, 1, 2)) for s in range(4)] == [2, 2, 2, 1]
    # interleaved: (pp - stage - 1) x 2 + (vpp - 1) x pp + 1, in groups of pp micro-batches
    assert chunks_in_flight(0, 2, 2, 4) == [0, 0, 1, 1, 0]
    assert chunks_in_flight(1, 2, 2, 4) == [0, 0, 1]
    assert chunks_in_flight(0, 2, 2, 2) == [0, 0, 1, 1], "no more than there are"


def tiny(world: int = 1, tp: int = 1, pp: int = 1, **changes: Any) -> MegatronLayout:
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 10,
    }
    spec = spec_of("qwen2.5-7b", **(sizes | changes))
    parallel = ParallelLayout.build(world=world, stages=even_stages(2, pp), tp=tp)
    return MegatronLayout(spec, parallel, vocab_divisor=4)


# by hand: two norms, q/k/v with bias, output projection, gate and up, down; final norm; 12 rows of
# vocabulary (10 padded to a multiple of 4), embedding and head
_LAYER = (8, 8, 24 * 8, 24, 8 * 8, 24 * 8, 8 * 12)
_ALL = (*_LAYER, *_LAYER, 8, 12 * 8, 12 * 8)


@pytest.mark.parametrize("bf16", [False, True])
def test_state_of_one_rank_by_hand(bf16: bool) -> None:
    state = model_state(tiny(), 0, bf16=bf16, distributed_optimizer=False)
    item = 2 if bf16 else 4
    assert state.parameters == state.plain_parameters == sum(_ALL) * item
    assert state.grad_buffers == sum(_ALL) * 4
    assert state.moments == sum(_ALL) * 8
    assert state.optimizer_at_start == (sum(_ALL) * 4 if bf16 else 0)


@pytest.mark.parametrize("dp", [1, 3, 7])
def test_buffers_of_the_distributed_optimizer_by_hand(dp: int) -> None:
    """Every parameter starts at a multiple of 64, the buffer ends at one of lcm(dp, 128)."""
    # in reverse order of registration each but the last (the embedding) fills whole 64s
    starts = sum(-(-size // 64) * 64 for size in (*_LAYER, *_LAYER, 8, 96))
    multiple = 128 * dp  # dp is odd
    padded = -(-(starts + 96) // multiple) * multiple
    state = model_state(tiny(world=dp), 0, bf16=True, distributed_optimizer=True)
    assert state.parameters == padded * 2
    assert state.grad_buffers == padded * 4


@given(world=st.sampled_from([1, 2, 3, 4, 6, 8]), bf16=st.booleans())
def test_shares_of_the_optimizer_add_up(world: int, bf16: bool) -> None:
    states = [
        model_state(tiny(world=world), rank, bf16=bf16, distributed_optimizer=True)
        for rank in range(world)
    ]
    assert sum(s.moments for s in states) == sum(_ALL) * 8
    assert len({s.parameters for s in states}) == 1
    assert all(s.moments <= states[0].grad_buffers // world * 2 for s in states)


def test_experts_are_sharded_over_their_own_data_parallelism() -> None:
    """EP 4 of 8 ranks leaves two copies of an expert and eight of everything else."""
    spec = spec_of("qwen3-30b-a3b", num_hidden_layers=1, num_experts=8, vocab_size=1024)
    parallel = ParallelLayout.build(world=8, stages=even_stages(1), ep=4)
    layout = MegatronLayout(spec, parallel)
    shapes = layout.local_shapes(0)
    experts = sum(prod(s) for n, s in shapes.items() if ".experts." in n)
    dense = sum(prod(s) for n, s in shapes.items()) - experts
    states = [model_state(layout, rank, bf16=True, distributed_optimizer=True) for rank in range(8)]
    assert sum(s.moments for s in states) == 8 * (dense + 4 * experts)
    assert states[0].moments == pytest.approx(8 * (dense / 8 + experts / 2), rel=0.02)


def test_a_tied_embedding_of_two_stages_has_a_bucket_of_its_own() -> None:
    tied = tiny(world=2, pp=2, tie_word_embeddings=True, vocab_size=8)
    first, last = (
        model_state(tied, rank, bf16=False, distributed_optimizer=True) for rank in (0, 1)
    )
    # per stage: one layer in its bucket (the last stage with its norm), 64 of vocabulary alone,
    # which would fill the rest of the last stage's bucket
    layer = sum(-(-size // 64) * 64 for size in _LAYER)
    ends = {"first": layer - 64 + 8, "last": layer + 64}
    assert first.parameters == (-(-ends["first"] // 128) * 128 + 128) * 4
    assert last.parameters == (-(-ends["last"] // 128) * 128 + 128) * 4


def sizes(**changes: Any) -> LayerSizes:
    spec = tiny().spec
    base = LayerSizes(spec, Kernels.EAGER, 32, 16, 1, 1, 1, False, 4, 1.0, ())
    return replace(base, **changes)


def test_a_dense_layer_keeps_what_its_operators_keep() -> None:
    """fp32, eager, 32 tokens of hidden 8, 2 heads of 4 channels, MLP of 12: by hand."""
    tokens, hidden, head, mlp = 32, 8, 4, 12
    norm = tokens * (hidden + 1 + hidden + hidden)  # input, 1 / rms, product, output
    rotation = 4 * tokens * head
    attention = tokens * (3 * hidden + hidden + 2 + hidden)  # q, k, v, out, log-sum-exp, reordered
    gated = tokens * (2 * mlp + mlp + mlp + mlp)  # both halves, shifted, activated, product
    expected = 4 * (2 * norm + rotation + attention + gated)
    assert kept_bytes(layer_tape(sizes(), 0)) == expected


def test_fused_kernels_keep_less_and_bf16_half_of_it() -> None:
    eager, fused = sizes(), sizes(kernels=Kernels.FUSED)
    assert kept_bytes(layer_tape(fused, 0)) < kept_bytes(layer_tape(eager, 0))
    halved = kept_bytes(layer_tape(replace(fused, item=2), 0))
    stats = 4 * 32 * (2 + 2)  # of two norms and two heads, which stay in fp32
    assert 2 * (halved - stats) == kept_bytes(layer_tape(fused, 0)) - stats


def test_activations_grow_with_tokens_and_experts_with_imbalance() -> None:
    spec = spec_of("qwen3-30b-a3b")
    one = LayerSizes(spec, Kernels.FUSED, 4096, 4096, 1, 1, 8, False, 2, 1.0, ())
    two = replace(one, tokens=8192)
    assert kept_bytes(layer_tape(two, 0)) == 2 * kept_bytes(layer_tape(one, 0))
    busy = replace(one, imbalance=3.0)
    experts = {s.name: s.kept for s in layer_tape(one, 0)}
    growth = kept_bytes(layer_tape(busy, 0)) - kept_bytes(layer_tape(one, 0))
    assert growth == 2 * (experts["dispatch"] + experts["experts"])
    assert experts["dispatch"] == 4096 * 8 * spec.hidden_size * 2


def test_sequence_parallelism_shards_the_residual_stream() -> None:
    plain = sizes(tp=2)
    sharded = replace(plain, shards_sequence=True)
    saved = kept_bytes(layer_tape(plain, 0)) - kept_bytes(layer_tape(sharded, 0))
    norm = 4 * 16 * (8 + 1 + 8 + 8)
    assert saved == 2 * norm


def test_logits_exist_one_chunk_at_a_time() -> None:
    """Three matrices of a chunk forward, whatever the number of tokens."""
    base = HeadSizes(4096, 64, 1000, 128, 2, entropy_gradient=False, hidden_states=0)
    short = head_step(base)
    assert short.forward == 3 * 128 * 1000 * 4 + 128 * 1000 * 2
    assert head_step(replace(base, trained=8192)).forward == short.forward
    assert head_step(replace(base, entropy_gradient=True)).backward > short.backward
    weights = 1000 * 64
    assert short.backward >= weights * (4 + 2) + 4096 * 64 * 2


def engine(model: str, layout: EngineLayout, **options: object) -> EngineMemory:
    return EngineMemory(VllmLayout(spec_of(model), layout), 2, options, 1 << 30)


def test_engine_weights_and_cache_of_a_published_model() -> None:
    """Qwen2.5-7B over two ranks: half of every matrix, whole norms; 4 key/value heads of 128."""
    spec = spec_of("qwen2.5-7b")
    found = engine("qwen2.5-7b", EngineLayout(2, 2), block_size=32)
    hidden, layers = spec.hidden_size, spec.num_layers
    q, kv = spec.q_size, spec.kv_size
    matrices = q * hidden * 2 + 2 * kv * hidden + 3 * hidden * spec.ffn_hidden_size
    layer = matrices // 2 + (q + 2 * kv) // 2 + 2 * hidden
    assert found.weights(0) == 2 * (layers * layer + hidden + spec.vocab_size * hidden)
    token = layers * 2 * 2 * 128 * 2
    assert found.token_bytes() == token
    assert found.kv_cache() == (1 << 30) // (32 * token) * 32 * token


def test_the_engine_works_on_what_the_busiest_rank_gets() -> None:
    """64 groups of 1024 tokens, 8 experts each, over 128 ranks: 4096 copies, by the imbalance."""
    layout = EngineLayout(128, 2, 64, expert_parallel=True)
    even = engine("deepseek-v3", layout, max_num_batched_tokens=1024, max_num_seqs=64)
    assert even.routed_tokens() == 4096
    busy = replace(even, imbalance=8.0)
    grown = busy.workspace() - even.workspace()
    assert grown == 7 * 4096 * (2 * 7168 + 3 * 2048) * 2
    many = replace(busy, options={"max_num_batched_tokens": 8192, "max_num_seqs": 64})
    assert many.workspace() == pytest.approx(8 * busy.workspace(), rel=0.01)
    cut = engine("deepseek-v3", EngineLayout(8, 8), max_num_batched_tokens=1024)
    assert cut.routed_tokens() == 8192, "without expert parallelism every rank computes all"


def test_groups_of_a_step_have_a_communicator_each() -> None:
    """Eight ranks, tp 2 x pp 2 x dp 2; engines of two neighbours beside the tp groups."""
    parallel = ParallelLayout.build(world=8, stages=even_stages(2, 2), tp=2)
    everyone = tuple(range(8))
    found = device_groups(5, parallel, EngineLayout(8, 2), GroupUse(tied=True))
    assert found == {
        "world": everyone, "tp": (4, 5), "dp_cp": (5, 7), "pp": (1, 5), "mp": (0, 1, 4, 5),
        "embd": (1, 5), "rollout tp": (4, 5),
    }  # fmt: skip
    sharded = device_groups(5, parallel, None, GroupUse(sharded_optimizer=True))
    assert sharded.keys() == {"world", "tp", "dp_cp", "pp", "intra_dist_opt_instance"}
    assert sharded["intra_dist_opt_instance"] == everyone
    alone = ParallelLayout.build(world=1, stages=even_stages(2))
    assert device_groups(0, alone, None, GroupUse(experts=True, tied=True)) == {}


def test_groups_of_experts() -> None:
    """tp 2 x dp 4 with ep 4 x etp 1 x expert-dp 2; one engine of dp 2 x tp 2 of two."""
    parallel = ParallelLayout.build(world=8, stages=even_stages(2), tp=2, ep=4, etp=1)
    engine = EngineLayout(8, 2, 2, expert_parallel=True)
    use = GroupUse(experts=True, router_bias=True, engine_mc2=True)
    found = device_groups(6, parallel, engine, use)
    assert found["tp_dp_cp"] == tuple(range(8))
    assert found["ep"] == found["tp_ep_mp"] == found["tp_ep_pp"] == (4, 5, 6, 7)
    assert found["ep_dp"] == (2, 6) and "ep_tp" not in found
    assert found["rollout tp"] == (6, 7) and found["rollout dp"] == (4, 6)
    assert found["rollout ep"] == found["rollout mc2"] == (4, 5, 6, 7)
    assert "rollout mc2" not in device_groups(6, parallel, engine, GroupUse(experts=True))
