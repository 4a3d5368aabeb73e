"""Flags of the optimizer, the schedule, checkpoints and logs, in Megatron's spelling."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.config.flag import flag


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Training."""

    train_iters: int = flag(
        0, "Steps of the run: RL steps (one rollout batch each), or SFT batches.", minimum=0
    )
    global_batch_size: int = flag(
        0,
        "Sequences per optimizer step. RL: 0 takes the whole rollout batch, so that training is "
        "on-policy; smaller divisors of it make several off-policy steps.",
        minimum=0,
    )
    micro_batch_size: int = flag(
        1, "Sequences packed into one micro-batch (forward and backward pass).", minimum=1
    )
    max_tokens_per_micro_batch: int = flag(
        0, "Pack by tokens instead of --micro-batch-size; 0: off. Unit: tokens.", minimum=0
    )
    seq_length: int = flag(
        0,
        "Longest sequence, prompt plus response, in tokens; 0: prompt limit plus response limit.",
        minimum=0,
    )
    lr: float = flag(1e-6, "Peak learning rate.", minimum=0.0)
    min_lr: float = flag(0.0, "Learning rate at the end of decay.", minimum=0.0)
    lr_decay_style: str = flag(
        "constant", "Shape after warm-up.", choices=("constant", "linear", "cosine")
    )
    lr_decay_iters: int = flag(0, "Optimizer steps of decay; 0: all of the run.", minimum=0)
    lr_warmup_iters: int = flag(0, "Optimizer steps of linear warm-up.", minimum=0)
    lr_warmup_fraction: float = flag(
        0.0, "Warm-up as a share of the decay steps; excludes --lr-warmup-iters.", minimum=0.0
    )
    weight_decay: float = flag(0.0, "AdamW weight decay.", minimum=0.0)
    adam_beta1: float = flag(0.9, "AdamW beta 1.", minimum=0.0)
    adam_beta2: float = flag(0.95, "AdamW beta 2.", minimum=0.0)
    adam_eps: float = flag(1e-8, "AdamW epsilon.", minimum=0.0)
    clip_grad: float = flag(1.0, "Clip the global gradient norm; 0: off.", minimum=0.0)
    bf16: bool = flag(False, "Train in bfloat16 with fp32 master weights; default fp32.")
    seed: int = flag(1234, "Seed of data order, sampling and dropout.", minimum=0)
    logprob_chunk_tokens: int = flag(
        1024,
        "Response tokens whose logits exist at one time; memory is this x vocabulary / TP x 4 B.",
        minimum=1,
    )


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Checkpoints."""

    save: str = flag("", "Directory of training checkpoints (iter_0000001, ...).")
    load: str = flag("", "Directory to resume from; its newest complete checkpoint is taken.")
    save_interval: int = flag(0, "Steps between checkpoints; 0: only at the end.", minimum=0)
    finetune: bool = flag(
        False, "Take only the weights from --load: step, optimizer and data order start anew."
    )
    no_save_optim: bool = flag(False, "Leave the optimizer out of checkpoints.")
    no_load_optim: bool = flag(False, "Start with a fresh optimizer.")
    no_save_rng: bool = flag(False, "Leave random states out of checkpoints.")
    no_load_rng: bool = flag(False, "Start with fresh random states.")
    export_hf: str = flag("", "Write a Hugging Face checkpoint here at the end of the run.")


@dataclass(frozen=True, slots=True)
class LoggingConfig:
    """Logs."""

    output_dir: str = flag(
        "outputs", "metrics.jsonl, TensorBoard files, rollouts.jsonl, curves.png, summary.json."
    )
    log_interval: int = flag(1, "Steps between progress lines without a terminal.", minimum=1)
    tensorboard_dir: str = flag("", "TensorBoard files; default: OUTPUT_DIR/tensorboard.")
    log_rollouts: int = flag(4, "Sampled rollouts written to rollouts.jsonl per step.", minimum=0)
    phase_timeout_s: float = flag(
        1800.0, "A phase of a step that takes longer ends the job, in seconds.", minimum=1.0
    )
