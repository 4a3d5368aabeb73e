"""The backend that builds vLLM-Ascend in the training process and takes it apart."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl.core.layout import round_up
from mindspeed_rl.engines.vllm.backend import EngineParts
from mindspeed_rl.engines.vllm.engine_memory import kv_tensors
from mindspeed_rl.engines.vllm_ascend import drafts, expert_slots
from mindspeed_rl.engines.vllm_ascend.arguments import (
    ENVIRONMENT,
    ascend_arguments,
    check_updatable,
    merged_arguments,
)
from mindspeed_rl.engines.vllm_ascend.experts import AscendWeights
from mindspeed_rl.engines.vllm_ascend.routed_experts import ARGUMENTS, ReturnedExperts
from mindspeed_rl.engines.vllm_ascend.sampling import draw_in_batches, report_processed_logprobs
from mindspeed_rl.platforms.base import Platform
from mindspeed_rl.platforms.npu import memory_format
from mindspeed_rl.platforms.npu_allocator import (
    free_blocks,
    set_expandable_segments,
    swaps_segments,
)
from mindspeed_rl.platforms.npu_changes import ProcessChanges
from mindspeed_rl.platforms.pool_memory import PoolMemory
from mindspeed_rl.platforms.storages import as_bytes, storages_of
from mindspeed_rl.rollout.provider import EngineSettings
from mindspeed_rl.vllm_patches import sampled_logprobs, step_sync
from mindspeed_rl.vllm_patches.step_sync import StepSync

_NZ = 29  # ACL_FORMAT_FRACTAL_NZ


class AscendBackend:
    """The backend for NPUs.

    Args:
        settings: Layout, model directory and flags of the engine's execution are read.
        platform: Platform of the device.

    Raises:
        UsageError: The model cannot be updated.
    """

    def __init__(self, settings: EngineSettings, platform: Platform) -> None:
        tuning = settings.tuning
        self._platform, self._layout, self._tuning = platform, settings.layout, tuning
        sizes = settings.graph_sizes if tuning.rollout_graph_mode != "eager" else ()
        if tuning.rollout_flashcomm:  # others would be dropped
            tp = settings.layout.engine.tp
            sizes = tuple(sorted({round_up(size, tp) for size in sizes}))
        self._drafts = settings.draft_rule is not None
        self._copies = bool(settings.layout.physical_experts)
        self._moves = bool(settings.layout.layer_experts or settings.counted_layers)
        self._arguments = ascend_arguments(tuning, sizes, copies=self._copies)
        if settings.recorded_layers:
            self._arguments |= ARGUMENTS
        config = json.loads((Path(settings.model_dir) / "config.json").read_text())
        check_updatable(config, settings.model_dir)

    def settings(self, options: Mapping[str, object]) -> dict[str, Any]:
        return merged_arguments(options, self._layout, self._arguments)

    def prepare(self) -> StepSync | None:
        """Set the environment and patch vLLM; the pool is filled without expandable segments."""
        self._changes = ProcessChanges()
        os.environ.update(ENVIRONMENT)
        if swaps_segments():
            set_expandable_segments(False)
        if self._drafts:
            drafts.apply()
        if self._moves:
            expert_slots.apply()
        packed = self._tuning.rollout_dp_sync != "engine"
        return step_sync.apply("npu") if packed and self._layout.engine.dp > 1 else None

    def parts(self, llm: Any) -> EngineParts:
        """Return the worker's model, with the pool of sleep mode as its memory.

        The process is as it was before the engine was built, and its sampler as we need it.

        Raises:
            RuntimeError: The engine keeps weights in the NZ format, or cannot report log-probs of
                the distribution from which it samples.
        """
        import vllm_ascend.device_allocator.camem as camem

        engine = llm.llm_engine
        worker = engine.model_executor.driver_worker.worker
        self._changes.undo()
        report_processed_logprobs(worker.model_runner)
        draw_in_batches(self._platform.device)
        sampled_logprobs.apply()
        model = worker.get_model()
        weight_format = self._refuse_nz(model)
        process = self._processing(model, engine.vllm_config)
        swap = swaps_segments()

        def pool_in_use(in_use: bool) -> None:
            if swap:
                set_expandable_segments(not in_use)

        weights = PoolMemory(
            camem,
            "weights",
            worker.wake_up,
            self._platform,
            save=True,
            # An update writes or derives every parameter.
            lost=lambda: [param.data for param in model.parameters()],
            unused=free_blocks,
            pool_in_use=pool_in_use,
        )
        whole = [as_bytes(s) for s in storages_of(kv_tensors(worker.model_runner))]
        cache = PoolMemory(
            camem, "kv_cache", worker.wake_up, self._platform, save=False, lost=lambda: whole
        )
        derived = AscendWeights(model, process)
        return EngineParts(
            *(model, derived, weights, cache, True, weight_format),
            place_experts=_placed_by_file if self._copies else expert_slots.place_experts,
            count_tokens=expert_slots.ComputedExperts,
        )

    def experts(self, llm: Any, layers: Sequence[int]) -> ReturnedExperts:
        return ReturnedExperts(llm, layers)

    def _processing(self, model: torch.nn.Module, vllm_config: Any) -> Callable[[], None]:
        import vllm.model_executor.model_loader.utils as loading
        from vllm.config import set_current_vllm_config

        def process() -> None:
            with set_current_vllm_config(vllm_config):
                # Looked up at every call, because vLLM-Ascend replaces the function.
                loading.process_weights_after_loading(
                    model, vllm_config.model_config, self._platform.device
                )

        return process

    def _refuse_nz(self, model: torch.nn.Module) -> str:
        """Fail when the engine keeps weights in the NZ format, whatever we asked for.

        Returns:
            A description of formats and switches, for the log at the start of a run.

        Raises:
            RuntimeError: The configuration, the variable that updates read, or the format that
                torch_npu reports for a parameter is NZ.
        """
        import vllm_ascend.envs as envs
        from vllm_ascend.ascend_config import get_ascend_config

        configured = get_ascend_config()
        modes = {
            "weight_nz_mode": getattr(configured, "weight_nz_mode", 0),
            "VLLM_ASCEND_ENABLE_NZ": getattr(envs, "VLLM_ASCEND_ENABLE_NZ", 0),
            "enable_fused_mc2": getattr(configured, "enable_fused_mc2", 0),
        }
        formats = {name: memory_format(param) for name, param in model.named_parameters()}
        found = [f"{name} = {mode}" for name, mode in modes.items() if mode]
        found += [f"{name} has format {n}" for name, n in formats.items() if n == _NZ]
        if found:
            raise RuntimeError(
                f"vLLM-Ascend keeps weights in the NZ format ({found[0]}): updates would be "
                "written in another format than read"
            )
        switches = ", ".join(f"{name} {mode}" for name, mode in modes.items())
        numbers = ", ".join(map(str, sorted(set(formats.values()))))
        return (
            f"engine weights: not in NZ; formats of the {len(formats)} parameters: {numbers}; "
            f"{switches}"
        )


def _placed_by_file(*_: object) -> None:
    """Leave experts where vLLM-Ascend has put them and their copies, by the same file as we."""
