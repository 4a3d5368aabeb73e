"""An RL run of one rank in this process whose model is a table, so that every number is known.

The policy says log p(token) = table[token], whatever stands before it. The engine samples from a
copy of the table that a weight update brings up to date. Everything between the two is the
product's: configuration, plan, exchange, advantages, packing, loss, phases.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from support.scoring import InlinePool, OneByOne
from support.table_engine import (
    STOP,
    VOCAB,
    CompareWeights,
    CopyWeights,
    TableEngine,
    first_table,
    response_of,
)

from mindspeed_rl.attention.rows import make_packed_row
from mindspeed_rl.building.models import Models
from mindspeed_rl.colocation.memory_ledger import MemoryLedger
from mindspeed_rl.colocation.scheduler import DeviceScheduler
from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.memory import MemoryOwner, OffloadMode
from mindspeed_rl.core.types import Completion, Prompt
from mindspeed_rl.generation.scoring import RewardFunctions
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.launch.job import Job
from mindspeed_rl.metrics.jsonl import JsonlWriter
from mindspeed_rl.metrics.loggers import RunLogger
from mindspeed_rl.metrics.metric_set import Max, Mean, MetricSet, Total
from mindspeed_rl.metrics.profiler import StepProfiler
from mindspeed_rl.metrics.timers import PhaseTimer
from mindspeed_rl.planning.run_plan import plan_rl
from mindspeed_rl.platforms.cpu import CpuPlatform
from mindspeed_rl.rewards.types import RewardRequest, RewardResult
from mindspeed_rl.rl.advantages import compute_advantages
from mindspeed_rl.rl.batches import StepBatches, build_batches
from mindspeed_rl.rl.build import build_rollout_worker, build_sample_store
from mindspeed_rl.rl.components import Components, PromptData, RunState, Telemetry
from mindspeed_rl.rl.logprobs import compute_logprobs
from mindspeed_rl.rl.rollouts import RolloutBatch, generate_rollouts
from mindspeed_rl.rl.sync import sync_weights
from mindspeed_rl.rl.update import update
from mindspeed_rl.rollout.requests import GenerationRequest, SamplingSettings
from mindspeed_rl.samples.columns import LOSS_MASK, ROLLOUT_LOGPROBS, TOKEN_IDS
from mindspeed_rl.samples.device_cache import TensorCache
from mindspeed_rl.samples.packing import MicroBatch
from mindspeed_rl.samples.rollout_info import RolloutInfo
from mindspeed_rl.samples.store import ResponseTensors
from mindspeed_rl.trainer.heads import policy_inputs, value_inputs
from mindspeed_rl.trainer.train_engine import UpdateStats, collect_metrics
from mindspeed_rl.weights.sync import WeightSync

NUM_PROMPTS = 12
# of the six samples of a step: rewards that differ in both groups, and lengths
REWARDS: dict[int, float | None] = dict(enumerate((1.0, 0.0, 0.0, 1.0, 1.0, 0.5)))
COUNTS = [len(response_of(i)) for i in range(6)]


class Prompts(list[Prompt]):
    """A data set that is a list."""

    fingerprint = ""

    def token_ids(self, index: int) -> tuple[int, ...]:
        return self[index].token_ids


PROMPTS = Prompts(
    Prompt(i, tuple([2] * (1 + i % 3)), f"prompt {i}", chr(i)) for i in range(NUM_PROMPTS)
)
HF_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": STOP,
}


class TablePolicy:
    """The training engine of a table; plain gradient descent with a learning rate of 1.

    Attributes:
        table: [VOCAB], log p of each token.
        num_passes: forward passes without gradient.
        num_writes: times that it was told of a write.
        gradients: of every update.
    """

    is_last_stage = is_metrics_rank = True

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table.clone().requires_grad_()
        self.num_passes = self.num_writes = 0
        self.gradients: list[torch.Tensor] = []

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """The table."""
        return {"table": self.table}

    def reload_master_weights(self) -> None:
        """Counted."""
        self.num_writes += 1

    def prepare(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Nothing to move."""
        return [replace(b, attention=make_packed_row(b.lengths, b.positions)) for b in batches]

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor | None]:
        """Of the trained tokens."""
        self.num_passes += 1
        return [self._logprobs(b).detach() for b in batches]

    def outputs(self, batches: Sequence[MicroBatch]) -> list[tuple[torch.Tensor, ...] | None]:
        """Log-probs alone."""
        return [None if found is None else (found,) for found in self.logprobs(batches)]

    def _logprobs(self, micro: MicroBatch) -> torch.Tensor:
        return self.table[micro.targets[micro.loss_mask]]

    def forward_backward(self, batches: Sequence[MicroBatch], loss: Any) -> MetricSet:
        """The gradient of the summed losses, and the metrics of all micro-batches."""
        self.table.grad = None
        outputs = [loss(self._loss_inputs(micro)) for micro in batches]
        for output in outputs:
            output.loss.backward()
        return collect_metrics(outputs)

    def _loss_inputs(self, micro: MicroBatch) -> Any:
        logprobs = self._logprobs(micro)
        entropy = torch.zeros_like(logprobs)
        return policy_inputs(micro, (logprobs, entropy), partial(self.all_reduce_row, micro))

    def all_reduce_row(self, micro: MicroBatch, values: torch.Tensor) -> torch.Tensor:
        """One rank."""
        return values

    def all_reduce_dp_cp(self, values: torch.Tensor) -> torch.Tensor:
        """One rank."""
        return values

    def gradient_norm(self) -> float:
        """Of the last backward pass."""
        assert self.table.grad is not None
        return float(self.table.grad.norm())

    def discard_gradients(self) -> None:
        """There is nothing to drop."""

    def step(self) -> UpdateStats:
        """table -= gradient."""
        assert self.table.grad is not None
        self.gradients.append(self.table.grad.clone())
        with torch.no_grad():
            self.table -= self.table.grad
        return UpdateStats(float(self.table.grad.norm()), 1.0)


