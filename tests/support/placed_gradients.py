"""Gradients of samples that were stored, moved, balanced and packed, and of each sample alone.

Twelve samples of two steps, half on engines that do not train on them, in two optimizer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.training_worlds import make_job

from mindspeed_rl.algorithms.losses import policy_loss
from mindspeed_rl.algorithms.types import Denominators
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.core.types import Prompt
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.metrics.metric_set import Max
from mindspeed_rl.rl.build_models import batch_rules
from mindspeed_rl.samples.columns import response_columns
from mindspeed_rl.samples.device_cache import TensorCache
from mindspeed_rl.samples.packing import MicroBatch, pack
from mindspeed_rl.samples.rollout_info import RolloutInfo, SampleKey
from mindspeed_rl.samples.store import PlacedSamples, ResponseTensors, SampleStore, as_train_samples
from mindspeed_rl.selftest import loss
from mindspeed_rl.trainer import parallel_state

LENGTHS = (9, 3, 1, 20, 14, 2, 11, 17, 5, 30, 8, 6)
CARRIED = (0, 1, 2)  # of an earlier step and earlier weights
SHAPES = ((1, 1, 1, False), (1, 2, 1, False), (2, 1, 2, True))
PROMPTS = tuple(tuple(range(5, 5 + n)) for n in (2, 7, 1, 12))
PER_UPDATE = 6


def compare_fetched(
    store: SampleStore, placed: PlacedSamples, said: Sequence[ResponseTensors]
) -> None:
    """Rank 0 gets all samples; those that it trains on are not sent to it again."""
    lone = store.parallel.dp == 1
    for known, collectives in ((None, 1), (placed, int(not lone))):
        with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as wire:
            found = store.fetch(placed.samples, known)
        assert wire.call_count == collectives
        for response, wanted in zip(found, said if store.rank == 0 else [], strict=True):
            assert all(torch.equal(response[name], wanted[name]) for name in wanted)


def what_is_said() -> list[ResponseTensors]:
    """Tokens of all samples, and what the engines say of them."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "token_ids": torch.randint(5, loss.VOCAB_SIZE, (n,), generator=generator),
            "rollout_logprobs": 0.1 * torch.randn(n, generator=generator) - 5.7,
        }
        for n in LENGTHS
    ]


def sample_table() -> list[RolloutInfo]:
    """Some of an earlier step; dealt to the engines in turns."""
    return [
        RolloutInfo(
            i, i // 3, n, n, True, 3 if i in CARRIED else 4, i * 5 % 4, 0.0,
            key=SampleKey(1 if i in CARRIED else 2, i),
        )
        for i, n in enumerate(LENGTHS)
    ]  # fmt: skip


def gradients(models: Any, batches: Sequence[MicroBatch], update: int) -> Any:
    """Of an optimizer step, on log-probs and advantages that are functions of token and sample."""
    marked = []
    for b in batches:
        places, known = b.positions[b.loss_mask].float(), b.columns.get("rollout_logprobs")
        if known is None:  # a stage between the first and the last
            known = torch.zeros_like(places)
        of_sample = torch.tensor([0.2 + 0.3 * (i % 5) - i % 2 for i in b.sample_ids])
        b = b.with_column("old_logprobs", known + 0.05 * places.sin())
        b = b.with_column("ref_logprobs", known)
        marked.append(b.with_column("advantages", of_sample[b.sequence_of]))
    counts = Denominators.of(LENGTHS[update * PER_UPDATE : (update + 1) * PER_UPDATE])
    case_loss = partial(
        policy_loss, settings=loss.Case("ppo", "token-mean").settings, denominators=counts
    )
    models.policy.forward_backward(marked, case_loss)
    return models.policy_gradients()


def placed_gradients(models: Any, nodes: int) -> tuple[list[Any], int]:
    """Of both optimizer steps, after every rank has stored what its engine said; and the hops.

    Within one node all samples take one hop; over several each axis of the grid has its own.
    """
    world, said, table = models.job.world, what_is_said(), sample_table()
    here = replace(models.job, world=replace(world, local_size=world.size // nodes))
    parallel = here.plan.parallel
    store = SampleStore(
        rank=world.rank,
        parallel=parallel,
        engine=EngineLayout(world.size, 1),
        prompts=[Prompt(i, ids, "", "") for i, ids in enumerate(PROMPTS)],
        rules=batch_rules(here),
        samples_per_update=PER_UPDATE,
        cache=TensorCache(torch.device("cpu")),
        num_copies=1,
        stages=tuple(sorted({0, parallel.pp - 1})),
        one_node=nodes == 1,
        columns=response_columns(has_environment=False, experts=None),
        drop_truncated=False,
        group_along=parallel_state.group_along,
    )
    for step, samples in ((1, table[:3]), (2, table[3:])):
        store.begin_step(step, [table[i] for i in CARRIED])
        store.keep_responses([said[s.sample_id] for s in samples], samples)
    placed = store.place(table)
    rows = [p.num_micro_batches * parallel.dp for p in placed.plans]
    assert max(rows) < PER_UPDATE, "several samples share a row"
    compare_fetched(store, placed, said)
    packed = [models.policy.prepare(micro) for micro in store.pack(placed)]
    found = [gradients(models, batches, update) for update, batches in enumerate(packed)]
    return found, int(cast(Max, placed.metrics["exchange/collectives"]).value)


def gradients_alone(models: Any) -> list[Any]:
    """Every rank trains on every sample, one at a time."""
    table = sample_table()
    prompts = [torch.tensor(PROMPTS[s.prompt_index]) for s in table]
    rows = as_train_samples(table, prompts, what_is_said())
    result = []
    for update, start in enumerate(range(0, len(rows), PER_UPDATE)):
        alone = [pack([row], row.length) for row in rows[start : start + PER_UPDATE]]
        found = gradients(models, models.policy.prepare(alone), update)
        result.append({name: g / models.job.world.size for name, g in found.items()})
    return result


def gradients_world(world: World, model: str) -> dict[str, list[dict[str, float]]] | None:
    """Rank function: |g - g_ref| / |g_ref| of every weight, by layout and optimizer step."""
    job = make_job(world, model, ["--max-tokens-per-micro-batch", "48"])
    result: dict[str, list[dict[str, float]]] = {}
    hops = [0, 0]
    wanted: list[Any] = []
    for shape in SHAPES:
        with loss.in_layout(job, loss.Layout(*shape)) as models:
            wanted = wanted or gradients_alone(models)  # the first layout does not cut the model
            (near, one), (far, two) = (placed_gradients(models, nodes) for nodes in (1, 2))
        hops = [hops[0] + one, hops[1] + two]
        result[loss.Layout(*shape).name(world.size)] = [
            loss.relative_errors(f, w) for f, w in zip(near + far, 2 * wanted, strict=True)
        ]
    assert hops[1] > hops[0], "the second way must have been another"
    return result if world.rank == 0 else None
