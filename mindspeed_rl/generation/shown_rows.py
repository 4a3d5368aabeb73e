"""Rows of ``rollouts.jsonl`` and ``evaluations.jsonl``: responses for people to read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mindspeed_rl.core.types import Prompt, Rollout
from mindspeed_rl.generation.rollout_worker import GenerationResult
from mindspeed_rl.parallel.small_collectives import gather_objects
from mindspeed_rl.samples.columns import LOSS_MASK, ROLLOUT_LOGPROBS, TOKEN_IDS
from mindspeed_rl.samples.rollout_info import RolloutInfo
from mindspeed_rl.samples.shown_tokens import ShownToken

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

MOST_PIECES = 512
"""Tokens of a response whose text and mismatch a row has one by one."""
_DIGITS = 4  # of log-prob differences and advantages


def training_row(
    sample: RolloutInfo,
    prompt: Prompt,
    response: Mapping[str, torch.Tensor],
    values: Mapping[int, ShownToken],
    names: Sequence[str],
    group_size: int,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Return the row of a training sample. Local.

    Args:
        sample: Row of the sample table.
        prompt: Its prompt.
        response: Its tokens and the engine's log-probs, [n]; in conversations the loss mask, too.
        values: What training computed of its tokens, by position in the sequence; empty for a
            sample that was not trained on.
        names: Names of the parts of the reward.
        group_size: Samples of a prompt.
        tokenizer: Tokenizer of the run.
    """
    ids = response[TOKEN_IDS.name].tolist()
    mask = response.get(LOSS_MASK.name)
    known = [values.get(len(prompt.token_ids) + i) for i in range(len(ids))]
    advantages = [value.advantage for value in known if value is not None]
    engine = response[ROLLOUT_LOGPROBS.name].tolist()
    pairs = list(zip(known, engine, strict=True))[:MOST_PIECES]
    mismatch = [None if value is None else _short(value.logprob - own) for value, own in pairs]
    row = _row(sample.reward, prompt, ids, sample.stopped, tokenizer) | {
        "sample_id": sample.sample_id,
        "group": sample.sample_id // group_size,
        "parts": dict(zip(names, sample.parts, strict=True)),
        "advantage": _short(math.fsum(advantages) / len(advantages)) if advantages else None,
    }
    if any(value is not None for value in mismatch):
        row["pieces"] = [str(tokenizer.decode([i])) for i in ids[:MOST_PIECES]]
        row["mismatch"] = mismatch
    if mask is not None:
        row |= _conversation(ids, mask.tolist(), tokenizer)
    return row


def evaluation_rows(
    found: Sequence[GenerationResult],
    name: str,
    count: int,
    per_prompt: int,
    tokenizer: PreTrainedTokenizerBase,
    leads_engine: bool,
) -> list[dict[str, Any]]:
    """Return the rows of ``count`` prompts of an evaluation, on every rank. Collective: the world.

    Args:
        found: Results of the greedy pass and the sampled one, if there is one.
        name: Name of the set; empty for that of ``--eval-prompt-data``.
        count: Prompts that are shown, at even distances.
        per_prompt: Samples of a prompt in the sampled pass.
        tokenizer: Tokenizer of the run.
        leads_engine: Whether this rank has the rewards of its engine's samples.
    """
    num_prompts = len(found[0].samples)
    count = min(count, num_prompts)
    shown = {i * num_prompts // count for i in range(count)} if count else set()
    mine: list[dict[str, Any]] = []
    for number, result in enumerate(found):
        each = per_prompt if number else 1
        for rollout in result.rollouts if leads_engine and shown else ():
            if rollout.sample_id // each in shown:
                how = {"set": name or "eval", "kind": "sampled" if number else "greedy"}
                mine.append({**how, **_evaluated(rollout, each, tokenizer)})
    rows = [row for rows in gather_objects(mine) for row in rows]
    return sorted(rows, key=lambda row: (row["kind"], row["sample_id"]))


def _evaluated(
    rollout: Rollout, per_prompt: int, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    done = rollout.completion
    ids = list(done.token_ids)
    row = _row(rollout.reward, rollout.prompt, ids, not done.truncated, tokenizer) | {
        "sample_id": rollout.sample_id,
        "group": rollout.sample_id // per_prompt,
        "parts": dict(rollout.reward_parts),
    }
    if done.loss_mask is not None:
        row |= _conversation(ids, done.loss_mask, tokenizer)
    return row


def _row(
    reward: float | None,
    prompt: Prompt,
    ids: Sequence[int],
    stopped: bool,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Return what rows of both files have; ``prompt_text`` is what all of it begins with."""
    return {
        "reward": reward,  # None when the reward function abstained
        "prompt": prompt.text,
        "prompt_text": str(tokenizer.decode(list(prompt.token_ids))),
        "response": str(tokenizer.decode(list(ids))),
        "answer": prompt.answer,
        "length": len(ids),
        "finish_reason": "stop" if stopped else "length",
    }


def _conversation(
    ids: Sequence[int], mask: Sequence[bool], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return what a conversation has behind its prompt: who wrote what, and how many tokens."""
    spans = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    turns = [
        {"by": "model" if mine else "environment", "text": str(tokenizer.decode([i for i, _ in s]))}
        for mine, s in spans
    ]
    return {"turns": turns, "length": sum(mask), "read": len(mask) - sum(mask)}


def token_columns(
    prompt: Prompt, sample: RolloutInfo, response: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Return the ids of prompt and response, the engine's log-probs, and the weight versions."""
    tokens = {
        "prompt_ids": prompt.token_ids,
        "response_ids": response[TOKEN_IDS.name].tolist(),
        "logprobs": response[ROLLOUT_LOGPROBS.name].tolist(),
    }
    return tokens | ({"versions": sample.versions} if sample.earlier_versions else {})


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
