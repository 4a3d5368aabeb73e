"""Flags of the optimizer, the schedule, checkpoints and logs, in Megatron's spelling."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.flag import Needs, flag

PHASE_LIMIT_S = 1800.0
RECOMPUTE_MODULES = ("core_attn", "mlp", "moe")
_WITH_FULL = Needs("--recompute-granularity", ("full",))


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Training.

    A step of the run is an RL step (rollouts, rewards, update) or an SFT batch; an optimizer step
    takes ``--global-batch-size`` sequences; a micro-batch is what one rank packs into one forward
    and backward pass: whole sequences, one after the other, in a row as long as they are together.
    It holds as many tokens as ``--micro-batch-size`` of the longest sequences that the run allows,
    so shorter ones share it. The micro-batch changes memory and speed, never results: the loss is
    normalised over the global batch.
    """

    train_iters: int = flag(
        0,
        "Steps of the run: RL steps (one rollout batch each) or SFT batches. Required.",
        minimum=1,
    )
    global_batch_size: int = flag(
        0,
        "Sequences per optimizer step, over all ranks; a multiple of the data-parallel size. RL: 0 "
        "takes all samples of a step, which is on-policy; a smaller divisor makes several "
        "off-policy steps.",
        minimum=0,
    )
    micro_batch_size: int = flag(
        1,
        "Sequences of the longest length that the run allows, whose tokens fit into one forward "
        "and backward pass of a rank; more sequences are packed into it where they are shorter.",
        minimum=1,
    )
    max_tokens_per_micro_batch: int | None = flag(
        None,
        "Tokens that a rank packs into one forward and backward pass, instead of those of "
        "--micro-batch-size longest sequences. 0 packs by number: every micro-batch has "
        "--micro-batch-size sequences, whatever their length.",
        minimum=0,
    )
    equal_micro_batch_lengths: bool = flag(
        False,
        "Pad all micro-batches of an optimizer step to the longest, for kernels that want one "
        "shape. Otherwise each has its own length, a multiple that tensor and context parallelism "
        "need. --moe-token-dispatcher-type allgather implies it.",
    )
    seq_length: int = flag(
        0,
        "Tokens of a row or of the longest sequence. RL: at least --max-prompt-length plus "
        "--rollout-max-response-length, which bound every sequence; more, as in a pretraining "
        "script, has no effect.",
        minimum=0,
    )
    lr: float = flag(
        1e-6,
        "Peak learning rate. AdamW moves every weight by about this much in an update, so values "
        "above 1 destroy a model at once.",
        minimum=0.0,
        maximum=1.0,
    )
    min_lr: float = flag(
        0.0, "Learning rate at the end of decay and after it.", minimum=0.0, maximum=1.0
    )
    lr_decay_style: str = flag(
        "constant",
        "How the learning rate falls after warm-up.",
        choices=("constant", "linear", "cosine"),
    )
    lr_decay_iters: int = flag(
        0, "Optimizer steps until --min-lr, warm-up included; 0 takes all of the run.", minimum=0
    )
    lr_warmup_iters: int = flag(0, "Optimizer steps of linear warm-up from 0.", minimum=0)
    lr_warmup_fraction: float = flag(
        0.0,
        "Warm-up as a share of the decay steps; excludes --lr-warmup-iters.",
        minimum=0.0,
        maximum=1.0,
    )
    weight_decay: float = flag(0.0, "Decoupled weight decay of AdamW.", minimum=0.0)
    adam_beta1: float = flag(0.9, "Decay of the first moment of AdamW.", minimum=0.0, below=1.0)
    adam_beta2: float = flag(0.95, "Decay of the second moment of AdamW.", minimum=0.0, below=1.0)
    adam_eps: float = flag(1e-8, "Added to the denominator of AdamW.", minimum=0.0)
    clip_grad: float = flag(
        1.0, "Largest global gradient norm, above which it is scaled down; 0 is off.", minimum=0.0
    )
    bf16: bool = flag(False, "Train in bfloat16 with fp32 master weights instead of fp32.")
    seed: int = flag(
        1234, "Seed of data order, sampling and dropout.", minimum=0, maximum=2**31 - 1
    )
    recompute_granularity: str = flag(
        "none",
        "What is computed again in the backward pass instead of being kept. full: whole layers, "
        "see --recompute-method; selective: the parts of --recompute-modules in every layer. It "
        "trades time for memory and changes no result.",
        choices=("none", "selective", "full"),
    )
    recompute_method: str = flag(
        "",
        "Which layers --recompute-granularity full recomputes. uniform: all, keeping the input of "
        "every --recompute-num-layers layers; block: the first --recompute-num-layers layers of "
        "each pipeline stage (of each chunk of an interleaved pipeline), each by itself.",
        choices=("uniform", "block"),
        needs=_WITH_FULL,
    )
    recompute_num_layers: int | None = flag(
        None,
        "Layers that --recompute-method counts in; needed with it.",
        minimum=1,
        needs=_WITH_FULL,
    )
    recompute_modules: tuple[str, ...] = flag(
        ("core_attn",),
        "Parts that --recompute-granularity selective recomputes: core_attn (attention without its "
        "projections), mlp (of layers without experts), moe (experts with their dispatch).",
        nargs="+",
    )
    logprob_chunk_tokens: int = flag(
        0,
        "Response tokens whose logits over the whole vocabulary exist at one time: this x "
        "vocabulary / TP x 4 B. 0 chooses blocks of tokens and ids by memory: 1 GiB, on a CPU as "
        "much as its caches hold.",
        minimum=0,
    )


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Checkpoints.

    A run with the same flags and ``--load`` at its own ``--save`` continues where it stopped and
    gives the numbers of an uninterrupted run.
    """

    save: str = flag("", "Directory of training checkpoints (iter_0000001, ...).")
    load: str = flag(
        "",
        "Directory to resume from; its newest complete checkpoint is taken. Of checkpoints that "
        "Megatron, MindSpeed-LLM or tools/convert_checkpoint.py wrote, in any layout, the weights "
        "are taken and everything else starts from the beginning.",
    )
    save_interval: int = flag(
        0,
        "Steps of the run between checkpoints; 0 saves at the end only.",
        names=("--save-interval", "--persistent-save-interval"),
        minimum=0,
        needs=Needs("--save"),
    )
    async_save: bool = flag(
        False,
        "Write checkpoints while the next step runs. A save then takes only as long as copying the "
        "state to host memory, which must have room for the rank's share of a checkpoint once "
        "more; a thread of each rank writes it. One checkpoint is written at a time, the end of "
        "the run waits for the last, and a write that fails ends the run after the step in which "
        "it did.",
        needs=Needs("--save"),
    )
    save_interval_minutes: float = flag(
        0.0,
        "Minutes since the last checkpoint after which the next step is followed by one, beside "
        "--save-interval; 0 saves by steps alone. The clock is that of rank 0.",
        minimum=0.0,
        needs=Needs("--save"),
    )
    peer_checkpoint_steps: int = flag(
        0,
        "Steps between copies of every rank's state in the shared memory of its node and, with "
        "several nodes, of the next one; 0 makes none. After a restart the newest copies are taken "
        "instead of an older checkpoint, so that the job repeats N steps at most. It needs "
        "pretrain_scripts/launch.sh with --max-restarts, whose process keeps the copies.",
        minimum=0,
        needs=Needs("--save"),
    )
    save_total_limit: int = flag(
        0,
        "Checkpoints that --save keeps: the newest ones, and beyond them the best by "
        "--save-best-metric. Older ones are removed after a save; 0 keeps all. With 1 nothing is "
        "left to go back to when the newest is damaged.",
        minimum=0,
        needs=Needs("--save"),
    )
    save_best_metric: str = flag(
        "",
        "A name in metrics.jsonl, such as eval/accuracy or reward/mean: the checkpoint of the step "
        "with its best value is kept and named in SAVE/best_checkpoint.json.",
        needs=Needs("--save"),
    )
    save_best_direction: str = flag(
        "max",
        "Whether the largest or the smallest value of --save-best-metric is the best.",
        choices=("max", "min"),
        needs=Needs("--save-best-metric"),
    )
    exit_signal_handler: bool = flag(
        False,
        "At SIGTERM of any rank all ranks finish their step, save and end with exit code 0. "
        "Without it SIGTERM ends the job at once. torchrun that gets the signal itself kills its "
        "ranks after 30 s; pretrain_scripts/launch.sh with --max-restarts does not.",
        needs=Needs("--save"),
    )
    exit_duration_in_mins: float = flag(
        0.0,
        "Limit of the run in minutes, as of a batch queue: the run saves and ends with exit code 0 "
        "after the step that leaves too little time for another step and a save, each as long as "
        "the longest so far; 0 is no limit. The time of a job's earlier starts counts.",
        minimum=0.0,
        needs=Needs("--save"),
    )
    exit_interval: int = flag(
        0,
        "The run saves (with --save) and ends with exit code 0 after a step that this number "
        "divides; 0 runs to the last step.",
        minimum=0,
    )
    finetune: bool = flag(
        False,
        "Take only the weights from --load: step, optimizer and data order start from the "
        "beginning.",
    )
    no_save_optim: bool = flag(False, "Leave optimizer states out of checkpoints.")
    no_load_optim: bool = flag(False, "Start with fresh optimizer states despite --load.")
    no_save_rng: bool = flag(False, "Leave random states out of checkpoints.")
    no_load_rng: bool = flag(False, "Start with fresh random states despite --load.")
    allow_changed_data: bool = flag(
        False,
        "Resume although data, tokenizer or seed are not those of the checkpoint; the present "
        "data starts with a new epoch.",
    )
    export_hf: str = flag(
        "",
        "Write a Hugging Face checkpoint here at the end of the run; an earlier export is "
        "replaced, anything else is refused. RL: empty takes OUTPUT_DIR/hf.",
    )
    export_hf_interval: int = flag(
        0,
        "Steps between Hugging Face checkpoints that are written while the run goes on, beside the "
        "last one: EXPORT_HF-step20 and so on. 0 writes the last one only.",
        minimum=0,
    )
    export_hf_limit: int = flag(
        0,
        "How many of them are kept, the newest ones; 0 keeps all.",
        minimum=0,
        needs=Needs("--export-hf-interval"),
    )
    keep_mtp: bool = flag(
        False,
        "Copy the multi-token-prediction layers of --hf-checkpoint unchanged into every Hugging "
        "Face checkpoint that is written; they are never trained. Without it they are left out.",
    )


@dataclass(frozen=True, slots=True)
class LoggingConfig:
    """Logs.

    Everything a run reports lands in one folder; the terminal shows progress and its summary.
    """

    output_dir: str = flag(
        "outputs",
        "Folder for metrics.jsonl, TensorBoard files, rollouts.jsonl, curves.png and summary.json.",
    )
    overwrite_output_dir: bool = flag(
        False,
        "Replace the results of an earlier run in --output-dir. Without it a run that starts at "
        "step 0 is refused there; a resumed run adds to them.",
    )
    log_interval: int = flag(
        1, "Steps between progress lines where there is no terminal.", minimum=1
    )
    tensorboard_dir: str = flag(
        "", "Folder for TensorBoard files; empty takes OUTPUT_DIR/tensorboard."
    )
    log_level: str = flag(
        "info",
        "What is printed. debug also prints what helps with a fault of this project: the process "
        "groups of the first rank, and Python warnings of libraries that a user cannot act on.",
        choices=("info", "debug"),
    )
    log_rollouts: int = flag(4, "Sampled rollouts written to rollouts.jsonl per step.", minimum=0)
    log_rollout_tokens: bool = flag(
        False,
        "Write token ids and the engine's log-probs to rollouts.jsonl as well: all that another "
        "trainer needs to repeat the updates, with --log-rollouts at the samples of a step.",
        needs=Needs("--log-rollouts"),
    )
    phase_timeout_s: float | None = flag(
        None,
        "Limit of every phase of a step, in seconds; a longer one ends the job on all ranks. Unset "
        f"takes {PHASE_LIMIT_S:.0f}, and more for the phases that generate or train: what the "
        "longest samples of a step take at a speed below that of published runs. The start of the "
        "run and its dry run print the limits.",
        minimum=1.0,
    )

    @property
    def phase_limit_s(self) -> float:
        """Limit of a phase that does not work on the tokens of a step."""
        return PHASE_LIMIT_S if self.phase_timeout_s is None else self.phase_timeout_s


def check_warmup(train: TrainConfig) -> None:
    """Check that the length of the warm-up is said once.

    Raises:
        UsageError: It is said as a number and as a share.
    """
    if train.lr_warmup_iters and train.lr_warmup_fraction:
        raise UsageError(
            f"--lr-warmup-iters {train.lr_warmup_iters} and --lr-warmup-fraction "
            f"{train.lr_warmup_fraction:g} exclude each other; give one of them"
        )


def check_recompute(train: TrainConfig) -> None:
    """Check the flags of recomputation against each other.

    Raises:
        UsageError: The message names the flag, its value, what is allowed and the fix.
    """
    full = train.recompute_granularity == "full"
    if full and (not train.recompute_method or train.recompute_num_layers is None):
        raise UsageError(
            "--recompute-granularity full needs --recompute-method (uniform or block) and "
            "--recompute-num-layers; add them, e.g. --recompute-method uniform "
            "--recompute-num-layers 1"
        )
    unknown = sorted(set(train.recompute_modules) - set(RECOMPUTE_MODULES))
    if unknown:
        raise UsageError(
            f"--recompute-modules {' '.join(unknown)}: allowed are {', '.join(RECOMPUTE_MODULES)}"
        )
