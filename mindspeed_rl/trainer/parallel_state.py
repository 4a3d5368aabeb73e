"""megatron-core's process groups and random states, checked against our layout."""

from __future__ import annotations

from megatron.core import parallel_state, tensor_parallel

from mindspeed_rl.parallel.groups import check_group
from mindspeed_rl.parallel.layout import ParallelLayout


def forget() -> None:
    """Forget megatron-core's groups, so that another layout can be initialized. Local."""
    parallel_state.destroy_model_parallel()


def initialize(layout: ParallelLayout, seed: int) -> None:
    """Create megatron-core's groups and seed its parallel random states. Collective: the world."""
    vpp = layout.stages.vpp
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
    )
    check_group(layout, "tp", parallel_state.get_tensor_model_parallel_group())
    check_group(layout, "pp", parallel_state.get_pipeline_model_parallel_group())
    check_group(layout, "cp", parallel_state.get_context_parallel_group())
    check_group(layout, "dp", parallel_state.get_data_parallel_group())
    check_group(layout, "ep", parallel_state.get_expert_model_parallel_group())
    check_group(layout, "etp", parallel_state.get_expert_tensor_parallel_group())
    check_group(layout, "edp", parallel_state.get_expert_data_parallel_group())
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
