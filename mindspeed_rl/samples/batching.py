"""The cutting of an optimizer step's samples into the micro-batches of this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mindspeed_rl.core.layout import round_up
from mindspeed_rl.samples.balance import SequenceCost
from mindspeed_rl.samples.locality import minimize_moves
from mindspeed_rl.samples.packing import MicroBatch, TrainSample, pack
from mindspeed_rl.samples.placement import MicroBatchPlan, plan_micro_batches
from mindspeed_rl.samples.routes import Ints


@dataclass(frozen=True, slots=True)
class BatchRules:
    """Rules by which samples are cut into micro-batches and dealt to the data-parallel ranks.

    Attributes:
        dp: Data-parallel size.
        dp_rank: Data-parallel rank of this process.
        micro_batch_size: Sequences per micro-batch, used when ``max_tokens`` is 0.
        max_tokens: Tokens per micro-batch.
        row_multiple: The length of a row is rounded up to a multiple of this.
        sequence_multiple: Each sequence is padded to a multiple of this, the number of chunks that
            context parallelism cuts it into.
        count_multiple: The number of micro-batches is rounded up to a multiple of this.
        cost: Work of a sequence; all ranks get equal amounts of work.
    """

    dp: int
    dp_rank: int
    micro_batch_size: int
    max_tokens: int = 0
    row_multiple: int = 1
    sequence_multiple: int = 1
    count_multiple: int = 1
    cost: SequenceCost = field(default_factory=SequenceCost)

    def plan(self, lengths: Sequence[int], moved: Ints | None = None) -> MicroBatchPlan:
        """Decide which rank trains on what in one optimizer step, the same on all ranks. Pure.

        Args:
            lengths: Tokens of each sample.
            moved: [samples, data-parallel ranks] bytes, or any unit, that move if a sample trains
                there; samples stay where they are as far as balance allows.
        """
        plan = plan_micro_batches(
            lengths,
            dp=self.dp,
            micro_batch_size=self.micro_batch_size,
            max_tokens=self.max_tokens,
            multiple=self.row_multiple,
            sequence_multiple=self.sequence_multiple,
            count_multiple=self.count_multiple,
            cost=self.cost,
        )
        if moved is None:
            return plan
        return minimize_moves(plan, [round_up(n, self.sequence_multiple) for n in lengths], moved)

    def mine(self, plan: MicroBatchPlan) -> list[int]:
        """Return positions of this rank's samples, in the order of its micro-batches."""
        return [i for micro in plan.assignment[self.dp_rank] for i in micro]

    def pack(self, plan: MicroBatchPlan, samples: Mapping[int, TrainSample]) -> list[MicroBatch]:
        """Pack the micro-batches of this rank. Local.

        Args:
            plan: Plan of one optimizer step.
            samples: Samples by position in the plan; at least those of this rank.
        """
        return [
            pack([samples[i] for i in micro], plan.padded_length, self.sequence_multiple)
            for micro in plan.assignment[self.dp_rank]
        ]

    def pack_own(
        self, samples: Sequence[TrainSample], lengths: Sequence[int] | None = None
    ) -> list[MicroBatch]:
        """Pack this rank's micro-batches of samples that all ranks have in the same order. Local.

        Where ``lengths`` (tokens of each sample) are given, only the samples of this rank are read.
        """
        plan = self.plan([s.length for s in samples] if lengths is None else lengths)
        return self.pack(plan, {i: samples[i] for i in self.mine(plan)})
