"""Messages between pipeline stages whose micro-batches have their own lengths.

megatron-core lets stages tell each other the shape of every message in a message of its own, and
waits for it on the host. Here every stage knows the length of every micro-batch from the plan of
the step, so a stage knows what it receives: the order of messages is the order of the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

_GROUPS = ("tp", "cp", "pp", "dp_cp", "embd", "pos_embd")


class PlannedCommunicator(P2PCommunicator):
    """The communicator of one pass over the micro-batches of an optimizer step.

    Args:
        config: Configuration of the model, with ``variable_seq_lengths``.
        lengths: Tokens of each micro-batch on a rank of the residual stream.
    """

    def __init__(self, config: TransformerConfig, lengths: Sequence[int]) -> None:
        group = parallel_state.get_pipeline_model_parallel_group()
        super().__init__(pp_group=group, config=config)
        vpp = config.virtual_pipeline_model_parallel_size or 1
        forward, backward = received(len(lengths), group.rank(), group.size(), vpp)
        self._forward = (self._shape(lengths[i]) for i in forward)
        self._backward = (self._shape(lengths[i]) for i in backward)

    def _shape(self, tokens: int) -> list[int]:
        return [tokens, 1, self.config.hidden_size]

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """Return the shapes of the next activations and of the next gradients to receive."""
        nothing = [0, 0, 0]
        forward = next(self._forward, None) if recv_prev else nothing
        backward = next(self._backward, None) if recv_next else nothing
        if forward is None or backward is None:
            raise RuntimeError(
                "megatron-core's schedule receives more tensors than the micro-batches of this "
                "pass have"
            )
        return forward, backward


def received(num_micro_batches: int, stage: int, pp: int, vpp: int) -> tuple[list[int], list[int]]:
    """Return whose activations and whose gradients a stage receives, in order. Pure.

    With several chunks per stage micro-batches go in groups of ``pp`` through all chunks
    (Narayanan et al. 2021, arXiv:2104.04473). The first chunk of the model receives no activations
    and the last one no gradients.

    Args:
        num_micro_batches: Micro-batches of the pass.
        stage: Pipeline stage of this rank.
        pp: Number of stages.
        vpp: Chunks per stage.

    Returns:
        Numbers of the micro-batches of the received activations, and of the received gradients.
    """
    group = pp if vpp > 1 else 1
    order = [
        (micro, chunk)
        for start in range(0, num_micro_batches, group)
        for chunk in range(vpp)
        for micro in range(start, min(start + group, num_micro_batches))
    ]
    # Backward passes take the chunks from last to first, so that the first of them is the last.
    activations = [m for m, chunk in order if (stage, chunk) != (0, 0)]
    gradients = [m for m, chunk in order if (stage, chunk) != (pp - 1, 0)]
    return activations, gradients


def planned_messages(config: TransformerConfig, lengths: Sequence[int]) -> dict[str, Any]:
    """Return the arguments with which a schedule takes the lengths of its messages. Local.

    Args:
        config: Configuration of the model.
        lengths: Tokens of each micro-batch on a rank of the residual stream.
    """
    if not config.variable_seq_lengths:
        return {}
    return {
        "p2p_communicator": PlannedCommunicator(config, lengths),
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(list(_GROUPS)),
    }
