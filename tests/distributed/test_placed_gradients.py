"""What training learns does not depend on where samples were made, moved, packed (design 10).

Twelve samples of two steps, half on engines that do not train on them, in two optimizer steps,
balanced and packed, against one sample per micro-batch on every rank. What was moved is not fetched
once more for the logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import pytest
from support.spawn import run_ranks

from mindspeed_rl.bootstrap import World

if TYPE_CHECKING:
    from mindspeed_rl.orchestration.rl_job import RLJob
    from mindspeed_rl.orchestration.rl_samples import Placed, Response

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LENGTHS = (9, 3, 1, 20, 14, 2, 11, 17, 5, 30, 8, 6)
CARRIED = (0, 1, 2)  # of an earlier step and earlier weights
SHAPES = ((1, 1, 1, False), (1, 2, 1, False), (2, 1, 2, True))
PROMPTS = tuple(tuple(range(5, 5 + n)) for n in (2, 7, 1, 12))
PER_UPDATE = 6


def compare_fetched(run: RLJob, placed: Placed, said: Sequence[Response]) -> None:
    """Rank 0 gets all samples; those that it trains on are not sent to it again."""
    import torch
    import torch.distributed as dist

    from mindspeed_rl.orchestration.rl_samples import fetch

    lone = run.plan.parallel.dp == 1
    for known, collectives in ((None, 1), (placed, int(not lone))):
        with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as wire:
            found = fetch(run, placed.samples, known)
        assert wire.call_count == collectives
        for response, wanted in zip(found, said if run.rank == 0 else [], strict=True):
            assert torch.equal(response.token_ids, wanted.token_ids)
            assert torch.equal(response.logprobs, wanted.logprobs)


def gradients_world(world: World, model: str) -> dict[str, list[dict[str, float]]] | None:
    """Rank function: |g - g_ref| / |g_ref| of every weight, by layout and optimizer step."""
    import torch
    from support.training_worlds import make_job

    from mindspeed_rl.algorithms.types import Denominators
    from mindspeed_rl.data.packing import pack
    from mindspeed_rl.experience.samples import Sample, SampleKey
    from mindspeed_rl.experience.tensor_cache import TensorCache
    from mindspeed_rl.observability.metrics import Max
    from mindspeed_rl.orchestration import rl_samples, selftest
    from mindspeed_rl.orchestration.selftest import Case, Layout, relative_errors
    from mindspeed_rl.parallel.layout import EngineLayout

    generator = torch.Generator().manual_seed(0)
    said = [
        rl_samples.Response(
            torch.randint(5, selftest.VOCAB_SIZE, (n,), generator=generator),
            0.1 * torch.randn(n, generator=generator) - 5.7,
        )
        for n in LENGTHS
    ]
    table = []
    for i, n in enumerate(LENGTHS):
        step, version = (1, 3) if i in CARRIED else (2, 4)
        key = SampleKey(step, i)
        table.append(Sample(i, i // 3, n, n, True, version, i * 5 % 4, 0.0, key=key))
    counts = [
        Denominators.of(LENGTHS[start : start + PER_UPDATE])
        for start in range(0, len(table), PER_UPDATE)
    ]

    def gradients(models: Any, batches: Any, update: int) -> Any:
        marked = []
        for b in batches:
            places = b.batch.positions[b.batch.loss_mask].float()
            of_sample = torch.tensor([0.2 + 0.3 * (i % 5) - i % 2 for i in b.batch.sample_ids])
            old = b.batch.rollout_logprobs + 0.05 * places.sin()
            b = replace(b, old_logprobs=old, ref_logprobs=b.batch.rollout_logprobs)
            marked.append(b.with_advantages(of_sample[b.batch.sequence_of]))
        loss = selftest.make_loss(Case("ppo", "token-mean"), counts[update])
        models.policy.forward_backward(marked, loss)
        return models.policy_gradients()

    def placed_gradients(models: Any, nodes: int) -> list[Any]:
        """Of both optimizer steps, after every rank has stored what its engine said.

        Within one node all samples take one leg; over several each axis of the grid has its own.
        """
        cache = TensorCache(torch.device("cpu"))
        for step, samples in ((1, table[:3]), (2, table[3:])):
            cache.begin_step(step, [table[i].key for i in CARRIED])
            mine = [s for s in samples if s.group == world.rank]
            rl_samples.store_responses(cache, [said[s.sample_id] for s in mine], mine)
        plan = SimpleNamespace(
            engine=EngineLayout(world.size, 1),
            parallel=models.job.plan.parallel,
            spec=models.job.plan.spec,
            batch=SimpleNamespace(samples_per_update=PER_UPDATE),
        )
        run = SimpleNamespace(
            job=replace(models.job, world=replace(world, local_size=world.size // nodes)),
            config=models.job.config, plan=plan, rank=world.rank,
            environment=None, cache=cache,
            prompts=[SimpleNamespace(token_ids=ids) for ids in PROMPTS],
        )  # fmt: skip
        placed = rl_samples.place(cast(Any, run), table)
        rows = [p.num_micro_batches * plan.parallel.dp for p in placed.plans]
        assert max(rows) < PER_UPDATE, "several samples share a row"
        taken = cast(Max, placed.metrics["exchange/collectives"])
        legs[nodes] = legs.get(nodes, 0) + int(taken.value)
        compare_fetched(cast(Any, run), placed, said)
        packed = rl_samples.pack_placed(cast(Any, run), placed, models.policy)
        return [gradients(models, batches, update) for update, batches in enumerate(packed)]

    def gradients_alone(models: Any) -> list[Any]:
        """Every rank trains on every sample, one at a time."""
        prompts = [torch.tensor(PROMPTS[s.prompt_index]) for s in table]
        rows = rl_samples.as_train_samples(table, prompts, said)
        result = []
        for update, start in enumerate(range(0, len(rows), PER_UPDATE)):
            alone = [pack([row], row.length) for row in rows[start : start + PER_UPDATE]]
            found = gradients(models, models.policy.prepare(alone), update)
            result.append({name: g / world.size for name, g in found.items()})
        return result

    job = make_job(world, model, ["--max-tokens-per-micro-batch", "48"])
    result: dict[str, list[dict[str, float]]] = {}
    legs: dict[int, int] = {}
    wanted: list[Any] = []
    for shape in SHAPES:
        with selftest.in_layout(job, Layout(*shape)) as models:
            wanted = wanted or gradients_alone(models)  # the first layout does not cut the model
            found = [*placed_gradients(models, 1), *placed_gradients(models, 2)]
        result[Layout(*shape).name(world.size)] = [
            relative_errors(f, w) for f, w in zip(found, 2 * wanted, strict=True)
        ]
    assert legs[2] > legs[1], "the second way must have been another"
    return result if world.rank == 0 else None


def test_they_are_those_of_one_rank_without_packing(tmp_path: Path) -> None:
    from make_tiny_model import write_tiny_model

    from mindspeed_rl.orchestration import selftest

    model = write_tiny_model(
        tmp_path / "model" / "any",
        family="llama",
        vocab_size=selftest.VOCAB_SIZE,
        num_layers=2,
        num_heads=selftest.NUM_HEADS,
        num_kv_heads=selftest.NUM_HEADS,
    )
    found = run_ranks(gradients_world, 4, work_dir=tmp_path, args=(str(model),))[0]
    assert len(found) == len(SHAPES)
    for (tp, _, cp, _), (layout, updates) in zip(SHAPES, found.items(), strict=True):
        assert len(updates) == 4, "two optimizer steps, on one node and on two"
        for errors in updates:
            assert len(errors) > 10
            worst = max(errors, key=lambda name: errors[name])
            assert errors[worst] <= (2e-5 if tp * cp > 1 else 1e-6), (layout, worst, errors[worst])
