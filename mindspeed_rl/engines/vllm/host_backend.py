"""The backend that builds the published vLLM on a CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from mindspeed_rl.core.shared_memory import check_shared_memory
from mindspeed_rl.engines.vllm.arguments import check_host_tuning, host_arguments
from mindspeed_rl.engines.vllm.backend import ROUTING_STRATEGY, EngineParts
from mindspeed_rl.engines.vllm.capabilities import check_model_support
from mindspeed_rl.engines.vllm.engine_memory import ZeroedMemory, kv_tensors
from mindspeed_rl.platforms.base import Platform
from mindspeed_rl.rollout.provider import EngineSettings
from mindspeed_rl.vllm_patches import (
    expert_parallel,
    model_inspection,
    plain_linear,
    portable_kernels,
    sampled_logprobs,
    seeded_draws,
    shared_memory_names,
    step_sync,
)
from mindspeed_rl.vllm_patches.derived_state import DerivedState
from mindspeed_rl.vllm_patches.routed_experts import ExpertRecorder
from mindspeed_rl.vllm_patches.step_sync import StepSync


class HostBackend:
    """The backend for a CPU, which frees memory by storages.

    Args:
        settings: Layout and flags of the engine's execution are read.
        platform: Platform of the device.

    Raises:
        UsageError: A flag needs vLLM-Ascend.
    """

    def __init__(self, settings: EngineSettings, platform: Platform) -> None:
        tuning = settings.tuning
        self._platform, self._layout, self._tuning = platform, settings.layout, tuning
        self._forces_balance = settings.force_balance
        check_host_tuning(tuning, platform.name)

    def settings(self, options: Mapping[str, object]) -> dict[str, Any]:
        return host_arguments(options, self._layout, self._platform.name, self._tuning)

    def prepare(self) -> StepSync | None:
        """Patch kernels, sampling, experts, names of shared memory, inspection and step sync."""
        check_model_support(self._platform.name, self._layout.spec)
        if self._forces_balance:
            os.environ[ROUTING_STRATEGY] = "uniform_random"
        engine = self._layout.engine
        if engine.tp > 1 and os.environ.get("LOCAL_RANK", "0") == "0":  # before any rank builds
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", engine.tp))
            check_shared_memory(ranks, engine.tp)
        model_inspection.apply()
        plain_linear.apply()
        portable_kernels.apply()
        sampled_logprobs.apply()
        seeded_draws.apply()
        if engine.expert_parallel or engine.dp > 1 or self._forces_balance:
            expert_parallel.apply()
        shared_memory_names.name_segments()
        packed = engine.dp > 1 and self._tuning.rollout_dp_sync != "engine"
        return step_sync.apply(self._platform.name) if packed else None

    def parts(self, llm: Any) -> EngineParts:
        if self._layout.engine.tp > 1:
            dist.barrier()
            shared_memory_names.unlink()
        seeded_draws.use_in(_runner(llm).sampler)
        return parts_by_storage(llm)

    def experts(self, llm: Any, layers: Sequence[int]) -> ExpertRecorder:
        recorder = ExpertRecorder(layers)
        recorder.attach(llm)
        return recorder


def _runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def parts_by_storage(llm: Any) -> EngineParts:
    """Return the parts of a built engine whose memory is freed by the storages of its tensors."""
    runner = _runner(llm)
    cache = ZeroedMemory(kv_tensors(runner))
    assert cache.num_bytes, "no key/value cache found in vLLM's runner"
    # Derived parameters are included: they are views of others, or every update recomputes them.
    parameters = [p.data for _, p in runner.model.named_parameters()]
    weights = ZeroedMemory(parameters, refilled=True)
    derived = DerivedState(runner.model, llm.llm_engine.model_config.dtype)
    return EngineParts(runner.model, derived, weights, cache, stable_addresses=False)
