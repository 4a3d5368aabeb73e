"""Exports trained models as Hugging Face checkpoints."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mindspeed_rl.checkpoint.hf import read_tensor, weight_files
from mindspeed_rl.checkpoint.hf_writer import HfWriter
from mindspeed_rl.checkpoint.names import mtp_tensors
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.models.registry import CLASSIFIER, weight_table
from mindspeed_rl.models.spec import ModelSpec, read_hf_config
from mindspeed_rl.parallel.small_collectives import gather_objects
from mindspeed_rl.weights.stream import TensorStream
from mindspeed_rl.weights.transports import AllToAllTransport

if TYPE_CHECKING:
    from mindspeed_rl.config import RLRunConfig
    from mindspeed_rl.launch.job import Job
    from mindspeed_rl.planning.run_plan import RLPlan, RunPlan
    from mindspeed_rl.trainer.train_engine import TrainEngine

_EXPORT_BUCKET_BYTES = 512 << 20


def export_critic(job: Job[RLRunConfig, RLPlan], critic: TrainEngine, step: int) -> None:
    """Write the critic to the folder of ``--critic-export-hf``. Collective: the world."""
    options = job.config.critic
    export_policy(job, critic, options.critic_export_hf, step, options.critic_hf_checkpoint)


def export_policy(
    job: Job[Any, RunPlan], engine: TrainEngine, target: str, step: int, checkpoint: str = ""
) -> None:
    """Write the model after ``step`` as a Hugging Face checkpoint. Collective: the world.

    ``checkpoint`` is the source of config.json; empty means ``--hf-checkpoint``. The tokenizer is
    the run's. Tensors travel to the writer in rounds and are written as they arrive. Rank 0 writes;
    nodes that do not share its file system write their own copy, so that the next job finds it.
    """
    rank, platform = job.world.rank, job.platform
    writers = export_writers(Path(target), rank, job.world.size, job.world.local_size)
    keep_mtp = job.config.checkpoint.keep_mtp and not engine.spec.value_head
    dtype = torch.bfloat16 if job.config.train.bf16 else torch.float32
    stream = TensorStream(
        engine.layout,
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
            keys = config_keys(engine.spec, checkpoint, keep_mtp)
            tokenizer = job.config.model.tokenizer_directory
            opened = HfWriter(
                target, checkpoint, dtype, step=step, tokenizer=tokenizer, config_keys=keys
            )
            writer = stack.enter_context(opened)
        stream.run(engine.named_parameters(), writer.add if writer else None)
        if writer and keep_mtp:
            for name, file in kept_mtp(job).items():
                writer.add(name, read_tensor(file, name))
    dist.barrier()


def kept_mtp(job: Job[Any, RunPlan]) -> dict[str, Path]:
    """Return the tensors that ``--keep-mtp`` copies unchanged into every export, with their files.

    Raises:
        UsageError: The checkpoint has no multi-token-prediction layers.
    """
    if not job.config.checkpoint.keep_mtp:
        return {}
    checkpoint = job.config.model.hf_checkpoint
    files = weight_files(checkpoint)
    found = mtp_tensors(job.plan.spec, files)
    if not found:
        raise UsageError(
            f"--keep-mtp: {checkpoint} has no multi-token-prediction layers; remove the flag, or "
            "give a checkpoint that has them (num_nextn_predict_layers in config.json, and "
            "weights behind the last layer)"
        )
    return {name: files[name] for name in found}


def config_keys(spec: ModelSpec, checkpoint: str, keep_mtp: bool) -> dict[str, Any]:
    """Return the keys of the export's config.json that may differ from the checkpoint's.

    Those of a value head turn a causal model's config into a classifier's.
    """
    keys: dict[str, Any] = dict(weight_table(spec.family).config_keys)
    if spec.num_mtp_layers and not keep_mtp:
        keys["num_nextn_predict_layers"] = 0
    if spec.value_head:
        names = read_hf_config(checkpoint)["architectures"]
        keys |= {
            "architectures": [name.replace("ForCausalLM", CLASSIFIER) for name in names],
            "id2label": {"0": "value"},
            "label2id": {"value": 0},
        }
    return keys


def export_writers(target: Path, rank: int, world: int, ranks_per_node: int) -> range:
    """Return the ranks that write an export. Collective: the world.

    This is rank 0 if all nodes see its directory, else the first rank of every node.

    Args:
        target: Directory to be written, as this rank names it.
        rank: Global rank.
        world: Number of ranks.
        ranks_per_node: Number of ranks on every node.
    """
    token = [os.urandom(8).hex()]
    dist.broadcast_object_list(token, 0)
    marker = target.parent / f".{target.name}.{token[0]}"
    if rank == 0:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    dist.barrier()
    seen = gather_objects(marker.exists())
    if rank == 0:
        marker.unlink()
    return range(0, world, world if all(seen) else ranks_per_node)
