"""What the RL and the supervised entry share: model set-up, batches, export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mindspeed_rl.checkpoint.hf import HfWriter, load_hf
from mindspeed_rl.checkpoint.writers import export_writers
from mindspeed_rl.data.packing import TrainSample, pack, plan_micro_batches
from mindspeed_rl.parallel.groups import check_equal_nodes
from mindspeed_rl.resharding.executor import Resharder, Round
from mindspeed_rl.resharding.layouts.hf_file import HfFileLayout
from mindspeed_rl.resharding.transports import AllToAllTransport
from mindspeed_rl.trainer import parallel_state
from mindspeed_rl.trainer.train_engine import PreparedBatch, TrainEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
    from mindspeed_rl.config.validate import RunPlan
    from mindspeed_rl.orchestration.torchrun import Job


def load_tokenizer(config: RLRunConfig | PretrainRunConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the run."""
    from transformers import AutoTokenizer

    directory = config.model.tokenizer_name_or_path or config.model.hf_checkpoint
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    return tokenizer


def build_engine(
    job: Job[Any, RunPlan], role: str, num_updates: int, temperature: float = 1.0
) -> TrainEngine:
    """A TrainEngine with the weights of ``--hf-checkpoint``. Collective: the training grid."""
    config = job.config
    engine = TrainEngine(
        role,
        layout=job.plan.megatron,
        platform=job.platform,
        model=config.model,
        parallel=config.parallel,
        train=config.train,
        num_updates=num_updates,
        temperature=temperature,
    )
    load_hf(
        config.model.hf_checkpoint, job.plan.megatron, job.world.rank, engine.named_parameters()
    )
    engine.weights_changed()
    return engine


def initialize_parallel(job: Job[Any, RunPlan]) -> None:
    """Create the training grid's process groups. Collective: the world."""
    check_equal_nodes(job.world.local_size)
    parallel_state.initialize(job.plan.parallel, job.config.train.seed)


def local_batches(
    job: Job[Any, RunPlan], engine: TrainEngine, samples: Sequence[TrainSample]
) -> list[PreparedBatch]:
    """This data-parallel rank's share of the samples of one optimizer step, packed.

    All ranks are given all samples in the same order. Local.
    """
    parallel, train = job.plan.parallel, job.config.train
    chunks = 2 * parallel.cp if parallel.cp > 1 else 1
    shards = parallel.tp if job.config.parallel.shards_sequence else 1
    plan = plan_micro_batches(
        [sample.length for sample in samples],
        dp=parallel.dp,
        micro_batch_size=train.micro_batch_size,
        max_tokens=train.max_tokens_per_micro_batch,
        multiple=chunks * shards,
        sequence_multiple=chunks,
        count_multiple=parallel.pp if parallel.stages.vpp > 1 else 1,
    )
    mine = plan.assignment[parallel.coords(job.world.rank).dp]
    return engine.prepare(
        [pack([samples[i] for i in mb], plan.padded_length, chunks) for mb in mine]
    )


def export_hf(job: Job[Any, RunPlan], engine: TrainEngine, target: str, step: int) -> None:
    """Write the model after ``step`` as a Hugging Face checkpoint. Collective: the world.

    Tensors travel to the writer in rounds and are written as they come. Rank 0 writes; nodes that
    do not share its file system write a copy of their own, so that the next job finds it.
    """
    rank, platform = job.world.rank, job.platform
    source = job.plan.megatron
    writers = export_writers(Path(target), rank, job.world.size, job.world.local_size)
    files = HfFileLayout(source.hf_shapes, writers)
    dtype = torch.bfloat16 if job.config.train.bf16 else torch.float32
    resharder = Resharder(
        source,
        files,
        rank=rank,
        ranks_per_node=job.world.local_size,
        transport=AllToAllTransport(job.world.size, platform.device, None),
        dtype=dtype,
        bucket_bytes=512 << 20,
    )
    if rank not in writers:
        resharder.run(engine.named_parameters(), {})
    else:
        with HfWriter(target, job.config.model.hf_checkpoint, dtype, step=step) as writer:
            staging = _Staging(files, dtype, platform.device)

            def write(part: Round) -> None:
                for name in part.names:
                    writer.add(name, staging.pop(name))

            resharder.run(engine.named_parameters(), staging, after_round=write)
    dist.barrier()


class _Staging(dict[str, torch.Tensor]):
    """Whole tensors that exist from their first rectangle until they are written."""

    def __init__(self, layout: HfFileLayout, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._layout, self._dtype, self._device = layout, dtype, device

    def __missing__(self, name: str) -> torch.Tensor:
        shape = self._layout.hf_shapes[name]
        self[name] = torch.empty(shape, dtype=self._dtype, device=self._device)
        return self[name]