class TableCritic(TablePolicy):
    """A critic whose value before a token is a table of that token."""

    def values(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor | None]:
        """Before the trained tokens."""
        return self.logprobs(batches)

    def _loss_inputs(self, micro: MicroBatch) -> Any:
        return value_inputs(micro, (self._logprobs(micro),), partial(self.all_reduce_row, micro))


class TableScorer(TablePolicy):
    """A reward model whose value at a token is a table of that token."""

    def values(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor | None]:
        """At the places of interest."""
        return [self.table[b.token_ids[b.loss_mask]].detach() for b in batches]


class TableRewards(OneByOne):
    """Gives every sample what ``judge`` says of it; ``None`` abstains.

    Attributes:
        requests: of the last scoring.
        num_scored: samples of all scorings.
    """

    def __init__(self, judge: Callable[[RewardRequest], float | None]) -> None:
        self.judge, self.num_scored = judge, 0
        self.requests: list[RewardRequest] = []

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """The part is called ``format``."""
        self.requests = list(requests)
        self.num_scored += len(requests)
        results = []
        for request in requests:
            reward = self.judge(request)
            parts = {} if reward is None else {"format": reward}
            results.append(RewardResult(request.sample_id, reward, parts, "ok", ""))
        return results

    def close(self) -> None:
        """Nothing to stop."""


class Characters:
    """A tokenizer: token ``i`` is the character ``i``; the stop token is no text."""

    eos_token = "<stop>"
    eos_token_id = STOP

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """One character per token."""
        return "".join(chr(i) for i in ids if i != STOP or not skip_special_tokens)


