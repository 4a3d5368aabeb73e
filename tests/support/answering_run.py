"""A run whose engine answers from a table; report, timer, logger, scoring, exchange are real."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from support.scoring import InlinePool

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.arguments import parse
from mindspeed_rl.core.layout import EngineLayout, ParallelLayout
from mindspeed_rl.core.stages import even_stages
from mindspeed_rl.core.types import Completion, Prompt
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.metrics.loggers import RunLogger
from mindspeed_rl.metrics.metric_set import MetricSet
from mindspeed_rl.metrics.rollout_dump import RolloutDump
from mindspeed_rl.metrics.timers import PhaseTimer
from mindspeed_rl.rl.assignment import EngineAssignment
from mindspeed_rl.rl.components import Components, PromptData, RunState, Telemetry
from mindspeed_rl.rl.rollout_worker import RolloutWorker
from mindspeed_rl.rl.scoring import RewardFunctions
from mindspeed_rl.rollout.engine import GenerationRequest, OnStep, SamplingSettings
from mindspeed_rl.rollout.step_loop import StepStats
from mindspeed_rl.samples.batching import BatchRules
from mindspeed_rl.samples.columns import response_columns
from mindspeed_rl.samples.device_cache import TensorCache
from mindspeed_rl.samples.store import SampleStore

END = 0


class Letters:
    """A tokenizer whose ids are code points."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(i) for i in ids if i != END)


class Clock:
    """Stands still until told to move."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Answers:
    """An engine that answers from a table, in two seconds."""

    def __init__(self, answers: dict[tuple[int, ...], tuple[str, str]], clock: Clock) -> None:
        self.answers = answers
        self.asked: list[list[GenerationRequest]] = []
        self.clock = clock
        self.stats = StepStats()
        self.max_num_seqs, self.weight_format = 8, ""

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        settings: SamplingSettings,
        version: int,
        on_step: OnStep | None = None,
        rebalancer: object | None = None,
    ) -> dict[int, Completion]:
        self.clock.now_s += 2.0
        self.stats.steps += 1
        self.asked.append(list(requests))
        found = [self.answers[r.token_ids] for r in requests]
        ids = [tuple(map(ord, text)) + (END,) * (why == "stop") for text, why in found]
        completions = {
            r.sample_id: Completion(i, (-0.5,) * len(i), why, version)
            for r, i, (_, why) in zip(requests, ids, found, strict=True)
        }
        if on_step is not None:
            on_step(completions)
        return completions


def make_run(
    output: Path,
    rows: Sequence[tuple[str, str, str]],
    rewards: Sequence[str] = ("math",),
    flags: Sequence[str] = (),
    world: World | None = None,
) -> Components:
    """A run whose held-out prompts are ``rows`` of response, finish reason and answer.

    Every rank of ``world``, by default one, has an engine of its own.
    """
    world = world or World(0, 1, 0, 1)
    argv = ["--output-dir", str(output), "--train-iters", "4", "--log-rollouts", "1", *flags]
    config = parse(RLRunConfig, argv, "test").config
    prompts = [Prompt(i, (i,), f"q{i}", answer) for i, (_, _, answer) in enumerate(rows)]
    clock = Clock()
    engine = Answers({(i,): (text, why) for i, (text, why, _) in enumerate(rows)}, clock)
    timer, tokenizer, data = PhaseTimer(clock=clock), cast(Any, Letters()), cast(Any, prompts)
    names = tuple(r.partition("=")[0] for r in rewards)
    worker = RolloutWorker(
        engine=cast(Any, engine),
        assignment=EngineAssignment(EngineLayout(world.size, 1), world.rank, limit=64),
        rewards=RewardFunctions(names, cast(Any, InlinePool(rewards)), tokenizer),
        cache=TensorCache(torch.device("cpu")),
        seed=config.train.seed,
        stop_token_ids=(END,),
        num_copies=1,
    )
    job = SimpleNamespace(
        config=config,
        world=world,
        log_rank0=lambda *lines: None,
        watchdog=SimpleNamespace(phase=lambda name: nullcontext()),
    )
    counts = SimpleNamespace(prompts=len(rows), group_size=1, samples=len(rows))
    sampler = SimpleNamespace(next=lambda count: list(range(count)))
    run = SimpleNamespace(
        job=job, config=config, phase=timer, reward_names=names, rollouts=worker,
        samples=_sample_store(world, prompts, worker.cache),
        plan=SimpleNamespace(engine=EngineLayout(world.size, 1), batch=counts),
        data=PromptData(tokenizer, data, {"": data}, cast(Any, sampler)),
        telemetry=Telemetry(
            timer=timer,
            profiler=cast(Any, None),
            ledger=cast(Any, SimpleNamespace(metrics=MetricSet)),
            logger=RunLogger(output, world.rank == 0),
            dump=RolloutDump(output / "rollouts.jsonl", 1, world.rank == 0),
        ),
        scheduler=SimpleNamespace(require=lambda phase, what: None),
    )  # fmt: skip
    return cast(Components, run)


def _sample_store(world: World, prompts: Sequence[Prompt], cache: TensorCache) -> SampleStore:
    """Of data-parallel ranks with an engine each."""
    return SampleStore(
        rank=world.rank,
        parallel=ParallelLayout.build(world=world.size, stages=even_stages(1)),
        engine=EngineLayout(world.size, 1),
        prompts=prompts,
        rules=BatchRules(dp=world.size, dp_rank=world.rank, micro_batch_size=1),
        samples_per_update=len(prompts),
        cache=cache,
        num_copies=1,
        stages=(0,),
        one_node=True,
        columns=response_columns(has_environment=False, experts=None),
        drop_truncated=False,
        group_along=lambda axis: None,
    )


def evaluation_world(
    world: World, output: str, sizes: Sequence[int]
) -> list[tuple[Any, list[int]]]:
    """Rank function: an evaluation of sets of some sizes, every other response right.

    Returns:
        Per size the result, and the prompts that this rank answered greedily.
    """
    from mindspeed_rl.rl.evaluate import evaluate

    found = []
    for size in sizes:
        rows = [(str(i), "stop", str(i) if i % 2 else "no") for i in range(size)]
        flags = ["--rl-eval-samples", "2", "--rl-eval-temperature", "0.5"]
        run = make_run(Path(output) / f"{size}", rows, ["math"], flags, world)
        result = evaluate(run, RunState(), run.data.held_out[""], 0)
        asked = cast(Answers, run.rollouts.engine).asked[0]
        found.append((result.metrics() | {"eval/time_s": 0.0}, [r.sample_id for r in asked]))
    return found
