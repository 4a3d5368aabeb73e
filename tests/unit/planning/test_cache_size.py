"""The size of the engine's cache where no flag gives it."""

from dataclasses import replace

import pytest
from support.published import PUBLISHED

from mindspeed_rl.building.engine import scored_cache_bytes
from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.memory import FIXED_MODES, MemoryPhase
from mindspeed_rl.planning.budget import machine_on
from mindspeed_rl.planning.cache_size import with_cache_size
from mindspeed_rl.planning.findings import find_out
from mindspeed_rl.planning.prediction import MemoryPrediction
from mindspeed_rl.planning.run_plan import plan_rl
from mindspeed_rl.rollout.provider import EngineSizes

WORLD = 8
FLAGS = f"""--hf-checkpoint {PUBLISHED["qwen2.5-7b"]} --prompt-data rl.jsonl --train-iters 1
    --reward-function math --tensor-model-parallel-size 4 --rollout-tp 2 --bf16
    --grpo-prompts-per-step 24 --grpo-group-size 4 --max-prompt-length 500
    --rollout-max-response-length 1500 --use-distributed-optimizer --vllm-block-size 128"""
# Qwen2.5-7B: 28 layers, 4 key/value heads of 128 values over two ranks, key and value, two bytes.
TOKEN_BYTES = 28 * 2 * 128 * 2 * 2
SEQUENCE = (2048 + 128) * TOKEN_BYTES  # 2,000 tokens in whole blocks of 128, and one block


def prediction_of(*flags: str) -> MemoryPrediction:
    config = parse(RLRunConfig, [*FLAGS.split(), *flags], "test").config
    return MemoryPrediction(config, plan_rl(config, WORLD, files=False), machine_on(config))


def chosen(usable: int, *flags: str, shared: bool = False) -> tuple[int, str]:
    config, lines = with_cache_size(prediction_of(*flags), usable, shared=shared)
    return round(config.rollout.rollout_kv_cache_gb * 2**30), " ".join(lines)


def rollout_bytes(*flags: str) -> int:
    """Bytes of a rank while the engine samples, without its cache and with most moved away."""
    prediction = replace(prediction_of(*flags), offload=FIXED_MODES[-1])
    return prediction.peaks(prediction.representatives())[MemoryPhase.ROLLOUT]


def test_all_sequences_of_an_engine_where_they_fit():
    size, line = chosen(10**12)
    assert size == 96 // 4 * SEQUENCE  # 96 samples, 4 engines
    assert "all 24 sequences" in line and "length of 2000 tokens" in line and "wait" not in line
    assert chosen(10**12, "--vllm-max-num-seqs", "7")[0] == 7 * SEQUENCE


def test_what_is_left_beside_the_rest_else():
    room = int((rollout_bytes() + 5.5 * SEQUENCE) / 0.95)
    size, line = chosen(room)
    assert size == 5 * SEQUENCE
    assert "5 of the 24 sequences" in line and "the others wait" in line
    assert chosen(room, shared=True)[0] == 2 * SEQUENCE  # others use the host as well
    assert chosen(0)[0] == SEQUENCE  # less makes no engine; the dry run says that it does not fit


def test_weights_of_the_trainer_that_stay_take_their_part():
    """With --rl-offload none the trainer's state lies on the device while the engine samples."""
    state = replace(prediction_of(), offload=FIXED_MODES[0])
    stays = state.peaks(state.representatives())[MemoryPhase.ROLLOUT]
    assert stays > rollout_bytes() + 5 * SEQUENCE
    room = int((stays + 3.5 * SEQUENCE) / 0.95)
    assert chosen(room, "--rl-offload", "none")[0] == 3 * SEQUENCE
    assert chosen(room)[0] > 3 * SEQUENCE


@pytest.mark.parametrize(("longest", "tokens"), [(2, 256), (12, 256), (128, 256), (129, 384)])
def test_a_sequence_takes_whole_blocks_and_one_that_the_engine_keeps(longest: int, tokens: int):
    sizes = EngineSizes(batched_tokens=64, sequences=3, block_tokens=128)
    assert sizes.sequence_tokens(longest) == tokens
    assert scored_cache_bytes(sizes, token_bytes=10, longest=longest) == 16 * tokens * 10


def test_a_size_that_was_given_is_kept():
    given = prediction_of("--rollout-kv-cache-gb", "3")
    assert with_cache_size(given, 10**12) == (given.config, [])


@pytest.mark.parametrize(("held", "told"), [(1, True), (5, True), (6, False), (24, False)])
def test_a_small_size_that_was_given_is_told(held: int, told: bool):
    """24 sequences of a rank: a quarter of them is enough to say nothing."""
    given = prediction_of("--rollout-kv-cache-gb", str((held + 0.5) * SEQUENCE / 2**30))
    config, lines = with_cache_size(given, 10**12)
    assert config == given.config
    assert [f"holds {held} of the 24 sequences" in line for line in lines] == [True] * told


@pytest.mark.parametrize("memory", ["20", "64"])
def test_a_dry_run_predicts_the_chosen_cache_and_fits(memory):
    found = find_out(
        parse(RLRunConfig, [*FLAGS.split(), "--device-memory-gb", memory], "t").config, 8
    )
    config = found.prediction.config
    assert isinstance(config, RLRunConfig) and config.rollout.rollout_kv_cache_gb > 0
    assert found.tables[0][MemoryPhase.ROLLOUT]["kv_cache"] == pytest.approx(
        config.rollout.rollout_kv_cache_gb * 2**30, rel=1e-6
    )
    assert found.tables[0][MemoryPhase.ROLLOUT] and len(found.cache_lines) == 1
    peak = found.prediction.peaks(found.prediction.representatives())[MemoryPhase.ROLLOUT]
    assert peak <= found.budget_bytes