@dataclass
class TableRun:
    """A run and its state, with the verbs of a step as methods.

    Attributes:
        parts: of the run.
        state: what changes from step to step.
    """

    parts: Components
    state: RunState

    @property
    def config(self) -> RLRunConfig:
        return self.parts.config

    @property
    def policy(self) -> TablePolicy:
        return cast(TablePolicy, self.parts.models.policy)

    @property
    def reference(self) -> TablePolicy:
        return cast(TablePolicy, self.parts.models.reference)

    @property
    def critic(self) -> TableCritic:
        return cast(TableCritic, self.parts.models.critic)

    @property
    def engine(self) -> TableEngine:
        return cast(TableEngine, self.parts.rollouts.engine)

    @property
    def pool(self) -> TableRewards:
        return cast(TableRewards, self.parts.rollouts.rewards.pool)

    def set_models(self, **models: Any) -> None:
        """Other models in place of some."""
        self.parts = replace(self.parts, models=replace(self.parts.models, **models))

    def set_rollouts(self, **fields: Any) -> None:
        """Other parts of the rollout worker in place of some."""
        self.parts = replace(self.parts, rollouts=replace(self.parts.rollouts, **fields))

    def set_pool(self, pool: Any) -> None:
        """Other rewards."""
        self.set_rollouts(rewards=replace(self.parts.rollouts.rewards, pool=pool))

    def set_engine(self, engine: Any) -> None:
        """Another engine."""
        self.parts.scheduler._engine = engine
        self.set_rollouts(engine=engine)

    def set_cache(self, cache: TensorCache) -> None:
        """Tokens are kept elsewhere from now on."""
        self.parts = replace(self.parts, samples=replace(self.parts.samples, cache=cache))
        self.set_rollouts(cache=cache)

    def to_rollout(self) -> None:
        """Synchronise the weights and hand the device to the engine."""
        self.parts.scheduler.to_sync()
        sync_weights(self.parts, self.state.version)
        self.parts.scheduler.to_rollout()

    def to_train(self) -> None:
        self.parts.scheduler.to_train()

    def generate(self, step: int = 1) -> RolloutBatch:
        """The rollouts of a step, and back to training."""
        self.to_rollout()
        self.state.step = step
        rollouts = generate_rollouts(self.parts, self.state)
        self.to_train()
        return rollouts

    def build(self, samples: Sequence[RolloutInfo]) -> StepBatches:
        return build_batches(self.parts, samples)

    def logprobs(self, batches: StepBatches, samples: Sequence[RolloutInfo]) -> StepBatches:
        return compute_logprobs(self.parts, self.state, batches, samples)

    def advantages(
        self,
        batches: StepBatches,
        samples: Sequence[RolloutInfo],
        step: int = 1,
        greedy: Sequence[float] | None = None,
    ) -> StepBatches:
        self.state.step = step
        return compute_advantages(self.parts, self.state, batches, samples, greedy)

    def prepared(
        self, samples: Sequence[RolloutInfo], step: int = 1, greedy: Sequence[float] | None = None
    ) -> StepBatches:
        """Everything up to the update."""
        return self.advantages(self.logprobs(self.build(samples), samples), samples, step, greedy)

    def batches(self, step: int = 1) -> StepBatches:
        """Of new rollouts, before the update."""
        rollouts = self.generate(step)
        return self.prepared(rollouts.samples, step, rollouts.greedy_rewards)

    def update(self, batches: StepBatches, step: int = 1) -> MetricSet:
        self.state.step = step
        return update(self.parts, self.state, batches)

    def train_on(self, rollouts: RolloutBatch, step: int = 1) -> MetricSet:
        """The metrics of a step whose rollouts are there."""
        batches = self.prepared(rollouts.samples, step, rollouts.greedy_rewards)
        return self.update(batches).merge(rollouts.metrics)

    def hold(
        self, samples: list[RolloutInfo], responses: Sequence[ResponseTensors]
    ) -> list[RolloutInfo]:
        """The run keeps what these samples say."""
        self.set_cache(TensorCache(torch.device("cpu")))
        self.parts.samples.keep_responses(responses, samples)
        return samples

    def said(self, samples: Sequence[RolloutInfo]) -> list[ResponseTensors]:
        """What is kept of samples."""
        return self.parts.samples.fetch(samples)

    def moves_of(self, owners: Iterable[MemoryOwner]) -> list[str]:
        """From now on memory of ``owners`` is away but for its use; here its moves are noted."""
        moves: list[str] = []

        def group(owner: MemoryOwner) -> Any:
            return SimpleNamespace(
                restore=lambda: moves.append(f"{owner} here"),
                release=lambda: moves.append(f"{owner} away"),
            )

        groups = {owner: group(owner) for owner in owners}
        scheduler = self.parts.scheduler
        scheduler._sharing = replace(scheduler._sharing, groups=groups, mode=OffloadMode.ALL)
        return moves


