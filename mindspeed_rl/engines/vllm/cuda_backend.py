"""The backend that builds the published vLLM on CUDA and takes its memory by tags.

Nothing of it has been executed on a GPU. Names and signatures are those of vLLM's sources
(``tests/unit/engines/test_cuda_sources.py``), and the pool's own code runs on memory of the host
(``tests/unit/engines/test_cuda_memory.py``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.engines.vllm.arguments import check_host_tuning, host_arguments
from mindspeed_rl.engines.vllm.backend import ROUTING_STRATEGY, EngineParts
from mindspeed_rl.engines.vllm.capabilities import check_model_support
from mindspeed_rl.engines.vllm.cuda_arguments import (
    ENVIRONMENT,
    RUNNER,
    check_cuda_graphs,
    check_runner,
)
from mindspeed_rl.engines.vllm.engine_memory import kv_tensors
from mindspeed_rl.platforms.base import Platform
from mindspeed_rl.platforms.cuda import free_blocks
from mindspeed_rl.platforms.pool_memory import PoolMemory
from mindspeed_rl.platforms.storages import as_bytes, storages_of
from mindspeed_rl.rollout.open_requests import ExpertSource
from mindspeed_rl.rollout.provider import EngineSettings
from mindspeed_rl.vllm_patches import seeded_draws
from mindspeed_rl.vllm_patches.derived_state import DerivedState
from mindspeed_rl.vllm_patches.step_sync import StepSync


class CudaBackend:
    """The backend for CUDA.

    Args:
        settings: Layout and flags of the engine's execution are read.
        platform: Platform of the device.

    Raises:
        UsageError: A flag needs vLLM-Ascend, or graphs that there are none of; or the environment
            chooses another model runner.
    """

    def __init__(self, settings: EngineSettings, platform: Platform) -> None:
        self._platform, self._layout, self._tuning = platform, settings.layout, settings.tuning
        self._sizes, self._forces_balance = settings.graph_sizes, settings.force_balance
        check_host_tuning(self._tuning, platform.name)
        check_cuda_graphs(self._tuning, self._layout)
        check_runner(os.environ)

    def settings(self, options: Mapping[str, object]) -> dict[str, Any]:
        return host_arguments(options, self._layout, self._platform.name, self._tuning, self._sizes)

    def prepare(self) -> StepSync | None:
        """Choose the model runner, and balanced experts in throughput runs."""
        check_model_support(self._platform.name, self._layout.spec)
        os.environ.update(ENVIRONMENT)
        if self._forces_balance:
            os.environ[ROUTING_STRATEGY] = "uniform_random"
        return None

    def parts(self, llm: Any) -> EngineParts:
        """Return the worker's model, with the pool of sleep mode as its memory.

        The built runner draws the tokens of a step at once, by seeds and positions.

        Raises:
            UsageError: vLLM runs another model runner than the one that was chosen.
            RuntimeError: The device computes other noise than the CPU.
        """
        from vllm.device_allocator import cumem

        engine = llm.llm_engine
        worker = engine.model_executor.driver_worker.worker
        if worker.use_v2_model_runner:
            raise UsageError(
                f"vLLM runs its model runner V2 in spite of {RUNNER}=0; remove the --vllm-* flags "
                "that need it"
            )
        seeded_draws.check_noise(self._platform.device)
        seeded_draws.apply()
        model, pool = worker.get_model(), pool_of(cumem)
        weights = PoolMemory(
            pool,
            "weights",
            worker.wake_up,
            self._platform,
            save=True,
            # An update writes or derives every parameter.
            lost=lambda: [param.data for param in model.parameters()],
            unused=free_blocks,
        )
        whole = [as_bytes(s) for s in storages_of(kv_tensors(worker.model_runner))]
        cache = PoolMemory(
            pool, "kv_cache", worker.wake_up, self._platform, save=False, lost=lambda: whole
        )
        derived = DerivedState(model, engine.model_config.dtype)
        return EngineParts(model, derived, weights, cache, stable_addresses=True)

    def experts(self, llm: Any, layers: Sequence[int]) -> ExpertSource:
        """Refuse: ``VllmProvider.check_run`` has refused it before."""
        raise UsageError("--rl-routing-replay rollout: not with vLLM on cuda; use trainer, or none")


def pool_of(cumem: Any) -> Any:
    """Return vLLM's module ``cumem`` by the names that :class:`PoolMemory` calls."""

    def memcpy(to: int, room: int, source: int, size: int, kind: int) -> int:
        """Copy by ``cudaMemcpy``, which finds out the direction, waits, and raises its errors."""
        cumem.libcudart.cudaMemcpy(to, source, size)
        return 0

    return SimpleNamespace(
        CaMemAllocator=cumem.CuMemAllocator,
        create_and_map=cumem.create_and_map,
        unmap_and_release=cumem.unmap_and_release,
        memcpy=memcpy,
    )
