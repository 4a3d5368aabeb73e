"""Who will own how much device memory of each rank in each phase, from the configuration alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.config.validate import RLPlan, RunPlan
from mindspeed_rl.memory.assumptions import MemoryAssumptions
from mindspeed_rl.memory.communicators import Groups
from mindspeed_rl.memory.engine import EngineMemory
from mindspeed_rl.memory.model_state import ModelState, model_state
from mindspeed_rl.memory.owners import CRITIC_OWNERS, MemoryPhase, OffloadMode, Owner
from mindspeed_rl.memory.run_groups import groups_of_run
from mindspeed_rl.memory.tape import inference_peak
from mindspeed_rl.memory.training import TrainingMemory, TrainPeak, Workload
from mindspeed_rl.models.rules import round_up
from mindspeed_rl.resharding.layouts.megatron import MegatronLayout

Table = dict[Owner, int]
_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest moment."""

    rank: int
    phase: MemoryPhase
    num_bytes: int


@dataclass(frozen=True)
class MemoryPrediction:
    """Bytes by rank, phase and owner. Pure; a rank costs milliseconds.

    Attributes:
        config: of the run.
        plan: of the run.
        assumptions: what the configuration does not say.
        work: the optimizer step that is predicted; ``None``: the largest that the flags allow.
    """

    config: RLRunConfig | PretrainRunConfig
    plan: RunPlan
    assumptions: MemoryAssumptions
    work: Workload | None = None

    def __post_init__(self) -> None:
        assert self.assumptions.offload is not OffloadMode.AUTO, "resolve auto first"

    @property
    def world(self) -> int:
        """Ranks."""
        return self.plan.parallel.world

    def rank_table(self, rank: int) -> dict[MemoryPhase, Table]:
        """Owner -> bytes in every phase of one rank; owners without memory are left out."""
        state, moments = self._state(rank), self._resident_optimizer(self._state(rank).optimizer)
        trainer = self._trainer(state, moments) | self._idle_others(rank)
        tables = {
            MemoryPhase.LOAD: self._load(rank, state),
            MemoryPhase.TRAIN_IDLE: trainer,
            MemoryPhase.TRAIN: self._train(rank, trainer, state),
        }
        if isinstance(self.plan, RLPlan):
            tables[MemoryPhase.SYNC] = self._sync(rank, state, moments)
            tables[MemoryPhase.ROLLOUT] = self._rollout(rank, state, moments)
            if not self._frees_engine_weights:
                weights = {Owner.ENGINE_WEIGHTS: self.engine.weights(rank)}
                tables[MemoryPhase.TRAIN_IDLE] |= weights
                tables[MemoryPhase.TRAIN] |= weights
        groups = self._communicators(rank)
        return {
            phase: {o: b for o, b in (table | groups).items() if b}
            for phase, table in tables.items()
        }

    def border(self, rank: int, state: str) -> dict[str, int]:
        """Owner -> bytes when the phase machine reaches a state, after the first update.

        Args:
            rank: global rank.
            state: ``train``, ``idle``, ``sync`` or ``rollout``.
        """
        table = self.rank_table(rank)
        if state == "train":
            found = table[MemoryPhase.TRAIN_IDLE]
        elif state == "idle":
            freed = self._frees_engine_weights
            found = {
                owner: size
                for owner, size in table[MemoryPhase.SYNC].items()
                if not (freed and owner is Owner.ENGINE_WEIGHTS)
            }
        else:
            found = table[MemoryPhase(state)]
        passing = (Owner.ACTIVATIONS, Owner.LOGITS, Owner.RESHARD_STAGING, Owner.ENGINE_WORKSPACE)
        return {owner.value: size for owner, size in found.items() if owner not in passing}

    def peak(self, ranks: Iterable[int] | None = None) -> Peak:
        """The fullest moment of some ranks; of all when not given."""
        return max(
            (
                Peak(rank, phase, sum(table.values()))
                for rank in (range(self.world) if ranks is None else ranks)
                for phase, table in self.rank_table(rank).items()
            ),
            key=lambda peak: peak.num_bytes,
        )

    def representatives(self) -> tuple[int, ...]:
        """The first rank of every pipeline stage: ranks of a stage differ by padding alone."""
        parallel = self.plan.parallel
        return tuple(range(0, parallel.world, parallel.ranks_per_stage))

    # --- the trainer -------------------------------------------------------------------------

    def _state(self, rank: int, layout: MegatronLayout | None = None) -> ModelState:
        return model_state(
            layout or self.plan.megatron,
            rank,
            bf16=self.config.train.bf16,
            distributed_optimizer=self.config.parallel.use_distributed_optimizer,
        )

    def _resident_optimizer(self, size: int) -> int:
        return -(-size // self.assumptions.swap_parts) if self.assumptions.swap_parts else size

    @property
    def _has_reference(self) -> bool:
        return isinstance(self.config, RLRunConfig) and self.config.rl.grpo_kl_beta > 0

    def _reference(self, state: ModelState) -> int:
        return state.plain_parameters if self._has_reference else 0

    @property
    def _offload(self) -> OffloadMode:
        return self.assumptions.offload

    @property
    def _scorer_layout(self) -> MegatronLayout | None:
        return self.plan.reward_model if isinstance(self.plan, RLPlan) else None

    def _reward_model(self, rank: int) -> int:
        layout = self._scorer_layout
        return self._state(rank, layout).plain_parameters if layout else 0

    @property
    def _critic_layout(self) -> MegatronLayout | None:
        return self.plan.critic if isinstance(self.plan, RLPlan) else None

    def _critic(self, rank: int, *owners: Owner, started: bool = True) -> Table:
        """Bytes of the critic under some of its owners; ``started``: it was updated before."""
        if self._critic_layout is None:
            return {}
        state = self._state(rank, self._critic_layout)
        optimizer = state.optimizer if started else state.optimizer_at_start
        everything = {
            Owner.CRITIC: state.parameters,
            Owner.CRITIC_GRAD_BUFFERS: state.grad_buffers,
            Owner.CRITIC_OPTIMIZER: self._resident_optimizer(optimizer),
        }
        return {owner: everything[owner] for owner in owners}

    def _idle_others(self, rank: int) -> Table:
        """Critic and reward model while they are not used, in TRAIN as in ROLLOUT."""
        stays = {
            OffloadMode.NONE: CRITIC_OWNERS,
            OffloadMode.OPTIMIZER: (Owner.CRITIC,),
            OffloadMode.ALL: (),
        }[self._offload]
        kept = self._offload is not OffloadMode.ALL
        scorer = self._reward_model(rank) if kept else 0
        return self._critic(rank, *stays) | {Owner.REWARD_MODEL: scorer}

    def _load(self, rank: int, state: ModelState) -> Table:
        return self._critic(rank, *CRITIC_OWNERS, started=False) | {
            Owner.PARAMETERS: state.parameters,
            Owner.GRAD_BUFFERS: state.grad_buffers,
            Owner.OPTIMIZER: self._resident_optimizer(state.optimizer_at_start),
            Owner.REFERENCE: self._reference(state),
            Owner.REWARD_MODEL: self._reward_model(rank),
        }

    def _trainer(self, state: ModelState, optimizer: int) -> Table:
        stays = self._offload is not OffloadMode.ALL
        return {
            Owner.PARAMETERS: state.parameters,
            Owner.GRAD_BUFFERS: state.grad_buffers,
            Owner.OPTIMIZER: optimizer,
            Owner.REFERENCE: self._reference(state) if stays else 0,
        }

    def _train(self, rank: int, trainer: Table, state: ModelState) -> Table:
        """The fullest of an update, one of the critic, and passes of models brought in for them."""
        memory, work = self.training, self.workload
        peak = memory.peak(rank, work)
        moments = [trainer | _passing(peak)]
        reference = self._reference(state)
        if reference and self._offload is OffloadMode.ALL:
            passing = max(inference_peak(tape) for tape in memory.chunk_tapes(rank, work))
            moments.append(
                trainer | {Owner.REFERENCE: reference, Owner.ACTIVATIONS: passing + peak.batch}
            )
        scorer = self._reward_model(rank)
        if scorer and self._offload is OffloadMode.ALL and self._scorer_layout is not None:
            of_scorer = replace(memory, layout=self._scorer_layout)
            passing = max(inference_peak(tape) for tape in of_scorer.chunk_tapes(rank, work))
            moments.append(
                trainer | {Owner.REWARD_MODEL: scorer, Owner.ACTIVATIONS: passing + peak.batch}
            )
        if self._critic_layout is not None:
            of_critic = replace(memory, layout=self._critic_layout).peak(rank, work)
            moments.append(trainer | self._critic(rank, *CRITIC_OWNERS) | _passing(of_critic))
        return max(moments, key=lambda table: sum(table.values()))

    @cached_property
    def training(self) -> TrainingMemory:
        """Activations of the trainer."""
        return TrainingMemory(
            self.plan.megatron,
            self.config.train,
            self.assumptions.kernels,
            self.config.parallel.shards_sequence,
            self.assumptions.train_imbalance,
        )

    @cached_property
    def workload(self) -> Workload:
        """The optimizer step that is predicted."""
        return self.work or self._largest_work()

    def _largest_work(self) -> Workload:
        """Micro-batches full of the longest sequences that the flags allow."""
        config, parallel = self.config, self.plan.parallel
        train = config.train
        if isinstance(self.plan, RLPlan) and isinstance(config, RLRunConfig):
            longest, per_update = self.plan.max_model_len, self.plan.batch.samples_per_update
            prepared = self.plan.batch.updates_per_iteration
            trained = config.rollout.rollout_max_response_length
            entropy = config.rl.grpo_entropy_term_weight != 0
        else:
            longest = trained = train.seq_length or self.plan.spec.max_position_embeddings
            per_update, prepared, entropy = train.global_batch_size, 1, False
        samples = max(1, per_update // parallel.dp)
        sequences = train.micro_batch_size
        if train.max_tokens_per_micro_batch:
            sequences = max(1, train.max_tokens_per_micro_batch // longest)
        sequences = min(sequences, samples)
        multiple = (2 * parallel.cp if parallel.cp > 1 else 1) * parallel.tp
        return Workload(
            tokens=round_up(sequences * longest, multiple),
            sequence=longest,
            trained=sequences * trained,
            num_micro_batches=-(-samples // sequences),
            entropy_gradient=entropy,
            num_updates=prepared,
        )

    # --- the engine ----------------------------------------------------------------------------

    @property
    def _rl(self) -> tuple[RLRunConfig, RLPlan]:
        assert isinstance(self.config, RLRunConfig) and isinstance(self.plan, RLPlan)
        return self.config, self.plan

    @cached_property
    def engine(self) -> EngineMemory:
        """The rollout engine."""
        config, plan = self._rl
        return EngineMemory(
            plan.vllm,
            2 if engine_is_bf16(config) else 4,
            config.vllm_options,
            int(config.rollout.rollout_kv_cache_gb * _GIB),
            self.assumptions.rollout_imbalance,
            self.assumptions.copies_latent,
            self.assumptions.latent_block_tokens,
        )

    @property
    def _frees_engine_weights(self) -> bool:
        sleep = self._rl[0].memory.rollout_sleep
        return sleep == "all" or (sleep == "auto" and self._offload is OffloadMode.ALL)

    def _waiting(self, rank: int, state: ModelState, optimizer: int) -> Table:
        """The trainer while weights are updated."""
        left = self._offload is not OffloadMode.NONE
        return self._idle_others(rank) | {
            Owner.PARAMETERS: state.parameters,
            Owner.GRAD_BUFFERS: 0 if left else state.grad_buffers,
            Owner.OPTIMIZER: 0 if left else optimizer,
            Owner.REFERENCE: 0 if self._offload is OffloadMode.ALL else self._reference(state),
        }

    def _sync(self, rank: int, state: ModelState, optimizer: int) -> Table:
        weights = self.engine.weights(rank)
        bucket = int(self._rl[0].rollout.reshard_bucket_mb * _MIB)
        # a small model is sent and received in one round
        staging = min(bucket, 2 * (weights + state.parameters))
        return self._waiting(rank, state, optimizer) | {
            Owner.ENGINE_WEIGHTS: weights,
            Owner.RESHARD_STAGING: self.assumptions.staging_bytes.get(rank, staging),
        }

    def _rollout(self, rank: int, state: ModelState, optimizer: int) -> Table:
        waiting = self._waiting(rank, state, optimizer)
        if self._offload is OffloadMode.ALL:
            waiting[Owner.PARAMETERS] = 0
        return waiting | {
            Owner.ENGINE_WEIGHTS: self.engine.weights(rank),
            Owner.KV_CACHE: self.engine.kv_cache(),
            Owner.ENGINE_WORKSPACE: self.engine.workspace(),
            Owner.GRAPHS: self._graphs(),
        }

    def _graphs(self) -> int:
        """Captured graphs: one per size, of ``auto`` and of the engine's own at most so many."""
        tuning = self._rl[0].engine
        if tuning.rollout_graph_mode == "eager":
            return 0
        own = not tuning.rollout_graph_sizes or tuning.rollout_graph_sizes == ("auto",)
        count = tuning.rollout_graph_count if own else len(tuning.rollout_graph_sizes)
        return self.assumptions.graph_bytes * count

    def groups(self, rank: int) -> Groups:
        """The groups of a rank that a step uses on the device; all of them on any platform."""
        mc2 = self.assumptions.engine_mc2
        return groups_of_run(rank, self.config, self.plan, engine_mc2=mc2)

    def group_bytes(self, rank: int) -> dict[str, int]:
        """Bytes of the device buffers of each of :meth:`groups`; nothing on a CPU."""
        each = self.assumptions.communicator_bytes
        if not each:
            return {}
        return {name: self.assumptions.group_bytes.get(name, each) for name in self.groups(rank)}

    def _communicators(self, rank: int) -> Table:
        return {Owner.COMMUNICATORS: sum(self.group_bytes(rank).values())}


def _passing(peak: TrainPeak) -> Table:
    """What an update makes itself."""
    return {Owner.ACTIVATIONS: peak.activations + peak.batch, Owner.LOGITS: peak.logits}


def engine_is_bf16(config: RLRunConfig) -> bool:
    """Whether the engine computes in bfloat16."""
    dtype = config.rollout.rollout_dtype
    return dtype == "bfloat16" or (dtype == "auto" and config.train.bf16)


def predict(
    config: RLRunConfig | PretrainRunConfig,
    plan: RunPlan,
    assumptions: MemoryAssumptions | None = None,
    work: Workload | None = None,
) -> MemoryPrediction:
    """Predict the device memory of a run. Pure; tables are computed when they are asked for."""
    return MemoryPrediction(config, plan, assumptions or MemoryAssumptions(), work)
