"""Exports trained models as Hugging Face checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mindspeed_rl.adapters.peft_files import write_adapters
from mindspeed_rl.building.models import kept_mtp
from mindspeed_rl.checkpoint.interval_exports import due_target, keep_newest
from mindspeed_rl.checkpoint.writers import export_writers
from mindspeed_rl.config.outputs import export_target
from mindspeed_rl.core.export_names import adapter_folder
from mindspeed_rl.core.memory import EXPORT_BUFFER_BYTES
from mindspeed_rl.launch.start_up import start_stage
from mindspeed_rl.model_files.export import export_model, stored_tensor
from mindspeed_rl.model_files.export_folder import ExportFolder
from mindspeed_rl.model_files.export_plan import plan_export
from mindspeed_rl.models.registry import CLASSIFIER, weight_table
from mindspeed_rl.models.spec import ModelSpec, read_hf_config
from mindspeed_rl.weights.transports import make_transport

if TYPE_CHECKING:
    from mindspeed_rl.config import RLRunConfig
    from mindspeed_rl.launch.job import Job
    from mindspeed_rl.metrics.timers import PhaseTimer
    from mindspeed_rl.planning.run_plan import RLPlan, RunPlan
    from mindspeed_rl.trainer.train_engine import TrainEngine


def export_critic(job: Job[RLRunConfig, RLPlan], critic: TrainEngine, step: int) -> None:
    """Write the critic to the folder of ``--critic-export-hf``. Collective: the world."""
    options = job.config.critic
    export_policy(job, critic, options.critic_export_hf, step, options.critic_hf_checkpoint)


def export_if_due(
    job: Job[Any, RunPlan], engine: TrainEngine, step: int, timer: PhaseTimer
) -> None:
    """Write the model after ``step`` where ``--export-hf-interval`` asks for it. Collective: world.

    Older exports beyond ``--export-hf-limit`` are removed afterwards. The time counts for no step.
    """
    config = job.config
    options, last = config.checkpoint, export_target(config)
    target = due_target(options, last, step, config.train.train_iters)
    if target is None:
        return
    with timer.excluded(), job.watchdog.phase("export"):
        writers = export_policy(job, engine, str(target), step)
        if job.world.rank in writers:
            keep_newest(last, options.export_hf_limit, step)
    job.log_rank0(f"HF checkpoint after step {step}: {target}")


@start_stage("export")
def export_policy(
    job: Job[Any, RunPlan], engine: TrainEngine, target: str, step: int, checkpoint: str = ""
) -> range:
    """Write the model after ``step`` as a Hugging Face checkpoint. Collective: the world.

    ``checkpoint`` is the source of config.json; empty means ``--hf-checkpoint``. The tokenizer is
    the run's. Adapters are merged in, and written by themselves in a folder next to ``target``.
    A model of several files is written by the first rank of every pipeline stage and expert group;
    nodes that do not share a file system write a copy each, so that the next job finds it. Whole
    files of an export of the same weights that was cut off are kept.

    Returns:
        The first rank of each copy.
    """
    rank, config, per_node = job.world.rank, job.config, job.world.local_size
    writers = export_writers(Path(target), rank, job.world.size, per_node)
    keeps_mtp = config.checkpoint.keep_mtp and not engine.spec.value_head
    copied = kept_mtp(job) if keeps_mtp else {}
    dtype = torch.bfloat16 if config.train.bf16 else torch.float32
    checkpoint = checkpoint or config.model.hf_checkpoint
    extra = [stored_tensor(file, name) for name, file in copied.items()]
    folder = ExportFolder(
        Path(target),
        Path(checkpoint),
        dtype,
        step,
        Path(config.model.tokenizer_directory),
        config_keys(engine.spec, checkpoint, keeps_mtp),
    )
    kept = export_model(
        engine.layout,
        engine.merged_parameters(),
        plan_export(engine.layout, dtype, writers, per_node, extra),
        folder,
        rank=rank,
        ranks_per_node=per_node,
        transport=make_transport("auto", job.world.size, job.platform.device),
        buffer_bytes=EXPORT_BUFFER_BYTES,
        copied=copied,
    )
    if kept:
        job.log_rank0(f"{target}: kept {kept} whole files of an export that was cut off")
    if engine.adapters is not None:
        write_adapters(
            engine.adapters,
            adapter_folder(target),
            job.config.model.hf_checkpoint,
            writes=rank in writers,
        )
    dist.barrier()
    return writers


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
