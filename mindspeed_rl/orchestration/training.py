"""What the RL and the supervised entry share: model set-up, batches, export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mindspeed_rl.checkpoint.hf import load_hf, read_tensor, weight_files
from mindspeed_rl.checkpoint.hf_writer import HfWriter
from mindspeed_rl.checkpoint.names import mtp_tensors
from mindspeed_rl.checkpoint.writers import export_writers
from mindspeed_rl.data.balance import SequenceCost
from mindspeed_rl.data.locality import keep_near
from mindspeed_rl.data.packing import TrainSample, pack
from mindspeed_rl.data.placement import MicroBatchPlan, padded, plan_micro_batches
from mindspeed_rl.data.routes import Ints
from mindspeed_rl.models.flops import sequence_flops
from mindspeed_rl.models.registry import CLASSIFIER, weight_table
from mindspeed_rl.models.spec import ModelSpec, read_hf_config
from mindspeed_rl.parallel.groups import check_equal_nodes
from mindspeed_rl.resharding.layouts.base import TableLayout
from mindspeed_rl.resharding.stream import TensorStream
from mindspeed_rl.resharding.transports import AllToAllTransport
from mindspeed_rl.trainer import parallel_state
from mindspeed_rl.trainer.prepared import PreparedBatch
from mindspeed_rl.trainer.train_engine import TrainEngine

_EXPORT_BUCKET_BYTES = 512 << 20

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
    from mindspeed_rl.config.validate import RunPlan
    from mindspeed_rl.launch.job import Job


def load_tokenizer(config: RLRunConfig | PretrainRunConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the run; an export, whose ``config.json`` is the model's, reads the same."""
    from transformers import AutoConfig, AutoTokenizer

    model = config.model
    how: dict[str, Any] = {}
    if model.tokenizer_name_or_path:
        # transformers chooses the class, and with it rules and added tokens, by the model's type
        how["config"] = AutoConfig.from_pretrained(model.hf_checkpoint)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        model.tokenizer_directory, **how
    )
    return tokenizer


def build_engine(
    job: Job[Any, RunPlan],
    role: str,
    num_updates: int,
    temperature: float = 1.0,
    *,
    routing: str = "free",
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
        routing=routing,
    )
    if role == "policy":
        kept_mtp(job)  # what an export would lack is told before the run, not after it
    load_weights(job, job.plan.megatron, engine.named_parameters(), tell=role == "policy")
    engine.weights_changed()
    return engine


def load_weights(
    job: Job[Any, RunPlan],
    layout: TableLayout,
    params: Mapping[str, torch.Tensor],
    tell: bool = True,
) -> None:
    """Fill ``params`` from ``--hf-checkpoint``; ``tell`` on rank 0 what is left out. Local.

    Raises:
        ValueError: weights that do not fit the model.
    """
    checkpoint = job.config.model.hf_checkpoint
    mtp = mtp_tensors(layout.spec, weight_files(checkpoint))
    if mtp and tell:
        job.say(
            f"--hf-checkpoint {checkpoint}: left out are {len(mtp)} tensors of multi-token "
            f"prediction (layers: {layout.spec.num_mtp_layers})"
        )
    load_hf(checkpoint, layout, job.world.rank, params, left_out=mtp)


def initialize_parallel(job: Job[Any, RunPlan]) -> None:
    """Create the training grid's process groups. Collective: the world."""
    check_equal_nodes(job.world.local_size)
    parallel_state.initialize(job.plan.parallel, job.config.train.seed)


def local_batches(
    job: Job[Any, RunPlan],
    engine: TrainEngine,
    samples: Sequence[TrainSample],
    lengths: Sequence[int] | None = None,
) -> list[PreparedBatch]:
    """This data-parallel rank's share of the samples of one optimizer step, packed.

    All ranks are given all samples in the same order. Where ``lengths`` (tokens of each) are given,
    only the samples of this rank are looked at. Local.
    """
    plan = plan_batches(job, [s.length for s in samples] if lengths is None else lengths)
    mine = plan.assignment[job.plan.parallel.coords(job.world.rank).dp]
    return pack_planned(job, engine, plan, {i: samples[i] for micro in mine for i in micro})


def plan_batches(
    job: Job[Any, RunPlan], lengths: Sequence[int], moved: Ints | None = None
) -> MicroBatchPlan:
    """Who trains on what in one optimizer step, from the tokens of each sample. Pure.

    Args:
        job: the run.
        lengths: tokens of each sample.
        moved: [samples, data-parallel ranks] what moves if it trains there; samples stay where
            they are as far as balance leaves a choice.
    """
    parallel, train = job.plan.parallel, job.config.train
    chunks = _chunks(job)
    shards = parallel.tp if job.config.parallel.shards_sequence else 1
    plan = plan_micro_batches(
        lengths,
        dp=parallel.dp,
        micro_batch_size=train.micro_batch_size,
        max_tokens=train.max_tokens_per_micro_batch,
        multiple=chunks * shards,
        sequence_multiple=chunks,
        count_multiple=parallel.pp if parallel.stages.vpp > 1 else 1,
        cost=SequenceCost(*sequence_flops(job.plan.spec)),
    )
    return plan if moved is None else keep_near(plan, [padded(n, chunks) for n in lengths], moved)


