"""The teachers of a run: which sample has which, and what they say of its tokens.

Shapes: N trained tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from mindspeed_rl.algorithms.distillation import ONLY, TEACHER_FLAG
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.data.prompts import PromptDataset
from mindspeed_rl.data.tokenizer import read_tokenizer
from mindspeed_rl.distillation.heads import OWNER, STATES
from mindspeed_rl.samples.packing import MicroBatch
from mindspeed_rl.samples.rollout_info import RolloutInfo
from mindspeed_rl.trainer.train_engine import TrainEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def teacher_name(metadata: Mapping[str, object], names: Sequence[str], key: str) -> str | None:
    """Return the name of the teacher of a data row; ``None``: it has none. Pure.

    Args:
        metadata: Further fields of the row.
        names: Names of the teachers of the run.
        key: ``--teacher-key``.
    """
    if tuple(names) == (ONLY,):
        return ONLY
    given = metadata.get(key)
    return None if given is None else str(given)


def teachers_of_samples(
    samples: Sequence[RolloutInfo], prompts: PromptDataset, names: Sequence[str], key: str
) -> dict[int, str]:
    """Return the name of the teacher of each sample that has one, by sample id. Local."""
    if tuple(names) == (ONLY,):
        return {sample.sample_id: ONLY for sample in samples}
    of_prompt = {
        index: teacher_name(prompts[index].metadata, names, key)
        for index in {sample.prompt_index for sample in samples}
    }
    found = {sample.sample_id: of_prompt[sample.prompt_index] for sample in samples}
    return {sample_id: name for sample_id, name in found.items() if name is not None}


def with_teachers(
    teachers: Mapping[str, TrainEngine],
    of_sample: Mapping[int, str],
    full: bool,
    batches: list[MicroBatch],
) -> list[MicroBatch]:
    """Return micro-batches with what their teachers say of the trained tokens.

    The column ``teacher_logprobs`` is NaN where a sample has no teacher. With ``full`` there are
    the columns of ``distillation/heads.py`` instead: rows of the width of the widest teacher, and
    the number of the teacher, -1 for none. Micro-batches off the last stage are as before.

    Every teacher passes over all micro-batches, because ranks that share its layers must make the
    same passes. Collective: the training grid.

    Args:
        teachers: The teachers by name, their parameters on the device.
        of_sample: Name of the teacher of each sample that has one.
        full: Whether the loss compares whole distributions.
        batches: Prepared micro-batches of one optimizer step.
    """
    width = max(engine.spec.hidden_size for engine in teachers.values()) if full else 0
    found = list(batches)
    for number, (name, engine) in enumerate(teachers.items()):
        for place, outputs in enumerate(engine.outputs(batches)):
            if outputs is None:
                continue
            micro, values = found[place], outputs[0]
            mine = _has(micro, of_sample, name)
            if full:
                found[place] = _with_states(micro, values, mine, number, width)
            else:
                nothing = torch.full_like(values, math.nan)
                other = micro.columns.get("teacher_logprobs", nothing)
                values = torch.where(mine, values, other)
                found[place] = micro.with_column("teacher_logprobs", values)
    return found


def _has(micro: MicroBatch, of_sample: Mapping[int, str], name: str) -> torch.Tensor:
    """Return [N] bool: whether the sample of a token has this teacher."""
    has = [of_sample.get(sample_id) == name for sample_id in micro.sample_ids]
    return torch.tensor(has, dtype=torch.bool, device=micro.sequence_of.device)[micro.sequence_of]


def _with_states(
    micro: MicroBatch, states: torch.Tensor, mine: torch.Tensor, number: int, width: int
) -> MicroBatch:
    """Put the hidden states of one teacher, [N, k], at the tokens that are its own."""
    blank = states.new_zeros((states.size(0), width))
    rows = micro.columns.get(STATES, blank).clone()
    rows[:, : states.size(1)] = torch.where(mine[:, None], states, rows[:, : states.size(1)])
    owner = micro.columns.get(OWNER, torch.full_like(micro.sequence_of, -1))
    owner = owner.masked_fill(mine, number)
    return micro.with_states(STATES, rows).with_states(OWNER, owner)


def check_teachers(
    config: RLRunConfig, prompts: PromptDataset, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Check the teachers against prompts and tokenizer; return what to say of them. Local.

    Raises:
        UsageError: A row names a teacher that the run does not have, a teacher has no row, or it
            has another tokenizer than the policy.
    """
    teachers = config.distillation.teachers
    if not teachers or config.benchmark.active:
        return []
    for directory in teachers.values():
        trust = config.model.trust_remote_code
        own = read_tokenizer(directory, TEACHER_FLAG, trust_remote_code=trust)
        check_tokenizer(tokenizer, own, directory)
    return [check_rows(prompts, [*teachers], config.distillation.teacher_key)]


def check_rows(prompts: PromptDataset, names: Sequence[str], key: str) -> str:
    """Check that rows of the data name teachers of the run; return how many each has. Local.

    Raises:
        UsageError: A row names another one, or a teacher has no row.
    """
    counts = Counter(teacher_name(row.metadata, names, key) for row in prompts.questions())
    if unknown := [name for name in counts if name is not None and name not in names]:
        raise UsageError(
            f"--prompt-data {prompts.source}: {counts[unknown[0]]} rows have the {key} "
            f"{unknown[0]!r}, and {TEACHER_FLAG} names {', '.join(names)}; add that teacher, or "
            "take the field from the rows, which are then trained on by their rewards alone"
        )
    if idle := [name for name in names if not counts[name]]:
        raise UsageError(
            f"{TEACHER_FLAG}: no row of --prompt-data {prompts.source} has {key} = {idle[0]!r}, so "
            "that teacher would teach nothing; remove it, or name it in the data "
            "(--teacher-key names the field)"
        )
    told = [f"{name or 'one teacher'} for {counts[name]} rows" for name in names]
    if counts[None]:
        told.append(f"none for {counts[None]} rows")
    return "teachers: " + ", ".join(told)


def check_tokenizer(
    policy: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, directory: str
) -> None:
    """Check that a teacher reads the policy's token ids as the same text. Local.

    Raises:
        UsageError: A token of the policy has another id, or is missing; names it.
    """
    known: dict[str, int] = teacher.get_vocab()
    for token, number in sorted(policy.get_vocab().items(), key=lambda item: item[1]):
        if known.get(token) != number:
            there = known.get(token, "missing")
            raise UsageError(
                f"{TEACHER_FLAG} {directory}: its tokenizer is another one than the policy's: "
                f"token {token!r} is {number} in the policy's and {there} in the teacher's; a "
                "teacher scores the policy's token ids, so give a model of the same tokenizer"
            )