def value(metrics: MetricSet, name: str) -> float:
    """A metric of the only rank."""
    metric = metrics[name]
    assert isinstance(metric, (Mean, Max, Total))
    return metric.value


def by_sample(batches: StepBatches, column: str, count: int = 6) -> list[list[float]]:
    """A column of batches of so many samples, token by token."""
    found: dict[int, list[float]] = {i: [] for i in range(count)}
    for m in batches.micro_batches:
        tokens = m.column(column).tolist()
        for owner, token in zip(m.sequence_of.tolist(), tokens, strict=True):
            found[m.sample_ids[owner]].append(token)
    return [found[i] for i in range(count)]


def response(
    ids: Sequence[int], logprobs: Sequence[float] | torch.Tensor, mask: Sequence[bool] | None = None
) -> ResponseTensors:
    """The columns of one response; with ``mask`` those of a conversation."""
    columns = {
        TOKEN_IDS.name: torch.tensor(list(ids), dtype=torch.int64),
        ROLLOUT_LOGPROBS.name: torch.as_tensor(logprobs, dtype=torch.float32),
    }
    if mask is not None:
        columns[LOSS_MASK.name] = torch.tensor(list(mask), dtype=torch.bool)
    return columns


def table_config(folder: Path, flags: str) -> RLRunConfig:
    """Flags of a run of 2 prompts x 3 samples per step whose inputs, made here, are empty."""
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    for name in ("model.safetensors", "tokenizer.json", "rl.jsonl"):
        (folder / name).touch()
    defaults = (
        f"--hf-checkpoint {folder} --prompt-data {folder}/rl.jsonl --train-iters 4 --platform cpu "
        "--grpo-prompts-per-step 2 --grpo-group-size 3 --micro-batch-size 2 "
        "--max-tokens-per-micro-batch 0 --max-prompt-length 8 "
        f"--rollout-max-response-length 8 --reward-function format --output-dir {folder}/out "
    )
    return parse(RLRunConfig, (defaults + flags).split(), "test").config


