"""Heads of distillation over the whole vocabulary: of the teacher, and of the policy.

Shapes: N trained tokens of a micro-batch, h and k hidden sizes of policy and teacher.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed import ProcessGroup

from mindspeed_rl.core.logit_tiles import logit_tile
from mindspeed_rl.distillation.full_kl import KLSettings, reverse_kl
from mindspeed_rl.samples.packing import MicroBatch
from mindspeed_rl.trainer.heads import LogProbHead, Outputs
from mindspeed_rl.trainer.train_engine import TrainEngine

#: Columns of a micro-batch: last hidden states of the teachers, and which teacher a token has.
STATES, OWNER = "teacher_states", "teacher_owner"


class StatesHead:
    """Gives the last hidden states [N, k] of the trained tokens. Collective: the TP group.

    Args:
        head: Head of the teacher.
    """

    def __init__(self, head: LogProbHead) -> None:
        self._head = head

    def __call__(self, micro: MicroBatch, hidden: torch.Tensor) -> Outputs:
        return (self._head.rows(micro, hidden),)


class DistillingHead:
    """Gives log-probs, entropies and the reverse KL to the teachers, each [N]. Collective: TP.

    A micro-batch without the teachers' states has no KL: passes before the update need none.

    Args:
        head: Head of the policy.
        teachers: Head of every teacher, in the order of their numbers in the column ``OWNER``.
        group: Tensor-parallel group; ``None`` for one rank.
        rank: Position of this rank in the group.
    """

    def __init__(
        self,
        head: LogProbHead,
        teachers: list[LogProbHead],
        group: ProcessGroup | None,
        rank: int,
    ) -> None:
        self._head, self._teachers = head, teachers
        self._group, self._rank = group, rank

    def __call__(self, micro: MicroBatch, hidden: torch.Tensor) -> Outputs:
        rows = self._head.rows(micro, hidden)
        outputs = self._head.of_rows(micro, rows)
        if STATES not in micro.columns:
            return outputs
        return (*outputs, self._kl(rows, micro.column(STATES), micro.column(OWNER)))

    def _kl(self, rows: torch.Tensor, states: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
        weight = self._head.weight()
        first = self._rank * weight.size(0)
        num_ids = max(0, min(weight.size(0), self._head.spec.vocab_size - first))
        on_host = rows.device.type == "cpu"
        tile = logit_tile(self._head.chunk, rows.size(0), num_ids, on_host=on_host)
        how = KLSettings(self._head.temperature, num_ids, tile, self._group, self._head.into)
        found = rows.new_zeros(rows.size(0), dtype=torch.float32)
        for number, teacher in enumerate(self._teachers):
            # Of all tokens: to select a teacher's own the host would wait for the device.
            own = states[:, : teacher.spec.hidden_size]
            kl = reverse_kl(rows, weight, own, teacher.weight(), how)
            found = found + kl.masked_fill(owner != number, 0.0)
        return found


def install_heads(
    policy: TrainEngine, teachers: Mapping[str, TrainEngine], group: ProcessGroup
) -> None:
    """Make the teachers give hidden states, and the policy the KL to them. Local.

    Ranks that are not on the last stage use no head.

    Args:
        policy: The policy.
        teachers: The teachers by name.
        group: Tensor-parallel group.
    """
    own = policy.head
    assert isinstance(own, LogProbHead)
    heads = [teacher.head for teacher in teachers.values()]
    log_probs = [head for head in heads if isinstance(head, LogProbHead)]
    assert len(log_probs) == len(heads)
    for teacher, head in zip(teachers.values(), log_probs, strict=True):
        teacher.head = StatesHead(head)
    policy.head = DistillingHead(own, log_probs, group if group.size() > 1 else None, group.rank())
