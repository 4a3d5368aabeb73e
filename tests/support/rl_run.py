"""An RL run of one rank in this process whose model is a table, so that every number is known.

The policy says log p(token) = table[token], whatever stands before it. The engine samples from a
copy of the table that a weight update brings up to date. Everything between the two is the
product's: configuration, plan, exchange, advantages, packing, loss, phases.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from support.scoring import OneByOne
from support.table_engine import STOP, VOCAB, CompareWeights, CopyWeights, TableEngine, first_table

from mindspeed_rl.algorithms.types import MeanTerm
from mindspeed_rl.arguments import parse
from mindspeed_rl.bootstrap import World
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.validate import check_rl
from mindspeed_rl.data.packing import MicroBatch
from mindspeed_rl.data.prompts import PromptDataset
from mindspeed_rl.data.sampler import PromptSampler
from mindspeed_rl.experience.samples import Sample
from mindspeed_rl.experience.tensor_cache import TensorCache
from mindspeed_rl.launch.job import Job
from mindspeed_rl.observability.loggers import RunLogger
from mindspeed_rl.observability.memory_ledger import MemoryLedger
from mindspeed_rl.observability.metrics import Max, Mean, Metric, MetricSet
from mindspeed_rl.observability.profiler import StepProfiler
from mindspeed_rl.observability.rollout_dump import RolloutDump
from mindspeed_rl.observability.timers import PhaseTimer
from mindspeed_rl.orchestration.rl_job import RLJob
from mindspeed_rl.orchestration.rl_samples import Response, fetch
from mindspeed_rl.phases.machine import Phases
from mindspeed_rl.phases.weight_sync import WeightSync
from mindspeed_rl.platforms.cpu import CpuPlatform
from mindspeed_rl.rewards.types import RewardRequest, RewardResult
from mindspeed_rl.trainer.packed_attention import make_packed_row
from mindspeed_rl.trainer.prepared import PreparedBatch
from mindspeed_rl.trainer.train_engine import UpdateStats
from mindspeed_rl.types import Prompt

NUM_PROMPTS = 12
PROMPTS = [Prompt(i, tuple([2] * (1 + i % 3)), f"prompt {i}", chr(i)) for i in range(NUM_PROMPTS)]
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

    is_last = reports = True

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table.clone().requires_grad_()
        self.num_passes = self.num_writes = 0
        self.gradients: list[torch.Tensor] = []

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """The table."""
        return {"table": self.table}

    def weights_changed(self) -> None:
        """Counted."""
        self.num_writes += 1

    def prepare(self, batches: Sequence[MicroBatch]) -> list[PreparedBatch]:
        """Nothing to move."""
        return [PreparedBatch(b, make_packed_row(b.lengths, b.positions)) for b in batches]

    def logprobs(self, batches: Sequence[PreparedBatch]) -> list[torch.Tensor | None]:
        """Of the trained tokens."""
        self.num_passes += 1
        return [self._logprobs(b).detach() for b in batches]

    def _logprobs(self, prepared: PreparedBatch) -> torch.Tensor:
        return self.table[prepared.batch.targets[prepared.batch.loss_mask]]

    def forward_backward(self, batches: Sequence[PreparedBatch], loss: Any) -> MetricSet:
        """The gradient of the summed losses, and the metrics of all micro-batches."""
        self.table.grad = None
        metrics = MetricSet()
        for prepared in batches:
            outputs = loss(self._loss_inputs(prepared))
            outputs.loss.backward()
            found: dict[str, Metric] = {
                name: Mean(float(term.sum), float(term.weight))
                if isinstance(term, MeanTerm)
                else Max(float(term.value))
                for name, term in outputs.terms.items()
            }
            metrics = metrics.merge(found)
        return metrics

    def _loss_inputs(self, prepared: PreparedBatch) -> Any:
        logprobs = self._logprobs(prepared)
        entropy = torch.zeros_like(logprobs)
        return prepared.loss_inputs(logprobs, entropy, self.sum_over_context)

    def sum_over_context(self, values: torch.Tensor) -> torch.Tensor:
        """One rank."""
        return values

    def sum_over_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """One rank."""
        return values

    def step(self) -> UpdateStats:
        """table -= gradient."""
        assert self.table.grad is not None
        self.gradients.append(self.table.grad.clone())
        with torch.no_grad():
            self.table -= self.table.grad
        return UpdateStats(float(self.table.grad.norm()), 1.0)


class TableCritic(TablePolicy):
    """A critic whose value before a token is a table of that token."""

    def values(self, batches: Sequence[PreparedBatch]) -> list[torch.Tensor | None]:
        """Before the trained tokens."""
        return self.logprobs(batches)

    def _loss_inputs(self, prepared: PreparedBatch) -> Any:
        return prepared.value_inputs(self._logprobs(prepared), self.sum_over_context)


class TableScorer(TablePolicy):
    """A reward model whose value at a token is a table of that token."""

    def values(self, batches: Sequence[PreparedBatch]) -> list[torch.Tensor | None]:
        """At the places of interest."""
        return [self.table[b.batch.token_ids[b.batch.loss_mask]].detach() for b in batches]


class TableRewards(OneByOne):
    """Gives sample ``i`` ``rewards[i]``, others ``otherwise``; ``None`` abstains."""

    def __init__(self, rewards: Mapping[int, float | None], otherwise: float = 0.0) -> None:
        self.rewards, self.otherwise = rewards, otherwise
        self.requests: list[RewardRequest] = []

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """As the table says; the part is called ``format``."""
        self.requests = list(requests)
        results = []
        for request in requests:
            reward = self.rewards.get(request.sample_id, self.otherwise)
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


class NoWatchdog:
    """Phases without a deadline."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Nothing watches."""
        yield


