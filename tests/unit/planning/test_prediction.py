"""The byte model against hand-computed numbers of small layouts."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
from support.published import PUBLISHED, published_config

from mindspeed_rl.building.models import batch_rules
from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig, TrainConfig
from mindspeed_rl.core.context_parallelism import ContextParallelism
from mindspeed_rl.core.layout import EngineLayout, ParallelLayout
from mindspeed_rl.core.stages import even_stages
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.planning.activations import TrainingMemory, Workload, chunks_in_flight
from mindspeed_rl.planning.engine_memory import EngineMemory
from mindspeed_rl.planning.model_state import model_state, save_host_bytes
from mindspeed_rl.planning.prediction import MemoryPrediction
from mindspeed_rl.planning.suggestions import plan_of
from mindspeed_rl.weight_layouts.megatron import MegatronLayout


def spec_of(model: str, **changes: Any) -> Any:
    return spec_from_hf_config(published_config(model) | changes)


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ("--tensor-model-parallel-size 4", 3 * 1511),
        ("--tensor-model-parallel-size 4 --sequence-parallel", 3 * 1511 + 3),
        ("--tensor-model-parallel-size 2 --context-parallel-size 2", 3 * 1512),
    ],
)
def test_rows_are_padded_as_in_the_run(flags: str, tokens: int) -> None:
    """Ranks that shard the sequence need equal parts; context parallelism cuts every sequence."""
    words = f"""
        --hf-checkpoint {PUBLISHED["qwen2.5-7b"]} --train-iters 1 --micro-batch-size 3 {flags}
        --max-prompt-length 510 --rollout-max-response-length 1001
        --grpo-prompts-per-step 6 --grpo-group-size 4 --rollout-tp 4 --rollout-kv-cache-gb 1
    """
    config = parse(RLRunConfig, words.split(), "test").config
    plan = plan_of(config, 4)
    job: Any = SimpleNamespace(config=config, plan=plan, world=SimpleNamespace(rank=0))
    rows = {row for rank in batch_rules(job).plan([1511] * 24).row_lengths for row in rank}
    assert rows == {tokens}
    assert MemoryPrediction(config, plan).workload.tokens == tokens


def test_micro_batches_in_flight() -> None:
    """One forward, one backward: the first of four stages waits for four, the last for none."""
    assert [len(chunks_in_flight(s, 4, 1, 16)) for s in range(4)] == [4, 3, 2, 1]
    assert [len(chunks_in_flight(s, 4, 1, 2)) for s in range(4)] == [2, 2, 2, 1]
    # interleaved: (pp - stage - 1) x 2 + (vpp - 1) x pp + 1, in groups of pp micro-batches
    assert chunks_in_flight(0, 2, 2, 4) == [0, 0, 1, 1, 0]
    assert chunks_in_flight(1, 2, 2, 4) == [0, 0, 1]
    assert chunks_in_flight(0, 2, 2, 2) == [0, 0, 1, 1], "no more than there are"


def tiny(world: int = 1, tp: int = 1, pp: int = 1, cp: int = 1, **changes: Any) -> MegatronLayout:
    sizes = {
        "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 10,
    }  # fmt: skip
    spec = spec_of("qwen2.5-7b", **(sizes | changes))
    parallel = ParallelLayout.build(world=world, stages=even_stages(2, pp), tp=tp, cp=cp)
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
    assert state.optimizer_at_start == (sum(_ALL) * 4 if bf16 else 0)
    assert state.optimizer == state.optimizer_at_start + sum(_ALL) * 8


@pytest.mark.parametrize("dp", [1, 3, 7])
def test_buffers_of_the_distributed_optimizer_by_hand(dp: int) -> None:
    """Every parameter starts at a multiple of 64, the buffer ends at one of lcm(dp, 128)."""
    aligned = sum(-(-size // 64) * 64 for size in _ALL)
    multiple = 128 * dp  # dp is odd
    padded = -(-aligned // multiple) * multiple
    state = model_state(tiny(world=dp), 0, bf16=True, distributed_optimizer=True)
    assert state.parameters == padded * 2
    assert state.grad_buffers == padded * 4
    assert state.optimizer == sum(_ALL) // dp * 12


@pytest.mark.parametrize(("bf16", "item"), [(True, 2), (False, 4)])
def test_what_a_save_takes_of_the_host_by_hand(bf16: bool, item: int) -> None:
    """In the background the share of weights and states; else two tensors at a time."""

    def taken(dp: int, **flags: bool) -> int:
        settings = {"with_optimizer": True, "in_background": False, "on_host": False} | flags
        return save_host_bytes(tiny(world=dp), 0, bf16=bf16, **settings)

    share = sum(_ALL) / 4
    assert taken(4, in_background=True) == pytest.approx(share * (item + 12), abs=16)
    assert taken(4, in_background=True, with_optimizer=False) == pytest.approx(share * item, abs=4)
    assert taken(1, in_background=True) == sum(_ALL) * (item + 12)
    assert taken(1) == 2 * max(_ALL) * 4
    assert taken(1, on_host=True) == 2 * max(_ALL) * 4 + sum(_ALL) * item


def workload(*flags: str) -> Workload:
    words = f"""
        --hf-checkpoint {PUBLISHED["qwen2.5-7b"]} --train-iters 1 --max-prompt-length 300
        --rollout-max-response-length 700 --grpo-prompts-per-step 8 --grpo-group-size 4
        --rollout-kv-cache-gb 1
    """
    config = parse(RLRunConfig, [*words.split(), *flags], "test").config
    return MemoryPrediction(config, plan_of(config, 1)).workload


def test_a_packed_row_may_be_responses_to_short_prompts() -> None:
    """The head sees as many tokens as the row has; rows of whole samples have their responses."""
    assert (workload().tokens, workload().trained) == (1000, 1000)
    two = workload("--micro-batch-size", "2")
    assert (two.tokens, two.trained, two.num_micro_batches) == (2000, 2000, 16)
    by_number = workload("--micro-batch-size", "2", "--max-tokens-per-micro-batch", "0")
    assert (by_number.tokens, by_number.trained) == (2000, 2 * 700)


def test_a_row_is_filled_although_no_further_longest_sample_fits() -> None:
    row = workload("--max-tokens-per-micro-batch", "1900")
    assert (row.tokens, row.trained, row.num_micro_batches) == (1900, 1900, 32)


def test_experts_are_sharded_over_their_own_data_parallelism() -> None:
    """EP 4 of 8 ranks leaves two copies of an expert and eight of everything else."""
    spec = spec_of("qwen3-30b-a3b", num_hidden_layers=1, num_experts=8, vocab_size=1024)
    parallel = ParallelLayout.build(world=8, stages=even_stages(1), ep=4)
    layout = MegatronLayout(spec, parallel)
    shapes = layout.local_shapes(0)
    experts = sum(prod(s) for n, s in shapes.items() if ".experts." in n)
    dense = sum(prod(s) for n, s in shapes.items()) - experts
    states = [model_state(layout, rank, bf16=True, distributed_optimizer=True) for rank in range(8)]
    assert sum(s.optimizer for s in states) == pytest.approx(12 * (dense + 4 * experts), rel=1e-4)
    assert states[0].optimizer == pytest.approx(12 * (dense / 8 + experts / 2), rel=0.02)


WORK = Workload(tokens=32, trained=16, num_micro_batches=4)


def training(layout: MegatronLayout, sharded: bool = False, **flags: Any) -> TrainingMemory:
    return TrainingMemory(layout, TrainConfig(bf16=True, **flags), sharded)


def test_a_dense_layer_keeps_what_its_operators_keep() -> None:
    """bf16, 32 tokens of hidden 8, 2 heads of 4 channels, MLP of 12: by hand."""
    parts = training(tiny()).layer_parts(0, WORK)
    assert parts == {
        "stream": 4 * 32 * 8 * 2,  # inputs of two norms and of the projections behind them
        "attention": 32 * (3 * 8 + 8) * 2,  # queries, keys, values, output
        "core_attn": 32 * 2 * 4,  # row statistics in fp32
        "mlp": 32 * 3 * 12 * 2,  # gate, up, activated
    }
    halved = training(tiny(world=2, tp=2)).layer_parts(0, WORK)
    assert halved == {n: size if n == "stream" else size // 2 for n, size in parts.items()}
    sharded = training(tiny(world=2, tp=2), sharded=True).layer_parts(0, WORK)
    assert sharded == {n: size // 2 for n, size in parts.items()}


def test_kinds_of_context_parallelism_keep_and_need_their_own() -> None:
    """bf16, 16 tokens on each of two ranks, 2 heads of 4 channels in 2 layers: by hand."""
    alone = training(tiny(world=2)).peak(0, replace(WORK, tokens=16, trained=8)).activations
    queries, keys = 16 * 2 * 4, 16 * 2 * 2 * 4  # elements; keys with values
    more = {
        # the other rank's keys in each layer; all keys in order, their gradients in two orders
        ContextParallelism("all_gather"): 2 * keys * 2 + 3 * (2 * keys) * 2,
        # two buffers of keys, two of gradients in fp32; gradients of queries in fp32; of a block
        # gradients of keys in two orders, and queries, output and gradient in order
        ContextParallelism("p2p", ring=2): 2 * keys * 2
        + 2 * keys * 4
        + queries * 4
        + (2 * keys + 3 * queries) * 2,
        ContextParallelism("a2a", ulysses=2): (queries + keys) * 2,  # a copy to send
    }
    for kind, expected in more.items():
        memory = replace(training(tiny(world=2, cp=2)), context=kind)
        assert memory.peak(0, WORK).activations - alone == expected, kind
    repeated = replace(
        training(tiny(world=2, cp=2, num_key_value_heads=1)),
        context=ContextParallelism("a2a", ulysses=2),
    )
    one = training(tiny(num_key_value_heads=1)).layer_parts(0, replace(WORK, tokens=16))
    found = repeated.layer_parts(0, WORK)
    assert found == {**one, "core_attn": one["core_attn"] + keys // 2 * 2}, "one head for two ranks"


def test_recomputation_keeps_less() -> None:
    """Full: the input of every unit; block: all of the layers behind; selective: without a part."""
    layers, residual = range(2), 32 * 8 * 2
    one = sum(training(tiny()).layer_parts(0, WORK).values())
    assert training(tiny()).kept_by(layers, WORK) == 2 * one
    for method, count, expected in (
        ("uniform", 1, 2 * residual),
        ("uniform", 2, residual),
        ("block", 1, residual + one),
    ):
        full = {"recompute_granularity": "full", "recompute_method": method}
        memory = training(tiny(), **full, recompute_num_layers=count)
        assert memory.kept_by(layers, WORK) == expected
    selective = training(
        tiny(), recompute_granularity="selective", recompute_modules=("mlp", "core_attn")
    )
    assert selective.kept_by(layers, WORK) == 2 * (4 + 4) * residual


def test_peaks_of_a_pipeline() -> None:
    """The first stage waits for as many micro-batches as there are stages; the last has logits."""
    memory = training(tiny(world=2, pp=2))
    kept = memory.kept_by(range(1), WORK)
    first, last = memory.peak(0, WORK), memory.peak(1, WORK)
    assert first.activations - last.activations == kept and first.logits == 0 < last.logits
    longer = replace(WORK, num_updates=3)
    waiting = (13 * 32 + 28 * 16) * 4
    assert memory.peak(0, longer).activations - first.activations == 2 * waiting
    assert memory.peak(1, replace(WORK, entropy_gradient=True)).logits > last.logits
    assert memory.inference(0, WORK) == kept


def test_experts_keep_the_tokens_that_they_take() -> None:
    spec = spec_of("qwen3-30b-a3b")
    parallel = ParallelLayout.build(world=8, stages=even_stages(spec.num_layers), ep=8)
    even = training(MegatronLayout(spec, parallel))
    busy, work = replace(even, imbalance=3.0), replace(WORK, tokens=4096)
    grown = busy.layer_parts(0, work)["moe"] - even.layer_parts(0, work)["moe"]
    assert grown == 2 * 4096 * 8 * (spec.hidden_size + 3 * spec.moe.expert_ffn_size) * 2


def engine(model: str, layout: EngineLayout, **options: object) -> EngineMemory:
    spec = spec_of(model)
    sizes = engine_provider().sizes(options, spec, "cpu")
    return EngineMemory(VllmLayout(spec, layout), 2, sizes, 1 << 30)


def test_engine_weights_and_cache_of_a_published_model() -> None:
    """Qwen2.5-7B over two ranks: half of every matrix, whole norms; 4 key/value heads of 128."""
    spec = spec_of("qwen2.5-7b")
    found = engine("qwen2.5-7b", EngineLayout(2, 2), block_size=32)
    hidden, layers = spec.hidden_size, spec.num_layers
    q, kv = spec.attention.q_size, spec.attention.kv_size
    matrices = q * hidden * 2 + 2 * kv * hidden + 3 * hidden * spec.ffn_hidden_size
    layer = matrices // 2 + (q + 2 * kv) // 2 + 2 * hidden
    assert found.weights(0) == 2 * (layers * layer + hidden + spec.vocab_size * hidden)
    token = layers * 2 * 2 * 128 * 2
    assert found.token_bytes() == token
    assert found.kv_cache() == (1 << 30) // (32 * token) * 32 * token


def test_drafted_tokens_have_logits_too() -> None:
    """Where most of a step is the vocabulary; three matrices of fp32 in the engine's sampler."""
    flags = f"--hf-checkpoint {PUBLISHED['qwen2.5-7b']} --prompt-data x --train-iters 1"
    flags += " --bf16 --vllm-max-num-seqs 1024"
    found = []
    for drafts in ("", " --rollout-drafts history --rollout-draft-tokens 3"):
        config = parse(RLRunConfig, f"{flags}{drafts}".split(), "x").config
        found.append(MemoryPrediction(config, plan_of(config, 1)).engine.workspace())
    assert found[1] - found[0] == 3 * 1024 * 152064 * 4 * 3


def test_the_engine_works_on_what_the_busiest_rank_gets() -> None:
    """64 groups of 1024 tokens, 8 experts each, over 128 ranks: 4096 copies, by the imbalance."""
    layout = EngineLayout(128, 2, 64, expert_parallel=True)
    even = engine("deepseek-v3", layout, max_num_batched_tokens=1024, max_num_seqs=64)
    assert even.routed_tokens(even.layout.spec.moe) == 4096
    busy = replace(even, imbalance=8.0)
    grown = busy.workspace() - even.workspace()
    assert grown == 7 * 4096 * (2 * 7168 + 3 * 2048) * 2
    many = replace(busy, sizes=replace(busy.sizes, batched_tokens=8192))
    assert many.workspace() == pytest.approx(8 * busy.workspace(), rel=0.01)
    cut = engine("deepseek-v3", EngineLayout(8, 8), max_num_batched_tokens=1024)
    assert cut.routed_tokens(cut.layout.spec.moe) == 8192, (
        "without expert parallelism every rank computes all"
    )
