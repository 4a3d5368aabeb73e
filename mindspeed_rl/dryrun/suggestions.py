"""Changes of flags that make the fullest moment smaller, each predicted anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.config.validate import RunPlan, check_pretrain, check_rl
from mindspeed_rl.memory.assumptions import MemoryAssumptions
from mindspeed_rl.memory.owners import OffloadMode
from mindspeed_rl.memory.prediction import MemoryPrediction, Peak, predict

# Of the fullest moment; less is not worth a flag.
_WORTHWHILE = 0.005
Config = RLRunConfig | PretrainRunConfig


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One change.

    Attributes:
        flags: what to add or change.
        peak: the fullest moment then.
        saved_bytes: of the fullest moment.
    """

    flags: str
    peak: Peak
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class _Candidate:
    flags: str
    config: Config
    assumptions: MemoryAssumptions


def plan_of(config: Config, world: int) -> RunPlan:
    """The plan of a configuration, whatever files it names.

    Raises:
        ValueError: the configuration is not possible.
    """
    if isinstance(config, RLRunConfig):
        return check_rl(config, world, files=False)
    return check_pretrain(config, world, files=False)


def suggest(prediction: MemoryPrediction, ranks: Sequence[int], *, npu: bool) -> list[Suggestion]:
    """Single changes that lower the fullest moment of some ranks, the most saving first. Pure.

    Args:
        prediction: of the run as it is.
        ranks: whose moments count.
        npu: whether MindSpeed's own flags have an effect.
    """
    before = prediction.peak(ranks).num_bytes
    found = []
    for candidate in _candidates(prediction, npu):
        try:
            plan = plan_of(candidate.config, prediction.world)
        except ValueError:  # a change that the model or the layout does not allow is no suggestion
            continue
        peak = predict(candidate.config, plan, candidate.assumptions).peak(ranks)
        if before - peak.num_bytes > _WORTHWHILE * before:
            found.append(Suggestion(candidate.flags, peak, before - peak.num_bytes))
    return sorted(found, key=lambda s: -s.saved_bytes)


def _candidates(prediction: MemoryPrediction, npu: bool) -> Iterator[_Candidate]:
    config, assumptions = prediction.config, prediction.assumptions

    def flags(text: str, section: str, **values: Any) -> _Candidate:
        changed: Any = replace(getattr(config, section), **values)
        return _Candidate(text, replace(config, **{section: changed}), assumptions)

    yield from _of_training(config, flags)
    if npu and not assumptions.swap_parts:
        parts = config.ascend.swap_optimizer_times
        yield _Candidate("--swap-optimizer", config, replace(assumptions, swap_parts=parts))
    if isinstance(config, RLRunConfig):
        yield from _of_rollouts(prediction, config, flags)


def _of_training(config: Config, flags: Callable[..., _Candidate]) -> Iterator[_Candidate]:
    train, parallel = config.train, config.parallel
    if not parallel.use_distributed_optimizer:
        text = "--use-distributed-optimizer"
        yield flags(text, "parallel", use_distributed_optimizer=True)
    if not parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1:
        yield flags("--sequence-parallel", "parallel", sequence_parallel=True)
    if train.recompute_granularity == "none":
        text = "--recompute-granularity selective"
        yield flags(text, "train", recompute_granularity="selective")
    if train.recompute_granularity != "full" or train.recompute_method == "block":
        yield flags(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "train",
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
        )
    if train.max_tokens_per_micro_batch == 0 and train.micro_batch_size > 1:
        size = train.micro_batch_size // 2
        yield flags(f"--micro-batch-size {size}", "train", micro_batch_size=size)
    chunk = train.logprob_chunk_tokens // 4
    if chunk >= 64:
        text = f"--logprob-chunk-tokens {chunk}"
        yield flags(text, "train", logprob_chunk_tokens=chunk)


def _of_rollouts(
    prediction: MemoryPrediction, config: RLRunConfig, flags: Callable[..., _Candidate]
) -> Iterator[_Candidate]:
    rollout, assumptions = config.rollout, prediction.assumptions
    modes = (OffloadMode.NONE, OffloadMode.OPTIMIZER, OffloadMode.ALL)
    for mode in modes[modes.index(assumptions.offload) + 1 :]:
        changed = flags(f"--rl-offload {mode.value}", "memory", rl_offload=mode.value)
        yield replace(changed, assumptions=replace(assumptions, offload=mode))
    if config.memory.rollout_sleep != "all" and assumptions.offload is not OffloadMode.ALL:
        yield flags("--rollout-sleep all", "memory", rollout_sleep="all")
    half = rollout.rollout_kv_cache_gb / 2
    yield flags(f"--rollout-kv-cache-gb {half:g}", "rollout", rollout_kv_cache_gb=half)
    tokens = prediction.engine.batched_tokens // 8
    if tokens >= 256:
        options = config.vllm_options | {"max_num_batched_tokens": tokens}
        text = f"--vllm-max-num-batched-tokens {tokens}"
        yield _Candidate(text, replace(config, vllm_options=options), assumptions)
    tp = rollout.rl_inference_tensor_model_parallel_size * 2
    sizes = {"rl_inference_tensor_model_parallel_size": tp}
    text = f"--rollout-tp {tp}"
    if rollout.rl_inference_expert_model_parallel_size > 1 and rollout.rollout_dp % 2 == 0:
        # the engine keeps its ranks, and with them its expert parallelism
        sizes["rollout_dp"] = rollout.rollout_dp // 2
        text += f" --rollout-dp {rollout.rollout_dp // 2}"
    yield flags(text, "rollout", **sizes)
