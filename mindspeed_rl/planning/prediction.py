"""Who will own how much device memory of each rank in each phase, from the configuration alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.config.machines import MACHINES, Machine
from mindspeed_rl.config.npu import group_buffers
from mindspeed_rl.core.memory import CRITIC_OWNERS, MemoryOwner, MemoryPhase, OffloadMode
from mindspeed_rl.models.rules import round_up
from mindspeed_rl.planning.activations import TrainingMemory, TrainPeak, Workload
from mindspeed_rl.planning.communicators import Groups
from mindspeed_rl.planning.engine_memory import EngineMemory
from mindspeed_rl.planning.model_state import ModelState, model_state
from mindspeed_rl.planning.run_groups import groups_of_run
from mindspeed_rl.planning.run_plan import RLPlan, RunPlan
from mindspeed_rl.rollout.registry import engine_provider
from mindspeed_rl.weights.layouts.megatron import MegatronLayout

Config = RLRunConfig | PretrainRunConfig
Table = dict[MemoryOwner, int]
_GIB, _MIB = 2**30, 2**20
# Buffers that vLLM-Ascend asks for, whatever HCCL_BUFFSIZE is; its group for dispatch follows that.
_ENGINE_BUFFERS_MB = {"rollout tp": 200, "rollout ep": 200, "rollout dp": 50}
# Of a phase's own work, gone when it ends.
_PASSING = (
    MemoryOwner.ACTIVATIONS,
    MemoryOwner.LOGITS,
    MemoryOwner.RESHARD_STAGING,
    MemoryOwner.ENGINE_WORKSPACE,
)


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
        machine: what a rank runs on.
        offload: what leaves during rollouts; not ``AUTO``.
    """

    config: Config
    plan: RunPlan
    machine: Machine = field(default=MACHINES["cpu"])
    offload: OffloadMode = OffloadMode.NONE

    def __post_init__(self) -> None:
        assert self.offload is not OffloadMode.AUTO, "resolve auto first"

    @property
    def world(self) -> int:
        """Ranks."""
        return self.plan.parallel.world

    def rank_table(self, rank: int) -> dict[MemoryPhase, Table]:
        """Owner -> bytes in every phase of one rank; owners without memory are left out."""
        models = self._models(rank)
        stays = {
            phase: {o: b for o, b in models.items() if o not in self.offload.away(phase)}
            for phase in MemoryPhase
        }
        tables = {
            MemoryPhase.LOAD: models | self._optimizers_at_start(rank),
            MemoryPhase.TRAIN_IDLE: stays[MemoryPhase.TRAIN_IDLE],
            MemoryPhase.TRAIN: self._train(rank, stays[MemoryPhase.TRAIN], models),
        }
        if isinstance(self.plan, RLPlan):
            weights = {MemoryOwner.ENGINE_WEIGHTS: self.engine.weights(rank)}
            tables[MemoryPhase.SYNC] = stays[MemoryPhase.SYNC] | weights | self._staging(rank)
            tables[MemoryPhase.ROLLOUT] = stays[MemoryPhase.ROLLOUT] | weights | self._sampling()
            if not self.frees_engine_weights:
                tables[MemoryPhase.TRAIN_IDLE] |= weights
                tables[MemoryPhase.TRAIN] |= weights
        groups = {MemoryOwner.COMMUNICATORS: sum(self.group_bytes(rank).values())}
        return {p: {o: b for o, b in (t | groups).items() if b} for p, t in tables.items()}

    def border(self, rank: int, state: str) -> dict[str, int]:
        """Owner -> bytes when the phase machine reaches a state, after the first update.

        Args:
            rank: global rank.
            state: ``train``, ``idle``, ``sync`` or ``rollout``.
        """
        phases = {"train": MemoryPhase.TRAIN_IDLE, "idle": MemoryPhase.SYNC}
        found = self.rank_table(rank)[phases.get(state) or MemoryPhase(state)]
        if state == "idle" and self.frees_engine_weights:
            found.pop(MemoryOwner.ENGINE_WEIGHTS, None)
        return {owner.value: size for owner, size in found.items() if owner not in _PASSING}

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

    # --- models of the trainer -----------------------------------------------------------------

    def _state(self, rank: int, layout: MegatronLayout) -> ModelState:
        return model_state(
            layout,
            rank,
            bf16=self.config.train.bf16,
            distributed_optimizer=self.config.parallel.use_distributed_optimizer,
        )

    def _models(self, rank: int) -> Table:
        """All models of the trainer, after the first update."""
        state, found = self._state(rank, self.plan.megatron), Table()
        found[MemoryOwner.PARAMETERS] = state.parameters
        found[MemoryOwner.GRAD_BUFFERS] = state.grad_buffers
        found[MemoryOwner.OPTIMIZER] = self._on_device(state.optimizer)
        if isinstance(self.config, RLRunConfig) and self.config.rl.grpo_kl_beta > 0:
            found[MemoryOwner.REFERENCE] = state.plain_parameters
        if self._reward_model:
            found[MemoryOwner.REWARD_MODEL] = self._state(rank, self._reward_model).plain_parameters
        if self._critic:
            critic = self._state(rank, self._critic)
            found[MemoryOwner.CRITIC] = critic.parameters
            found[MemoryOwner.CRITIC_GRAD_BUFFERS] = critic.grad_buffers
            found[MemoryOwner.CRITIC_OPTIMIZER] = self._on_device(critic.optimizer)
        return found

    def _optimizers_at_start(self, rank: int) -> Table:
        """Optimizer state before the first update."""
        layouts = {
            MemoryOwner.OPTIMIZER: self.plan.megatron,
            MemoryOwner.CRITIC_OPTIMIZER: self._critic,
        }
        return {
            owner: self._on_device(self._state(rank, layout).optimizer_at_start)
            for owner, layout in layouts.items()
            if layout is not None
        }

    def _on_device(self, size: int) -> int:
        """Optimizer state: all of it, or the part that MindSpeed moves through the device."""
        return -(-size // self.swap_parts) if self.swap_parts else size

    @property
    def swap_parts(self) -> int:
        """Parts in which MindSpeed moves optimizer state, which it can on NPUs only; 0: none."""
        ascend = self.config.ascend
        swaps = ascend.swap_optimizer and self.machine.platform == "npu"
        return ascend.swap_optimizer_times if swaps else 0

    @property
    def _reward_model(self) -> MegatronLayout | None:
        return self.plan.reward_model if isinstance(self.plan, RLPlan) else None

    @property
    def _critic(self) -> MegatronLayout | None:
        return self.plan.critic if isinstance(self.plan, RLPlan) else None

    # --- a training step -----------------------------------------------------------------------

    def _train(self, rank: int, stays: Table, models: Table) -> Table:
        """The fullest of an update, one of the critic, and passes of models brought in for them."""
        memory, work = self.training, self.workload
        moments = [stays | _passing(memory.peak(rank, work))]
        readers = {
            MemoryOwner.REFERENCE: self.plan.megatron,
            MemoryOwner.REWARD_MODEL: self._reward_model,
        }
        for owner, layout in readers.items():
            if layout is not None and owner in models and owner not in stays:
                size = replace(memory, layout=layout).inference(rank, work)
                moments.append(stays | {owner: models[owner], MemoryOwner.ACTIVATIONS: size})
        if self._critic is not None:
            critic = {owner: models[owner] for owner in CRITIC_OWNERS}
            peak = replace(memory, layout=self._critic).peak(rank, work)
            moments.append(stays | critic | _passing(peak))
        return max(moments, key=lambda table: sum(table.values()))

    @property
    def imbalance(self) -> float:
        """Tokens of the busiest expert-parallel rank as a multiple of the mean."""
        return self.config.dry_run.rl_dry_run_expert_imbalance

    @cached_property
    def training(self) -> TrainingMemory:
        """Activations of the trainer."""
        sharded = self.config.parallel.shards_sequence
        return TrainingMemory(self.plan.megatron, self.config.train, sharded, self.imbalance)

    @cached_property
    def workload(self) -> Workload:
        """The largest optimizer step: micro-batches full of the longest sequences allowed."""
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
            plan.rollout_layout,
            2 if engine_is_bf16(config) else 4,
            engine_provider().sizes(config.engine_options, plan.spec, self.machine.platform),
            int(config.rollout.rollout_kv_cache_gb * _GIB),
            self.imbalance,
        )

    @property
    def frees_engine_weights(self) -> bool:
        """Whether the engine's weights leave while the trainer trains."""
        return self.offload.sleeps_deeply(self._rl[0].memory.rollout_sleep)

    def _staging(self, rank: int) -> Table:
        """Of a weight update; a small model is sent and received in one round."""
        bucket = int(self._rl[0].rollout.reshard_bucket_mb * _MIB)
        parameters = self._state(rank, self.plan.megatron).parameters
        both = 2 * (self.engine.weights(rank) + parameters)
        return {MemoryOwner.RESHARD_STAGING: min(bucket, both)}

    def _sampling(self) -> Table:
        """What the engine has besides its weights while it samples."""
        tuning = self._rl[0].engine
        graphs = 0  # one per captured size, of automatic ones at most so many
        if tuning.rollout_graph_mode != "eager":
            own = not tuning.rollout_graph_sizes or tuning.rollout_graph_sizes == ("auto",)
            graphs = tuning.rollout_graph_count if own else len(tuning.rollout_graph_sizes)
        return {
            MemoryOwner.KV_CACHE: self.engine.kv_cache(),
            MemoryOwner.ENGINE_WORKSPACE: self.engine.workspace(),
            MemoryOwner.GRAPHS: graphs * int(self.machine.graph_mib * _MIB),
        }

    # --- communicators -------------------------------------------------------------------------

    def groups(self, rank: int) -> Groups:
        """The groups of a rank that a step uses on the device; all of them on any platform."""
        mc2 = self.machine.platform == "npu"
        return groups_of_run(rank, self.config, self.plan, engine_mc2=mc2)

    def group_bytes(self, rank: int) -> Mapping[str, int]:
        """Bytes of the device buffers of each of :meth:`groups`; nothing on a CPU."""
        each = int(self.machine.communicator_mib * _MIB)
        if not each:
            return {}
        sizes_mb: dict[str, int] = {}
        if self.machine.platform == "npu":  # one buffer to send, one to receive
            sizes_mb = _ENGINE_BUFFERS_MB | group_buffers(self.config.ascend.hccl_group_buffer)
        return {n: 2 * sizes_mb[n] * _MIB if n in sizes_mb else each for n in self.groups(rank)}


def _passing(peak: TrainPeak) -> Table:
    """What an update makes itself."""
    return {MemoryOwner.ACTIVATIONS: peak.activations, MemoryOwner.LOGITS: peak.logits}


def engine_is_bf16(config: RLRunConfig) -> bool:
    """Whether the engine computes in bfloat16."""
    dtype = config.rollout.rollout_dtype
    return dtype == "bfloat16" or (dtype == "auto" and config.train.bf16)


def predict(
    config: Config,
    plan: RunPlan,
    machine: Machine = MACHINES["cpu"],
    offload: OffloadMode = OffloadMode.NONE,
) -> MemoryPrediction:
    """Predict the device memory of a run. Pure; tables are computed when they are asked for."""
    return MemoryPrediction(config, plan, machine, offload)