def make_run(
    folder: Path, flags: str = "", rewards: Mapping[int, float | None] | None = None
) -> RLJob:
    """A run of 2 prompts x 3 samples per step in ``folder``, before its first weight update."""
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    (folder / "rl.jsonl").touch()
    defaults = (
        f"--hf-checkpoint {folder} --prompt-data {folder}/rl.jsonl --train-iters 4 --platform cpu "
        "--grpo-prompts-per-step 2 --grpo-group-size 3 --micro-batch-size 2 --max-prompt-length 8 "
        f"--rollout-max-response-length 8 --reward-function format --output-dir {folder}/out "
    )
    parsed = parse(RLRunConfig, (defaults + flags).split(), "test")
    config, world = parsed.config, World(0, 1, 0, 1)
    job = Job(config, check_rl(config, 1), world, CpuPlatform(), cast(Any, NoWatchdog()), ())
    policy, engine = TablePolicy(first_table()), TableEngine()
    read = cast(Any, lambda: {"table": policy.table.detach()})
    sync = WeightSync(
        cast(Any, CopyWeights()),
        cast(Any, CompareWeights()),
        read,
        config.rollout.reshard_verify_interval,
    )
    output = Path(config.logging.output_dir)
    profiler = StepProfiler(config.profiler, job.platform, job.world.rank, output)
    timer = PhaseTimer(mark=profiler.phase)
    phases = Phases(cast(Any, engine), sync, timer)
    phases.to_train()
    rl = config.rl
    return RLJob(
        job=job,
        tokenizer=cast(Any, Characters()),
        prompts=cast(PromptDataset, PROMPTS),
        eval_sets={},
        sampler=PromptSampler(NUM_PROMPTS, config.train.seed),
        policy=cast(Any, policy),
        reference=cast(Any, TablePolicy(first_table())) if rl.grpo_kl_beta else None,
        critic=cast(Any, TableCritic(torch.zeros(VOCAB))) if config.has_critic else None,
        engine=cast(Any, engine),
        phases=phases,
        ledger=MemoryLedger({}, job.platform.memory, None, 0),
        rewards=cast(Any, TableRewards(rewards or {})),
        reward_names=("format",),
        kl_beta=rl.grpo_kl_beta,
        timer=timer,
        profiler=profiler,
        logger=RunLogger(output, True, ("jsonl",)),
        dump=RolloutDump(output / "rollouts.jsonl", config.logging.log_rollouts, True),
        cache=TensorCache(job.platform.device),
    )


def said(run: RLJob, samples: Sequence[Sample]) -> list[Response]:
    """What is kept of samples."""
    return fetch(run, samples)
