"""On-policy distillation: what a teacher says of every token that the policy has sampled.

Shapes: N trained tokens of a micro-batch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed_rl.algorithms.bounds import bounded
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.flag import Needs, flag

if TYPE_CHECKING:
    import torch

TEACHER_FLAG = "--teacher-hf-checkpoint"
#: Name of a teacher that is the only one.
ONLY = ""
_WITH_TEACHER = Needs(TEACHER_FLAG)
_NAMED = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class DistillationSettings:
    """Distillation.

    The policy samples, and a teacher says of every token how likely it was to write the same. The
    difference, log p(teacher) - log p(policy), is an advantage of that token: on average it follows
    the gradient of the reverse KL to the teacher. It is added to the advantages of the rewards;
    --rl-advantage-estimator none trains on the teacher alone and only measures the rewards. The
    teacher has the tokenizer and the parallel sizes of the policy, and any number of layers.

    --rl-preset distillation --teacher-hf-checkpoint Qwen2.5-7B-Instruct
    """

    teacher_hf_checkpoint: tuple[str, ...] = flag(
        (),
        "Directories of the teachers, or names of the hub. Several are written NAME=DIR: a row of "
        "the data names its teacher in the field --teacher-key, and a row without it has none.",
        nargs="+",
    )
    teacher_key: str = flag(
        "teacher",
        "Field of a data row with the name of its teacher, where there are several.",
        needs=_WITH_TEACHER,
    )
    teacher_weight: float = flag(
        1.0,
        "Factor of log p(teacher) - log p(policy) in the advantage of a token, or of the KL in the "
        "loss.",
        above=0.0,
        needs=_WITH_TEACHER,
    )
    teacher_kl: str = flag(
        "sampled",
        "What is asked of the teacher. sampled: its log-prob of the sampled token, which becomes "
        "an advantage. full: its distribution over the whole vocabulary; the loss has the exact "
        "reverse KL of each token, which says more of a token, keeps the teacher's last hidden "
        "states of the step, and needs its parameters on the device during updates.",
        choices=("sampled", "full"),
        needs=_WITH_TEACHER,
    )

    @property
    def full(self) -> bool:
        """Whether the loss has the KL over the whole vocabulary."""
        return self.teacher_kl == "full" and bool(self.teacher_hf_checkpoint)

    @property
    def sampled_weight(self) -> float:
        """Weight of the teachers in an advantage; 0 without them."""
        return self.teacher_weight if self.teacher_hf_checkpoint and not self.full else 0.0

    @property
    def full_weight(self) -> float:
        """Weight of the KL over the whole vocabulary in the loss; 0 without it."""
        return self.teacher_weight if self.full else 0.0

    @property
    def teachers(self) -> Mapping[str, str]:
        """Directory of every teacher by its name, which is empty where there is only one.

        Raises:
            UsageError: Several have no names, or the same.
        """
        given = self.teacher_hf_checkpoint
        if len(given) == 1 and _NAMED.fullmatch(given[0]) is None:
            return {ONLY: given[0]}
        found: dict[str, str] = {}
        for text in given:
            match = _NAMED.fullmatch(text)
            if match is None or match[1] in found:
                why = "has no name" if match is None else f"is the second one of name {match[1]}"
                raise UsageError(
                    f"{TEACHER_FLAG} {' '.join(given)}: {text} {why}; write several teachers as "
                    "NAME=DIR, where rows of the data have that name in their field "
                    f"{self.teacher_key}"
                )
            found[match[1]] = match[2]
        return found


def teacher_gain(policy: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return log p(teacher) - log p(policy) of sampled tokens, within +-20 nats: [N]. Local.

    For y drawn from the policy p at a given prefix, E[gain grad log p(y)] is minus the gradient of
    KL(p || p_teacher) at that prefix, so the gain is an advantage that counts no later tokens
    (MiniLLM, arXiv:2306.08543; GKD, arXiv:2306.13649).

    Args:
        policy: [N] log-probs under the weights that sampled, without gradient.
        teacher: [N] log-probs of the teacher, NaN where a token has none.

    Returns:
        [N] in nats, 0 where a token has no teacher.
    """
    return bounded((teacher - policy).masked_fill(teacher.isnan(), 0.0))
