"""Samples of one engine layout, and whether a token was drawn from given logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from support.rollout_worlds import TEMPERATURE, build_both, engine_job

from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.rollout.engine import GenerationRequest, SamplingSettings, request_seed

NUM_SEQUENCES = 256
SAMPLING = SamplingSettings(TEMPERATURE, max_response_tokens=24, stop_token_ids=(1,))
_SEEDS = 2**31  # the sampler draws one seed below this for each token


def asked() -> list[GenerationRequest]:
    """Ragged prompts, each with the seed of its sample."""
    generator = torch.Generator().manual_seed(17)
    prompts = [
        torch.randint(5, 307, (2 + i % 9,), generator=generator).tolist()
        for i in range(NUM_SEQUENCES)
    ]
    return [GenerationRequest(i, tuple(p), request_seed(0, 1, i)) for i, p in enumerate(prompts)]


def sampling_world(world: World, model: str, engine_tp: int) -> list[tuple[int, ...]]:
    """Rank function: the tokens of all requests, dealt out to the engines in turns."""
    from mindspeed_rl.rl.build_models import build_engine, initialize_parallel

    job = engine_job(world, model, 2, engine_tp)
    initialize_parallel(job)
    both = build_both(job, build_engine(job, "policy", 1, TEMPERATURE))
    both.to_rollout(0)
    engine = job.plan.engine
    mine = asked()[engine.replica_of(world.rank) :: engine.num_replicas]
    completions = list(both.engine.generate(mine, SAMPLING, 0).values())
    parts: list[dict[int, tuple[int, ...]]] = [{}] * world.size
    own = {r.sample_id: c.token_ids for r, c in zip(mine, completions, strict=True)}
    dist.all_gather_object(parts, own)
    union = {sample: tokens for part in parts for sample, tokens in part.items()}
    return [union[i] for i in range(NUM_SEQUENCES)]


def reference_logits(folder: Path, samples: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """[response, vocabulary] fp32 logits at the temperature, by transformers, sample by sample."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = []
    for request, tokens in zip(asked(), samples, strict=True):
        ids = torch.tensor([*request.token_ids, *tokens])
        with torch.no_grad():
            rows.append(model(ids[None]).logits[0, len(request.token_ids) - 1 : -1] / TEMPERATURE)
    return rows


def wins_within(
    logits: torch.Tensor, request: GenerationRequest, tokens: torch.Tensor, gap: float
) -> torch.Tensor:
    """[response] whether each token has the largest perturbed logit when its own is raised by gap.

    The noise is vLLM's own: its operator, and the seeds that the request's generator gives, one
    for each token. Two tokens that win within a gap have perturbed logits that are not further
    apart than it.

    Args:
        logits: [response, vocabulary] before the noise.
        request: whose seed.
        tokens: [response] one candidate for each position.
        gap: in the units of the logits.
    """
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    generator = torch.Generator().manual_seed(request.seed)
    drawn = [torch.randint(0, _SEEDS, (1,), generator=generator) for _ in tokens]
    raised = logits.clone()
    raised[torch.arange(len(tokens)), tokens] += gap
    winners: torch.Tensor = torch.ops._C.fused_gumbel_argmax(raised, torch.cat(drawn))
    return winners == tokens
