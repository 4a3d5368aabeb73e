"""The layout of vLLM's weights: where it keeps each rectangle of each HF tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from mindspeed_rl.models.expert_rules import StackedExperts
from mindspeed_rl.models.registry import weight_table
from mindspeed_rl.models.rules import WeightRow
from mindspeed_rl.weight_layouts.rollout import RolloutLayout

# Module of the experts in the weight tables, which follow vLLM 0.32.
EXPERT_MODULE = "mlp.experts.routed_experts"
# vLLM pads the vocabulary to this many rows (DEFAULT_VOCAB_PADDING_SIZE).
VOCAB_PADDING = 64


@dataclass(frozen=True)
class VllmLayout(RolloutLayout):
    """The layout of vLLM and vLLM-Ascend.

    Attributes:
        transposed_experts: Whether expert matrices are stored as [columns, rows], as vLLM-Ascend
            does.
        whole_shared_experts: Whether every rank keeps the shared experts whole where experts are
            spread over tensor and data parallelism, as vLLM does but not vLLM-Ascend.
        flashcomm: Whether vLLM-Ascend runs with ``--rollout-flashcomm``, with which every rank
            keeps the shared experts whole.
        expert_module: Path of the module with the experts, below a layer.
    """

    transposed_experts: bool = False
    whole_shared_experts: bool = False
    flashcomm: bool = False
    expert_module: str = EXPERT_MODULE

    @cached_property
    def rows(self) -> tuple[WeightRow, ...]:
        rows = weight_table(self.spec.family).engine_rows(self.spec, "vllm")
        return tuple(
            replace(
                row,
                transposed=self.transposed_experts,
                param=row.param.replace(EXPERT_MODULE, self.expert_module),
            )
            if isinstance(row, StackedExperts)
            else row
            for row in rows
        )

    @property
    def vocab_multiple(self) -> int:
        """64, whatever the number of ranks; vLLM refuses sizes that they cannot divide."""
        return VOCAB_PADDING

    def keeps_whole(self, row: WeightRow) -> bool:
        """Whether a row is of shared experts that every rank keeps whole.

        Sources: ``ParallelConfig.use_sequence_parallel_moe`` of vLLM; ``get_parallel_op`` of
        vLLM-Ascend (``ops/linear_op.py``).
        """
        engine = self.engine
        spread = engine.expert_parallel and engine.tp > 1 and engine.dp > 1
        whole = self.flashcomm or (self.whole_shared_experts and spread)
        return whole and row.when == "shared_ffn_size"
