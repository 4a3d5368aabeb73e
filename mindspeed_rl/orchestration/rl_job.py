"""Everything an RL run holds on one rank, and how it is built."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_rl.config import PromptConfig, RLRunConfig
from mindspeed_rl.config.outputs import ROLLOUTS_FILE
from mindspeed_rl.config.validate import RLPlan
from mindspeed_rl.data.lengths import LengthHistory
from mindspeed_rl.data.prompts import PromptDataset, load_prompts
from mindspeed_rl.data.sampler import PromptSampler
from mindspeed_rl.environments import (
    EnvironmentFactory,
    Host,
    LocalHost,
    RayHost,
    resolve_environment,
)
from mindspeed_rl.experience.samples import Sample
from mindspeed_rl.experience.tensor_cache import TensorCache
from mindspeed_rl.launch.job import Job
from mindspeed_rl.memory.owners import Owner
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.observability.loggers import RunLogger
from mindspeed_rl.observability.memory_ledger import MemoryLedger
from mindspeed_rl.observability.profiler import StepProfiler
from mindspeed_rl.observability.rollout_dump import RolloutDump
from mindspeed_rl.observability.timers import PhaseTimer
from mindspeed_rl.observability.trackers import make_trackers
from mindspeed_rl.orchestration import training
from mindspeed_rl.orchestration.rl_balance import check_rebalance
from mindspeed_rl.orchestration.rl_phases import (
    build_phases,
    build_rollout_engine,
    check_expert_replay,
    open_ledger,
    share_memory,
    watched,
)
from mindspeed_rl.orchestration.rl_rewards import check_row_rewards, make_reward_pool
from mindspeed_rl.orchestration.value_models import build_critic, build_reward_model
from mindspeed_rl.phases.machine import Phases
from mindspeed_rl.rewards import PoolBase, RewardSpec
from mindspeed_rl.rollout.engine import SamplingSettings
from mindspeed_rl.rollout.vllm_engine import VllmEngine
from mindspeed_rl.rollout.vllm_versions import installed_layout
from mindspeed_rl.trainer.train_engine import TrainEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# New objects before the collector looks at them: a step makes about this many for its samples.
_YOUNG_OBJECTS = 20_000


@dataclass
class RLJob:
    """The parts of an RL run on this rank.

    ``version`` counts optimizer updates: it names the weights that sampled a token.
    ``num_steps`` counts the RL steps that this process has begun to train on.
    ``kl_beta`` is the present coefficient of the KL to the reference.
    ``surplus`` are groups of samples that dynamic sampling left for the next step.
    ``pending`` are groups with responses that go on in the next step.
    ``lengths`` of earlier responses, by prompt; equal on all ranks.
    ``eval_sets`` are held-out prompts by name; that of ``--eval-prompt-data`` is empty.
    ``cache`` keeps the tokens of samples that this rank's engine made.
    ``rewards`` exists on the first rank of each engine only.
    ``environment`` makes the other side of a conversation; ``None``: responses have one turn.
    ``remote_environments`` are those that run elsewhere; on the first rank of each engine only.
    """

    job: Job[RLRunConfig, RLPlan]
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptDataset
    eval_sets: dict[str, PromptDataset]
    sampler: PromptSampler
    policy: TrainEngine
    reference: TrainEngine | None
    engine: VllmEngine
    phases: Phases
    ledger: MemoryLedger
    rewards: PoolBase | None
    reward_names: tuple[str, ...]
    timer: PhaseTimer
    logger: RunLogger
    dump: RolloutDump
    profiler: StepProfiler
    cache: TensorCache
    kl_beta: float
    version: int = 0
    num_steps: int = 0
    surplus: list[Sequence[Sample]] = field(default_factory=list)
    pending: list[Sequence[Sample]] = field(default_factory=list)
    lengths: LengthHistory = field(default_factory=LengthHistory)
    critic: TrainEngine | None = None
    reward_model: TrainEngine | None = None
    environment: EnvironmentFactory | None = None
    remote_environments: RayHost | None = None

    @property
    def config(self) -> RLRunConfig:
        """The configuration."""
        return self.job.config

    @property
    def plan(self) -> RLPlan:
        """Layouts and batch arithmetic."""
        return self.job.plan

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts of a reward: the functions', and the reward model's."""
        return (*self.reward_names, *(() if self.reward_model is None else ("reward_model",)))

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.job.world.rank

    @property
    def leads_engine(self) -> bool:
        """Whether this rank speaks for its engine."""
        return self.plan.engine.tp_rank(self.rank) == 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a phase for the timer and the watchdog."""
        with self.timer(name), self.job.watchdog.phase(name):
            yield

    def sampling(self, temperature: float) -> SamplingSettings:
        """Sampling settings at a temperature; 0 is greedy."""
        return SamplingSettings(
            temperature,
            self.config.rollout.rollout_max_response_length,
            stop_token_ids(self.tokenizer, self.plan),
        )

    def environments(self) -> Host:
        """Where the environments of new conversations live."""
        if self.remote_environments is not None:
            return self.remote_environments
        assert self.environment is not None
        return LocalHost(self.environment, self.tokenizer)

    def close(self) -> None:
        """Stop reward workers and environments, and close files."""
        self.profiler.close()
        if self.remote_environments is not None:
            self.remote_environments.close()
        if self.rewards is not None:
            self.rewards.close()
        self.logger.close()
        self.dump.close()


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, plan: RLPlan) -> tuple[int, ...]:
    """Ids that end a response: the config's and the tokenizer's.

    Raises:
        ValueError: there is none, or one that the model has no row for.
    """
    ids = set(plan.spec.eos_token_ids)
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    if not ids:
        raise ValueError(
            "neither config.json (eos_token_id) nor the tokenizer (eos_token) names an "
            "end-of-sequence token, so no response would ever end; add one of them"
        )
    if max(ids) >= plan.spec.vocab_size:
        raise ValueError(
            f"end-of-sequence id {max(ids)} (tokenizer: {tokenizer.eos_token!r}) is outside the "
            f"vocabulary of {plan.spec.vocab_size} in config.json; the tokenizer is another "
            "model's, or lacks eos_token in tokenizer_config.json and fell back to a default"
        )
    return tuple(sorted(ids))


def build_rl_job(job: Job[RLRunConfig, RLPlan]) -> RLJob:
    """Build the parts in the order in which mistakes are cheapest. Collective: the world."""
    job = _with_installed_engine(job)
    config, plan, rank = job.config, job.plan, job.world.rank
    specs = [RewardSpec.parse(text) for text in config.rewards.reward_function]
    leads = plan.engine.tp_rank(rank) == 0
    environment = _environment(config)
    rewards = make_reward_pool(config, specs) if leads else None
    tokenizer = training.load_tokenizer(config)
    stop_token_ids(tokenizer, plan)
    prompts, eval_sets = load_data(config.prompts, tokenizer, plan.spec, progress=rank == 0)
    check_row_rewards(config, specs, [prompts, *eval_sets.values()])
    training.initialize_parallel(job)
    updates = (config.train.train_iters - config.critic.critic_warmup_steps) * plan.batch.updates
    temperature = config.rl.rl_default_temperature
    policy = training.build_engine(job, "policy", updates, temperature, routing=routing_of(job))
    reference = _build_reference(job)
    critic, reward_model = build_critic(job), build_reward_model(job)
    output = Path(config.logging.output_dir)
    profiler = StepProfiler(config.profiler, job.platform, rank, output)
    timer = PhaseTimer(job.platform.synchronize, mark=profiler.phase)
    sharing = share_memory(job, policy, reference, critic, reward_model)
    sharing.leave_all()  # the engine is built into the room that it will have
    engine = build_rollout_engine(job)
    cache = TensorCache(job.platform.device)
    trained = {Owner.OPTIMIZER: policy, Owner.CRITIC_OPTIMIZER: critic}
    ledger = open_ledger(job, sharing, engine, cache, trained)
    holder: list[RLJob] = []
    phases = build_phases(
        job, policy, engine, watched(sharing, ledger), lambda name: holder[0].phase(name)
    )
    result = RLJob(
        job=job,
        tokenizer=tokenizer,
        prompts=prompts,
        eval_sets=eval_sets,
        sampler=PromptSampler(len(prompts), config.train.seed, fingerprint=prompts.fingerprint),
        policy=policy,
        reference=reference,
        critic=critic,
        reward_model=reward_model,
        engine=engine,
        phases=phases,
        ledger=ledger,
        environment=environment,
        remote_environments=_remote_environments(config, tokenizer) if leads else None,
        rewards=rewards,
        reward_names=tuple(spec.label for spec in specs),
        cache=cache,
        kl_beta=config.rl.grpo_kl_beta,
        timer=timer,
        logger=open_logger(config, rank),
        profiler=profiler,
        dump=RolloutDump(output / ROLLOUTS_FILE, config.logging.log_rollouts, rank == 0),
    )
    holder.append(result)
    phases.to_train()
    _settle_objects()
    return result


def _settle_objects() -> None:
    """Keep the garbage collector from what stays for the run, and from every few samples."""
    gc.collect()
    gc.freeze()  # not looked through at every release of device memory
    gc.set_threshold(_YOUNG_OBJECTS)  # tables of samples would begin a collection every few ms


def _with_installed_engine(job: Job[RLRunConfig, RLPlan]) -> Job[RLRunConfig, RLPlan]:
    """The plan as the installed engine keeps experts, after what it cannot do is refused."""
    check_rebalance(job.config, job.platform.name)
    check_expert_replay(job.config, job.platform.name)
    vllm = installed_layout(job.plan.vllm, job.platform.name)
    return replace(job, plan=replace(job.plan, vllm=vllm))


def _environment(config: RLRunConfig) -> EnvironmentFactory | None:
    name = config.environment.rl_environment
    return resolve_environment(name) if name else None


def _build_reference(job: Job[RLRunConfig, RLPlan]) -> TrainEngine | None:
    """What the KL is to, where the loss or the reward has one. Collective: the world."""
    if not job.config.rl.grpo_kl_beta:
        return None
    return training.build_engine(job, "reference", 0, job.config.rl.rl_default_temperature)


def open_logger(config: RLRunConfig, rank: int) -> RunLogger:
    """Where metrics go; on rank 0."""
    logs = config.logging
    others = make_trackers(config.trackers, logs.output_dir, asdict(config)) if rank == 0 else []
    places = ("jsonl", "tensorboard")
    return RunLogger(logs.output_dir, rank == 0, places, logs.tensorboard_dir, others)


def _remote_environments(config: RLRunConfig, tokenizer: PreTrainedTokenizerBase) -> RayHost | None:
    flags = config.environment
    workers = flags.rl_environment_ray_workers
    return RayHost(flags.rl_environment, tokenizer, workers) if workers else None


def routing_of(job: Job[RLRunConfig, RLPlan]) -> str:
    """What the policy does about the experts of later passes: see ``TrainEngine``."""
    if not job.plan.spec.moe:
        return "free"
    choice = job.config.rl.rl_routing_replay
    return {"none": "compare", "trainer": "replay", "rollout": "engine"}[choice]


def load_data(
    options: PromptConfig, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec, *, progress: bool
) -> tuple[PromptDataset, dict[str, PromptDataset]]:
    """The prompts to train on and the held-out ones. Local.

    Raises:
        ValueError: a file is broken, or prompts are in both.
    """
    load = partial(
        load_prompts,
        tokenizer=tokenizer,
        max_prompt_length=options.max_prompt_length,
        vocab_size=spec.vocab_size,
        prompt_key=options.prompt_key,
        answer_key=options.answer_key,
        apply_chat_template=options.apply_chat_template,
        progress=progress,
    )
    prompts = load(options.prompt_data)
    held_out = {name: load(file) for name, file in options.eval_files.items()}
    for name, dataset in held_out.items():
        refuse_overlap(prompts, dataset, f"--rl-eval-data {name}" if name else "--eval-prompt-data")
    return prompts, held_out


def refuse_overlap(prompts: PromptDataset, held_out: PromptDataset, flag: str) -> None:
    """Held-out prompts must not be trained on.

    Raises:
        ValueError: naming how many are in both, and one of them.
    """
    known = {tuple(p.token_ids) for p in prompts}
    both = [p.text for p in held_out if p.token_ids in known]
    if both:
        raise ValueError(
            f"{flag} {held_out.source}: {len(both)} of {len(held_out)} prompts are "
            f"also in --prompt-data {prompts.source}, e.g. {both[0]!r}; remove them from one file"
        )