def pack_planned(
    job: Job[Any, RunPlan],
    engine: TrainEngine,
    plan: MicroBatchPlan,
    samples: Mapping[int, TrainSample],
) -> list[PreparedBatch]:
    """The micro-batches of this rank. Local.

    Args:
        job: the job.
        engine: whose passes they are for.
        plan: of one optimizer step.
        samples: of this rank at least, by position in the plan.
    """
    mine = plan.assignment[job.plan.parallel.coords(job.world.rank).dp]
    return engine.prepare(
        [pack([samples[i] for i in mb], plan.padded_length, _chunks(job)) for mb in mine]
    )


def _chunks(job: Job[Any, RunPlan]) -> int:
    """Of every sequence, under context parallelism."""
    cp = job.plan.parallel.cp
    return 2 * cp if cp > 1 else 1


def export_hf(
    job: Job[Any, RunPlan], engine: TrainEngine, target: str, step: int, checkpoint: str = ""
) -> None:
    """Write the model after ``step`` as a Hugging Face checkpoint. Collective: the world.

    ``checkpoint`` is where the config comes from; empty: ``--hf-checkpoint``. The tokenizer is that
    of the run. Tensors travel to the writer in rounds and are written as they come. Rank 0 writes;
    nodes that do not share its file system write a copy of their own, so that the next job finds
    it.
    """
    rank, platform = job.world.rank, job.platform
    source, value_head = engine.layout, engine.spec.value_head
    writers = export_writers(Path(target), rank, job.world.size, job.world.local_size)
    dtype = torch.bfloat16 if job.config.train.bf16 else torch.float32
    stream = TensorStream(
        source,
        writers,
        rank=rank,
        ranks_per_node=job.world.local_size,
        transport=AllToAllTransport(job.world.size, platform.device, None),
        dtype=dtype,
        bucket_bytes=_EXPORT_BUCKET_BYTES,
    )
    with ExitStack() as stack:
        writer = None
        if rank in writers:
            checkpoint = checkpoint or job.config.model.hf_checkpoint
            keys = value_export_keys(checkpoint, engine.spec) if value_head else export_keys(job)
            tokenizer = job.config.model.tokenizer_directory
            opened = HfWriter(
                target, checkpoint, dtype, step=step, tokenizer=tokenizer, config_keys=keys
            )
            writer = stack.enter_context(opened)
        stream.run(engine.named_parameters(), writer.add if writer else None)
        if writer and not value_head:
            for name, file in kept_mtp(job).items():
                writer.add(name, read_tensor(file, name))
    dist.barrier()


def kept_mtp(job: Job[Any, RunPlan]) -> dict[str, Path]:
    """With ``--keep-mtp``: the tensors to copy unchanged into every export, and their files.

    Raises:
        ValueError: the checkpoint has none.
    """
    if not job.config.checkpoint.keep_mtp:
        return {}
    checkpoint = job.config.model.hf_checkpoint
    files = weight_files(checkpoint)
    found = mtp_tensors(job.plan.spec, files)
    if not found:
        raise ValueError(
            f"--keep-mtp: {checkpoint} has no multi-token-prediction layers; remove the flag, or "
            "give a checkpoint that has them (num_nextn_predict_layers in config.json, and "
            "weights behind the last layer)"
        )
    return {name: files[name] for name in found}


def export_keys(job: Job[Any, RunPlan]) -> dict[str, Any]:
    """Keys of the export's config.json that may differ from the source's."""
    keys: dict[str, Any] = dict(weight_table(job.plan.spec.family).config_keys)
    if job.plan.spec.num_mtp_layers and not job.config.checkpoint.keep_mtp:
        keys["num_nextn_predict_layers"] = 0
    return keys


def value_export_keys(checkpoint: str, spec: ModelSpec) -> dict[str, Any]:
    """Keys of config.json that make of a causal model's config that of a classifier."""
    names = read_hf_config(checkpoint)["architectures"]
    keys: dict[str, Any] = dict(weight_table(spec.family).config_keys)
    if spec.num_mtp_layers:
        keys["num_nextn_predict_layers"] = 0
    return keys | {
        "architectures": [name.replace("ForCausalLM", CLASSIFIER) for name in names],
        "id2label": {"0": "value"},
        "label2id": {"value": 0},
    }
