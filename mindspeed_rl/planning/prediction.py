"""Predicts the device memory by rank, phase and owner, from the configuration alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from mindspeed_rl.adapters.plan import merge_bytes
from mindspeed_rl.algorithms.lora import NO_ADAPTERS, LoraSettings
from mindspeed_rl.config import RLRunConfig, TrainingRunConfig
from mindspeed_rl.config.context_parallel import context_parallelism
from mindspeed_rl.config.dry_run import MACHINES, Machine
from mindspeed_rl.config.npu import group_buffers
from mindspeed_rl.config.outputs import export_target
from mindspeed_rl.config.rollout import EngineTuningConfig
from mindspeed_rl.core.graph_sizes import AUTO, num_default_sizes
from mindspeed_rl.core.groups import MEGATRON_GROUPS
from mindspeed_rl.core.layout import round_up
from mindspeed_rl.core.memory import (
    CRITIC_OWNERS,
    MemoryOwner,
    MemoryPhase,
    OffloadMode,
    export_bytes,
)
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.handover.offload import OffloadOrder
from mindspeed_rl.models.tensors import num_parameters
from mindspeed_rl.packing.micro_batches import token_limit
from mindspeed_rl.planning.activations import TrainingMemory, TrainPeak, Workload
from mindspeed_rl.planning.communicators import GroupsOfRank, RunGroups
from mindspeed_rl.planning.engine_memory import EngineMemory
from mindspeed_rl.planning.hccl_buffers import HcclBuffers, needed_mb
from mindspeed_rl.planning.model_state import ModelState, model_state, save_host_bytes
from mindspeed_rl.planning.run_plan import RLPlan, RunPlan
from mindspeed_rl.rollout.draft_model import draft_model_of
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

Table = dict[MemoryOwner, int]
_GIB, _MIB = 2**30, 2**20
# Buffers that vLLM-Ascend sets whatever HCCL_BUFFSIZE is, which applies to its dispatch group.
_ENGINE_BUFFERS_MB = {"rollout tp": 200, "rollout ep": 200, "rollout dp": 50}
# Owners whose memory is freed at the end of a phase.
_PASSING = (
    MemoryOwner.ACTIVATIONS,
    MemoryOwner.LOGITS,
    MemoryOwner.RESHARD_STAGING,
    MemoryOwner.ENGINE_WORKSPACE,
    MemoryOwner.SAVE_STAGING,
    MemoryOwner.EXPORT_STAGING,
)


@dataclass(frozen=True, slots=True)
class Peak:
    """The rank and phase at which a device is fullest, and the bytes then."""

    rank: int
    phase: MemoryPhase
    num_bytes: int


@dataclass(frozen=True)
class MemoryPrediction:
    """Predicted bytes by rank, phase and owner. Pure; a rank takes milliseconds.

    Attributes:
        config: Configuration of the run.
        plan: Plan of the run.
        machine: Machine on which a rank runs.
        offload: Trainer memory that is offloaded during rollouts; not ``AUTO``.
        order: When the optimizer state leaves, where it does.
    """

    config: TrainingRunConfig
    plan: RunPlan
    machine: Machine = field(default=MACHINES["cpu"])
    offload: OffloadMode = OffloadMode.NONE
    order: OffloadOrder | None = None

    def __post_init__(self) -> None:
        assert self.offload is not OffloadMode.AUTO, "resolve auto first"

    @property
    def world(self) -> int:
        return self.plan.parallel.world

    def rank_table(self, rank: int) -> dict[MemoryPhase, Table]:
        """Return owner -> bytes in every phase of one rank, without owners of no memory."""
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
        if self.saves:
            tables[MemoryPhase.SAVE] = self._save(rank, stays[MemoryPhase.TRAIN_IDLE], models)
        if export_target(self.config):
            size = export_bytes(num_parameters(self.plan.spec), self.config.train.bf16)
            export = {MemoryOwner.EXPORT_STAGING: size}
            tables[MemoryPhase.EXPORT] = stays[MemoryPhase.TRAIN_IDLE] | export
        if isinstance(self.plan, RLPlan):
            weights = {MemoryOwner.ENGINE_WEIGHTS: self.engine.weights(rank)}
            if self.machine.platform != "cpu":  # a pool has both
                weights[MemoryOwner.ENGINE_WEIGHTS] += self.engine.draft_model()
            tables[MemoryPhase.SYNC] = stays[MemoryPhase.SYNC] | weights | self._staging(rank)
            if self.order and self.order.beside_sync:
                late = {MemoryOwner.OPTIMIZER: models[MemoryOwner.OPTIMIZER]}
                tables[MemoryPhase.SYNC] |= late
            rollout = stays[MemoryPhase.ROLLOUT] | weights | self._sampling()
            tables[MemoryPhase.ROLLOUT] = rollout | self._tail_pass(rank)
            if not self.frees_engine_weights:
                tables[MemoryPhase.TRAIN_IDLE] |= weights
                tables[MemoryPhase.TRAIN] |= weights
                for phase in tables.keys() & {MemoryPhase.SAVE, MemoryPhase.EXPORT}:
                    tables[phase] |= weights
            for phase in tables.keys() - {MemoryPhase.LOAD}:
                tables[phase] |= self._sent_weights(rank)
        stay = {MemoryOwner.COMMUNICATORS: sum(self.group_bytes(rank).values())}
        if isinstance(self.plan, RLPlan) and self.machine.platform == "cpu":
            stay[MemoryOwner.DRAFT_MODEL] = self.engine.draft_model()
        return {p: {o: b for o, b in (t | stay).items() if b} for p, t in tables.items()}

    def border(self, rank: int, state: str) -> dict[str, int]:
        """Return owner -> bytes when the scheduler reaches a state, after the first update.

        Of the states that a step reaches twice it is the second time, on the way to training.

        Args:
            rank: Global rank.
            state: State of the scheduler, ``train``, ``idle``, ``sync`` or ``rollout``.
        """
        phases = {"train": MemoryPhase.TRAIN_IDLE, "idle": MemoryPhase.SYNC}
        prediction = replace(self, order=None)
        found = prediction.rank_table(rank)[phases.get(state) or MemoryPhase(state)]
        if state == "idle" and self.frees_engine_weights:
            found.pop(MemoryOwner.ENGINE_WEIGHTS, None)
        return {owner.value: size for owner, size in found.items() if owner not in _PASSING}

    def update_bytes(self, rank: int) -> tuple[int, int]:
        """Return what a weight update takes besides weights: staging, and copies of what it sent.

        Both are upper bounds. The copies stay after the first update.
        """
        return sum(self._staging(rank).values()), sum(self._sent_weights(rank).values())

    def peak(self, ranks: Iterable[int]) -> Peak:
        """Return the fullest moment of some ranks."""
        return max(
            (
                Peak(rank, phase, sum(table.values()))
                for rank in ranks
                for phase, table in self.rank_table(rank).items()
            ),
            key=lambda peak: peak.num_bytes,
        )

    def peaks(self, ranks: Iterable[int]) -> dict[MemoryPhase, int]:
        """Return the bytes of the fullest of some ranks, by phase."""
        tables = [self.rank_table(rank) for rank in ranks]
        return {phase: max(sum(t[phase].values()) for t in tables) for phase in tables[0]}

    def representatives(self) -> tuple[int, ...]:
        """Return the first rank of every pipeline stage, whose ranks differ by padding alone."""
        parallel = self.plan.parallel
        return tuple(range(0, parallel.world, parallel.ranks_per_stage))

    # --- models of the trainer -----------------------------------------------------------------

    def _state(self, rank: int, layout: MegatronLayout) -> ModelState:
        return model_state(
            layout,
            rank,
            bf16=self.config.train.bf16,
            distributed_optimizer=self.config.parallel.use_distributed_optimizer,
            lora=self._lora(layout),
        )

    def _lora(self, layout: MegatronLayout) -> LoraSettings:
        is_policy = isinstance(self.config, RLRunConfig) and layout is self.plan.megatron
        return self._rl[0].lora if is_policy else NO_ADAPTERS

    def _models(self, rank: int) -> Table:
        """Return the bytes of all models of the trainer after the first update."""
        state, found = self._state(rank, self.plan.megatron), Table()
        found[MemoryOwner.PARAMETERS] = state.parameters
        found[MemoryOwner.GRAD_BUFFERS] = state.grad_buffers
        found[MemoryOwner.OPTIMIZER] = self._on_device(state.optimizer)
        has_reference = isinstance(self.config, RLRunConfig) and self.config.rl.grpo_kl_beta > 0
        if has_reference and not self._lora(self.plan.megatron).is_on:
            found[MemoryOwner.REFERENCE] = state.plain_parameters
        if self._reward_model:
            found[MemoryOwner.REWARD_MODEL] = self._state(rank, self._reward_model).plain_parameters
        if teachers := self._teachers:
            states = [self._state(rank, teacher) for teacher in teachers]
            found[MemoryOwner.TEACHERS] = sum(state.plain_parameters for state in states)
        if self._critic:
            critic = self._state(rank, self._critic)
            found[MemoryOwner.CRITIC] = critic.parameters
            found[MemoryOwner.CRITIC_GRAD_BUFFERS] = critic.grad_buffers
            found[MemoryOwner.CRITIC_OPTIMIZER] = self._on_device(critic.optimizer)
        return found

    def _optimizers_at_start(self, rank: int) -> Table:
        """Return the bytes of optimizer state before the first update."""
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
        """Return optimizer bytes on the device: all, or the part that MindSpeed swaps in."""
        return -(-size // self.swap_parts) if self.swap_parts else size

    @property
    def swap_parts(self) -> int:
        """Number of parts in which MindSpeed swaps optimizer state (NPUs only); 0: no swapping."""
        ascend = self.config.ascend
        swaps = ascend.swap_optimizer and self.machine.platform == "npu"
        return ascend.swap_optimizer_times if swaps else 0

    @property
    def _reward_model(self) -> MegatronLayout | None:
        return self.plan.reward_model if isinstance(self.plan, RLPlan) else None

    @property
    def _teachers(self) -> list[MegatronLayout]:
        return [*self.plan.teachers.values()] if isinstance(self.plan, RLPlan) else []

    @property
    def _critic(self) -> MegatronLayout | None:
        return self.plan.critic if isinstance(self.plan, RLPlan) else None

    def stepped_bytes(self, ranks: Iterable[int]) -> int:
        """Return the most optimizer state of some ranks; 0 where MindSpeed keeps it on the host."""
        sizes = (self._state(rank, self.plan.megatron).optimizer for rank in ranks)
        return 0 if self.swap_parts else max(sizes)

    # --- a training step -----------------------------------------------------------------------

    def _train(self, rank: int, stays: Table, models: Table) -> Table:
        """Return the fullest moment of policy and critic updates and passes of offloaded models."""
        memory, work = self.training, self.workload
        # The KL over the whole vocabulary reads the heads of the teachers during the update.
        beside = {o: models[o] for o in [MemoryOwner.TEACHERS] if o in models and work.state_bytes}
        peak = memory.peak(rank, work)
        merging = merge_bytes(self.plan.megatron, rank, self._lora(self.plan.megatron))
        peak = replace(peak, activations=peak.activations + merging)
        moments = [stays | beside | _passing(peak)]
        readers = [
            (MemoryOwner.REFERENCE, self.plan.megatron),
            (MemoryOwner.REWARD_MODEL, self._reward_model),
            *((MemoryOwner.TEACHERS, teacher) for teacher in self._teachers),
        ]
        for owner, layout in readers:
            if layout is not None and owner in models and owner not in stays:
                size = replace(memory, layout=layout).inference(rank, work)
                moments.append(stays | {owner: models[owner], MemoryOwner.ACTIVATIONS: size})
        if self._critic is not None:
            critic = {owner: models[owner] for owner in CRITIC_OWNERS}
            peak = replace(memory, layout=self._critic).peak(rank, work)
            moments.append(stays | critic | _passing(peak))
        return max(moments, key=lambda table: sum(table.values()))

    # --- a checkpoint --------------------------------------------------------------------------

    @property
    def saves(self) -> bool:
        """Whether the run writes checkpoints."""
        return bool(self.config.checkpoint.save)

    def save_host_bytes(self, rank: int) -> int:
        """Return the host memory that a save takes: of one model after another, or of all."""
        options = self.config.checkpoint
        policy = self.plan.megatron
        models = [policy, *([self._critic] if self._critic else [])]
        trained = [(layout, not options.no_save_optim) for layout in models]
        if MemoryOwner.REFERENCE in self._saved_beside:
            trained.append((policy, False))
        found = [
            save_host_bytes(
                layout,
                rank,
                bf16=self.config.train.bf16,
                with_optimizer=with_optimizer,
                in_background=options.async_save,
                on_host=self.machine.platform == "cpu",
                lora=self._lora(layout),
            )
            for layout, with_optimizer in trained
        ]
        return sum(found) if options.async_save else max(found)

    def _save(self, rank: int, stays: Table, models: Table) -> Table:
        """Return the moment of a save: models that are written come back, gradients are there."""
        back = {o: size for o, size in models.items() if o in self._saved_beside}
        if self.machine.platform != "cpu":
            return stays | back
        return stays | back | {MemoryOwner.SAVE_STAGING: self.save_host_bytes(rank)}

    def peer_copies(self, rank: int) -> int:
        """Return the bytes of shared memory that copies of a rank's state take.

        Two steps are kept while the newer one is made; with several nodes the next one has the
        same.
        """
        if not self.config.checkpoint.peer_checkpoint_steps:
            return 0
        layouts = [self.plan.megatron, *([self._critic] if self._critic else [])]
        states = [self._state(rank, layout) for layout in layouts]
        size = sum(state.plain_parameters + state.optimizer for state in states)
        if MemoryOwner.REFERENCE in self._saved_beside:
            size += states[0].plain_parameters
        places = 2 if self.world > self.machine.ranks_per_node else 1
        return 2 * places * size

    @property
    def _saved_beside(self) -> tuple[MemoryOwner, ...]:
        """Owners of models besides the policy that a checkpoint has."""
        config = self.config
        changes = isinstance(config, RLRunConfig) and config.rl.ref_update_interval
        return (*CRITIC_OWNERS, MemoryOwner.REFERENCE) if changes else CRITIC_OWNERS

    @property
    def imbalance(self) -> float:
        """Tokens of the busiest expert-parallel rank as a multiple of the mean."""
        return self.config.dry_run.rl_dry_run_expert_imbalance

    @cached_property
    def training(self) -> TrainingMemory:
        return TrainingMemory(
            self.plan.megatron,
            self.config.train,
            self.config.parallel.shards_sequence,
            self.imbalance,
            on_host=self.machine.platform == "cpu",
            context=context_parallelism(self.config.parallel),
        )

    @cached_property
    def workload(self) -> Workload:
        """The largest optimizer step: micro-batches full of sequences of the maximal length."""
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
        padded = round_up(longest, parallel.sequence_multiple)
        limit = token_limit(train, config.parallel)
        # Tokens of a row; without a limit they are as --micro-batch-size says.
        room = max(limit, padded) if limit else train.micro_batch_size * padded
        sequences = min(max(1, room // padded), samples)
        # A hybrid plan may put all sequences on one context-parallel rank, up to its room.
        spread = parallel.cp if config.parallel.hybrid_context_parallel else 1
        room = min(round_up(room, spread), spread * samples * padded)
        # Rows that are filled with tokens may hold nearly nothing but responses to short prompts.
        packs = limit != 0
        multiple = parallel.row_multiple(sequence_parallel=config.parallel.shards_sequence)
        return Workload(
            tokens=round_up(room, multiple),
            trained=min(room, spread * samples * trained) if packs else sequences * trained,
            num_micro_batches=-(-samples // sequences),
            entropy_gradient=entropy,
            num_updates=prepared,
            state_bytes=self._state_bytes,
        )

    @property
    def _state_bytes(self) -> int:
        """Bytes of a teacher's hidden state of a token and its number; 0 where none is kept."""
        if not isinstance(self.config, RLRunConfig) or not self.config.distillation.full:
            return 0
        width = max(teacher.spec.hidden_size for teacher in self._teachers)
        return width * (2 if self.config.train.bf16 else 4) + 4

    # --- the engine ----------------------------------------------------------------------------

    @property
    def _rl(self) -> tuple[RLRunConfig, RLPlan]:
        assert isinstance(self.config, RLRunConfig) and isinstance(self.plan, RLPlan)
        return self.config, self.plan

    @cached_property
    def engine(self) -> EngineMemory:
        config, plan = self._rl
        drafts, draft = config.drafts, draft_model_of(config.engine_options)
        drafted = drafts.rollout_draft_tokens if drafts.rollout_drafts != "none" else 0
        return EngineMemory(
            plan.rollout_layout,
            2 if config.rollout.engine_is_bf16(config.train) else 4,
            engine_provider().sizes(config.engine_options, plan.spec, self.machine.platform),
            int(config.rollout.rollout_kv_cache_gb * _GIB),
            self.imbalance,
            rows=1 + (drafted if draft is None else draft.tokens),
            draft=draft,
        )

    @property
    def frees_engine_weights(self) -> bool:
        """Whether the engine's weights are freed while the trainer trains."""
        return self.offload.sleeps_deeply(self._rl[0].memory.rollout_sleep)

    def _sent_weights(self, rank: int) -> Table:
        """Return the most bytes of devices that copies of what an update sent can take."""
        kept = self._rl[0].rollout.keeps_sent(on_host=self.machine.platform == "cpu")
        return {MemoryOwner.SENT_WEIGHTS: self._sent_bytes(rank) if kept else 0}

    def _sent_bytes(self, rank: int) -> int:
        train = self.config.train
        item = 2 if self._rl[0].rollout.engine_is_bf16(train) else 4
        return self._state(rank, self.plan.megatron).plain_parameters * item // (4 - 2 * train.bf16)

    def delta_host_bytes(self, rank: int) -> tuple[int, int]:
        """Return the bytes of a device's host that ``--reshard-deltas`` takes between updates.

        They are the most that copies of what an update sent can take, and the parameters of an
        engine whose weights are freed.
        """
        if not isinstance(self.plan, RLPlan) or self.machine.platform == "cpu":
            return 0, 0
        choice = self._rl[0].rollout.reshard_deltas
        sent = self._sent_bytes(rank) if choice == "host" else 0
        asleep = choice != "off" and self.frees_engine_weights
        return sent, self.engine.parameters(rank) if asleep else 0

    def _staging(self, rank: int) -> Table:
        """Return the staging bytes of a weight update; a small model needs a single round."""
        bucket = int(self._rl[0].rollout.staging_mb * _MIB)
        parameters = self._state(rank, self.plan.megatron).parameters
        both = 2 * (self.engine.weights(rank) + parameters)
        return {MemoryOwner.RESHARD_STAGING: min(bucket, both)}

    def _sampling(self) -> Table:
        """Return the engine's bytes besides its weights while it samples."""
        return {
            MemoryOwner.KV_CACHE: self.engine.kv_cache(),
            MemoryOwner.ENGINE_WORKSPACE: self.engine.workspace(),
            MemoryOwner.GRAPHS: self.num_graphs * int(self.machine.graph_mib * _MIB),
        }

    def _tail_pass(self, rank: int) -> Table:
        """Return the bytes of passes beside the engine, one after another, over a long sequence."""
        config, plan = self._rl
        if not config.rl.tail_passes:
            return {}
        multiple = plan.parallel.row_multiple(sequence_parallel=config.parallel.shards_sequence)
        work = replace(
            self.workload,
            tokens=round_up(plan.max_model_len, multiple),
            trained=config.rollout.rollout_max_response_length,
            num_micro_batches=1,
        )
        merging = merge_bytes(plan.megatron, rank, config.lora)
        return {MemoryOwner.ACTIVATIONS: self.training.inference(rank, work) + merging}

    @cached_property
    def tuning(self) -> tuple[EngineTuningConfig, str]:
        """The execution of the engine with its graph mode, and the reason for one chosen here."""
        config, plan = self._rl
        return engine_provider().tuning(config.engine, plan.engine, self.machine.platform)

    @property
    def num_graphs(self) -> int:
        """Number of sizes that the engine captures."""
        tuning = self.tuning[0]
        if tuning.rollout_graph_mode == "eager":
            return 0
        if tuning.rollout_graph_sizes == AUTO:
            return min(tuning.rollout_graph_count, self.engine.sizes.sequences)
        if not tuning.rollout_graph_sizes:
            return num_default_sizes(self.engine.sizes.sequences)
        return len(set(tuning.rollout_graph_sizes))

    # --- communicators -------------------------------------------------------------------------

    def groups(self, rank: int) -> GroupsOfRank:
        """Return the groups that a step uses on a device, also for a CPU, which has no buffers."""
        mc2 = self.machine.platform == "npu"
        return RunGroups.of(self.config, self.plan, engine_mc2=mc2).of_rank(rank)

    def group_bytes(self, rank: int) -> Mapping[str, int]:
        """Return the bytes of the device buffers of each of :meth:`groups`; none on a CPU."""
        each = int(self.machine.communicator_mib * _MIB)
        if not each:
            return {}
        if self.buffers is None:
            return dict.fromkeys(self.groups(rank), each)
        sizes_mb = dict.fromkeys(MEGATRON_GROUPS, self.buffers.usual_mb) | _ENGINE_BUFFERS_MB
        sizes_mb |= group_buffers(self.config.ascend.hccl_group_buffer)
        largest = self.buffers.process_mb  # of one of the two buffers
        return {n: 2 * sizes_mb.get(n, largest) * _MIB for n in self.groups(rank)}

    @cached_property
    def buffers(self) -> HcclBuffers | None:
        """The sizes of HCCL's buffers; ``None`` on other platforms than NPUs."""
        if self.machine.platform != "npu":
            return None
        needed = needed_mb(self.config, self.plan, self.machine.name)
        return HcclBuffers(needed, int(self.machine.communicator_mib) // 2)


def _passing(peak: TrainPeak) -> Table:
    """Return the bytes that an update allocates itself."""
    return {MemoryOwner.ACTIVATIONS: peak.activations, MemoryOwner.LOGITS: peak.logits}