def make_run(
    folder: Path,
    flags: str = "",
    rewards: Mapping[int, float | None] | None = None,
    *,
    world: World | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> TableRun:
    """A run of 2 prompts x 3 samples per step in ``folder``, before its first weight update.

    Every rank of ``world``, by default one, has an engine of its own.
    """
    config, world = table_config(folder, flags), world or World(0, 1, 0, 1)
    plan = plan_rl(config, world.size)
    nobody = cast(Any, SimpleNamespace(phase=lambda *_: nullcontext()))  # watches the phases
    minutes = config.parallel.distributed_timeout_minutes
    job = Job(config, plan, world, CpuPlatform(), nobody, (), minutes)
    policy, engine = TablePolicy(first_table()), TableEngine()
    output = Path(config.logging.output_dir)
    profiler = StepProfiler(config.profiler, job.platform, job.world.rank, output)
    timer = PhaseTimer(job.platform, clock, mark=profiler.phase)
    scheduler = DeviceScheduler(cast(Any, engine), timer)
    scheduler.to_train()
    tokenizer, cache = cast(Any, Characters()), TensorCache(job.platform.device)
    known = rewards or {}
    store = build_sample_store(job, cast(Any, PROMPTS), cache)
    prompts, pool = cast(Any, PROMPTS), TableRewards(lambda r: known.get(r.sample_id, 0.0))
    in_conversation = bool(config.partner)
    functions = RewardFunctions(("format",), cast(Any, pool), tokenizer, in_conversation)
    parts = Components(
        job=job,
        data=PromptData(tokenizer, prompts, {}),
        models=Models(
            policy=cast(Any, policy),
            reference=cast(Any, TablePolicy(first_table())) if config.rl.grpo_kl_beta else None,
            critic=cast(Any, TableCritic(torch.zeros(VOCAB))) if config.has_critic else None,
        ),
        rollouts=build_rollout_worker(job, cast(Any, engine), functions, None, store, tokenizer),
        samples=store,
        scheduler=scheduler,
        weight_sync=WeightSync(
            cast(Any, CopyWeights()),
            cast(Any, CompareWeights()),
            cast(Any, lambda: {"table": policy.table.detach()}),
            config.rollout.reshard_verify_interval,
            gather_versions=lambda version: [version],
            log=job.log_rank0,
        ),
        telemetry=Telemetry(
            timer=timer,
            profiler=profiler,
            ledger=MemoryLedger({}, job.platform.memory, None, 0),
            logger=RunLogger(output, world.rank == 0),
            dump=JsonlWriter(output / "rollouts.jsonl"),
            evaluations=JsonlWriter(output / "evaluations.jsonl"),
        ),
    )
    return TableRun(parts, RunState.at_start(config, prompts))


class Answers(TableEngine):
    """An engine that answers every prompt from a table, in two seconds of its own clock."""

    def __init__(self, rows: Sequence[tuple[str, str, str]]) -> None:
        super().__init__()
        self.rows, self.now_s = rows, 100.0

    def clock(self) -> float:
        """Stands still while nothing is generated."""
        return self.now_s

    def generate(
        self, requests: Sequence[GenerationRequest], *arguments: Any, **options: Any
    ) -> dict[int, Completion]:
        self.now_s += 2.0
        self.stats.steps += 1
        self.stats.prompt_tokens += sum(len(r.token_ids) for r in requests)
        return super().generate(requests, *arguments, **options)

    def completion(
        self, request: GenerationRequest, settings: SamplingSettings, version: int
    ) -> Completion:
        text, why, _ = self.rows[request.token_ids[0]]
        ids = (*map(ord, text), *((STOP,) if why == "stop" else ()))
        return Completion(ids, (-0.5,) * len(ids), why, version)


def state_at(step: int = 0) -> RunState:
    """The state of a run whose every draw of prompts starts at the first one."""
    sampler = SimpleNamespace(next=lambda count: list(range(count)), epochs=0.75)
    return RunState(cast(Any, sampler), step)


def answering_run(
    output: Path,
    rows: Sequence[tuple[str, str, str]],
    rewards: Sequence[str] = ("math",),
    flags: str = "",
    world: World | None = None,
) -> Components:
    """A run in its rollouts, with prompts and answers of its own and the rewards of the product.

    Its prompts, held-out ones as well, are ``rows`` of response, finish reason and answer; a step
    has each of them once, in order.
    """
    engine, folder = Answers(rows), output / "inputs"
    folder.mkdir(parents=True, exist_ok=True)
    defaults = (
        f"--output-dir {output} --log-rollouts 1 --rollout-max-response-length 48 "
        "--rl-advantage-estimator reinforce_plus_plus --grpo-group-size 1 --micro-batch-size 1 "
        f"--grpo-prompts-per-step {len(rows)} "
    )
    run = make_run(folder, defaults + flags, world=world, clock=engine.clock)
    run.set_engine(engine)
    own, names = run.parts.rollouts.rewards, tuple(r.partition("=")[0] for r in rewards)
    run.set_rollouts(rewards=replace(own, names=names, pool=InlinePool(rewards)))
    prompts = cast(Any, Prompts(Prompt(i, (i,), f"q{i}", row[2]) for i, row in enumerate(rows)))
    data = replace(run.parts.data, train=prompts, held_out={"": prompts})
    store = replace(run.parts.samples, prompt_tokens=prompts.token_ids)
    run.parts = replace(run.parts, data=data, samples=store)
    run.to_rollout()
    return run.parts
