"""Fused routing is CUDA alone; megatron-core imports the names and calls them when told to."""


def fused_topk_with_score_function(*_: object) -> None:
    """Not there."""
    raise NotImplementedError


fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = fused_topk_with_score_function
