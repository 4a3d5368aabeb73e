"""Names of megatron-core's process groups."""

from __future__ import annotations

MEGATRON_GROUPS = {
    "tp": "tensor_model_parallel_group",
    "cp": "context_parallel_group",
    "dp": "data_parallel_group",
    "dp_cp": "data_parallel_group_with_cp",
    "pp": "pipeline_model_parallel_group",
    "mp": "model_parallel_group",
    "embd": "embedding_group",
    "pos_embd": "position_embedding_group",
    "tp_dp_cp": "tensor_and_data_parallel_group_with_cp",
    "tp_dp": "tensor_and_data_parallel_group",
    "tp_cp": "tensor_and_context_parallel_group",
    "ep": "expert_model_parallel_group",
    "ep_tp": "expert_tensor_parallel_group",
    "tp_ep_mp": "expert_tensor_and_model_parallel_group",
    "tp_ep_pp": "expert_tensor_model_pipeline_parallel_group",
    "ep_dp": "expert_data_parallel_group",
    "intra_dist_opt_instance": "intra_distributed_optimizer_instance_group",
}
"""Process groups that megatron-core makes here: name in its options -> group description."""


def context_group_name(size: int) -> str:
    """The description of the groups of ``size`` neighbours along context parallelism."""
    return f"context_parallel_group_of_{size}"
