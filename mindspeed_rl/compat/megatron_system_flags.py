"""Flags of Megatron-LM (core 0.12 to 0.16) for files, data, logging and inference.

One :class:`Group` per disposition and reason; the notation of the rows is in ``dispositions``.
"""

from mindspeed_rl.compat.dispositions import Disposition, Group

SOURCE = "Megatron-LM"

FILES = Group(
    Disposition.HONOURED,
    "",
    """
    --save:1 --load:1 --save-interval|--persistent-save-interval:1 --no-save-optim:0
    --no-save-rng:0 --no-load-optim:0 --no-load-rng:0 --finetune:0 --log-interval:1
    --tensorboard-dir:1
    """,
)
CHECKPOINT_FORMAT = Group(
    Disposition.NO_MEANING,
    "the trainer chooses its checkpoint format and how it is written and read",
    """
    --ckpt-format:1 --auto-detect-ckpt-format:0
    --no-ckpt-fully-parallel-save|--disable-ckpt-fully-parallel-save:0
    --ckpt-fully-parallel-save:0 --ckpt-fully-parallel-load:0 --async-save:0
    --use-persistent-ckpt-worker:0 --ckpt-assume-constant-structure:0
    --no-strict-fsdp-dtensor-load|--disable-strict-fsdp-dtensor-load:0 --dist-ckpt-strictness:1
    --dist-ckpt-save-pre-mcore-014:0 --dist-ckpt-optim-fully-reshardable:0
    --distrib-optim-fully-reshardable-mem-efficient:0 --use-dist-ckpt:0 --dist-ckpt-format:1
    --load-model-opt-format:0 --load-main-params-from-ckpt:0 --exit-on-missing-checkpoint:0
    --save-retain-interval:1 --non-persistent-save-interval:1 --non-persistent-ckpt-type:1
    --non-persistent-global-ckpt-dir:1 --non-persistent-local-ckpt-dir:1
    --non-persistent-local-ckpt-algo:1 --replication:0 --replication-jump:1
    --replication-factor:1
    """,
)
CHECKPOINT_ARGS = Group(
    Disposition.NO_MEANING,
    "model numbers come from --hf-checkpoint",
    "--use-checkpoint-args:0",
)
CHECKPOINT_TOKENIZER = Group(
    Disposition.NO_MEANING,
    "the tokenizer is the one in --hf-checkpoint",
    "--no-use-tokenizer-model-from-checkpoint-args|"
    "--disable-use-tokenizer-model-from-checkpoint-args:0",
)
CHECKPOINT_CHOICE = Group(
    Disposition.REFUSED,
    "name the start weights in --hf-checkpoint and the folder to resume from in --load",
    "--pretrained-checkpoint:1 --ckpt-step:1",
)
CHECKPOINT_LAYOUT = Group(
    Disposition.REFUSED,
    "parallel sizes are flags of every run; give --tensor-model-parallel-size and the others",
    "--use-mp-args-from-checkpoint-args:0",
)
CHECKPOINT_CONVERSION = Group(
    Disposition.REFUSED,
    "HF weights are read and written directly (--hf-checkpoint, --export-hf); remove the flag",
    "--ckpt-convert-format:1 --ckpt-convert-save:1 --ckpt-convert-update-legacy-dist-opt-format:0",
)
TOKENIZER = Group(
    Disposition.NO_MEANING,
    "the tokenizer is the one in --hf-checkpoint",
    """
    --tokenizer-type:1 --tokenizer-model:1 --vocab-file:1 --merge-file:1 --vocab-extra-ids:1
    --tokenizer-metadata:1 --tokenizer-special-tokens:+ --legacy-tokenizer:0 --tiktoken-pattern:1
    --tiktoken-num-special-tokens:1 --tiktoken-special-tokens:+
    --tokenizer-sentencepiece-legacy:0 --tokenizer-hf-use-fast:0
    --tokenizer-hf-include-special-tokens:0 --trust-remote-code:0
    """,
)
INDEXED_DATA = Group(
    Disposition.NO_MEANING,
    "indexed data is read by pretrain with --stage pretrain; train_rl reads --prompt-data",
    "--data-path:* --split:1 --data-cache-path:1",
)
SUPERVISED_DATA = Group(
    Disposition.NO_MEANING,
    "a setting of indexed data; train_rl reads --prompt-data and pretrain reads --sft-data",
    """
    --train-data-path:* --valid-data-path:* --test-data-path:*
    --data-args-path:1 --per-split-data-args-path:1 --per-dataset-sequences-path:1
    --phase-transition-iterations:1
    --dataloader-fast-cache-load:0 --dataloader-defer-npy-index-mmap:0
    --no-mmap-bin-files:0 --mock-data:0 --num-workers:1 --eod-mask-loss:0
    --no-create-attention-mask-in-dataloader:0 --num-dataset-builder-threads:1
    --object-storage-cache-path:1 --s3-cache-path:1 --mid-level-dataset-surplus:1
    --allow-ambiguous-pad-tokens:0 --dataloader-type:1 --fim-data:0 --fim-rate:1
    --fim-spm-rate:1 --fim-split-sample:1 --fim-fragment-rate:1 --fim-no-prefix:1
    --fim-prefix-token:1 --fim-middle-token:1 --fim-suffix-token:1 --fim-pad-token:1
    --fim-eod-token:1 --sft:0 --sft-tokenizer-prompt-format:1
    """,
)
DOCUMENT_MASKS = Group(
    Disposition.NO_MEANING,
    "every packed sequence has its own mask and positions in any case",
    "--reset-position-ids:0 --reset-attention-mask:0",
)
SUPERVISED_VALIDATION = Group(
    Disposition.NO_MEANING,
    "validation of supervised loss; RL validates by reward on prompts",
    "--eval-iters:1 --eval-interval:1 --full-validation:0 --multiple-validation-sets:0",
)
NO_TRAINING = Group(
    Disposition.REFUSED,
    "a run always trains; remove the flag",
    "--skip-train:0 --test-mode:0",
)
LOGGING = Group(
    Disposition.NO_MEANING,
    "metrics, phase times and memory are logged in any case",
    """
    --log-params-norm:0 --log-throughput:0 --log-progress:0 --timing-log-level:1
    --timing-log-option:1 --tensorboard-log-interval:1 --tensorboard-queue-size:1
    --log-timers-to-tensorboard:0
    --no-log-loss-scale-to-tensorboard|--disable-log-loss-scale-to-tensorboard:0
    --log-validation-ppl-to-tensorboard:0 --log-memory-to-tensorboard:0 --log-memory-interval:1
    --log-device-memory-used:0 --log-num-zeros-in-grad:0 --log-max-attention-logit:0
    --no-barrier-with-level-1-timing:0 --log-world-size-to-tensorboard:0 --logging-level:1
    --log-energy:0 --moe-per-layer-logging:0
    """,
)
EXTERNAL_LOGGERS = Group(
    Disposition.NO_MEANING,
    "metrics go to --tensorboard-dir, and to the trackers that are asked for",
    """
    --inference-wandb-logging:0 --no-inference-wandb-logging:0 --no-one-logger:0
    --one-logger-project:1 --one-logger-run-name:1 --one-logger-async:0 --app-tag-run-name:1
    --app-tag-run-version:1
    """,
)
DIAGNOSTICS = Group(
    Disposition.NO_MEANING,
    "a diagnostic of Megatron's own loop, which RL does not run",
    """
    --log-straggler:0 --straggler-ctrlr-port:1 --straggler-minmax-count:1
    --disable-straggler-on-startup:0 --run-workload-inspector-server:0 --config-logger-dir:1
    --dump-param-to-param-group-map:1 --save-wgrads-interval:1 --save-dgrads-interval:1
    --check-weight-hash-across-dp-replicas-interval:1 --no-check-for-nan-in-loss-and-grad:0
    --check-for-large-grads:0 --check-for-spiky-loss:0 --rerun-mode:1
    --result-rejected-tracker-filename:1
    """,
)
PROFILING = Group(
    Disposition.NO_MEANING,
    "--profile takes PyTorch's profiler, torch_npu's on NPUs; memory is logged at every step",
    "--use-pytorch-profiler:0 --record-memory-history:0 --memory-snapshot-path:1",
)
FAULT_INJECTION = Group(
    Disposition.REFUSED,
    "a run with injected errors trains on wrong numbers; remove the flag",
    "--error-injection-rate:1=0,0.0",
)
FAULT_INJECTION_KNOBS = Group(
    Disposition.NO_MEANING,
    "read only with --error-injection-rate, which RL refuses",
    "--error-injection-type:1",
)
RESTARTS = Group(
    Disposition.NO_MEANING,
    "torchrun restarts a failed run and --load resumes it",
    """
    --inprocess-restart:0 --inprocess-max-iterations:1 --inprocess-monitor-thread-interval:1
    --inprocess-monitor-process-interval:1 --inprocess-progress-watchdog-interval:1
    --inprocess-heartbeat-interval:1 --inprocess-soft-timeout:1 --inprocess-hard-timeout:1
    --inprocess-heartbeat-timeout:1 --inprocess-barrier-timeout:1
    --inprocess-completion-timeout:1 --inprocess-last-call-wait:1
    --inprocess-termination-grace-time:1 --inprocess-granularity:1
    --inprocess-active-world-size:1 --inprocess-empty-cuda-cache:0 --enable-ft-package:0
    --calc-ft-timeouts:0 --ft-num-warmup-iters:1 --adlr-autoresume:0
    --adlr-autoresume-interval:1
    """,
)
STORAGE_CLIENT = Group(
    Disposition.NO_MEANING,
    "checkpoints and prompts are read from mounted folders",
    "--disable-msc:0",
)
MEGATRON_INFERENCE = Group(
    Disposition.NO_MEANING,
    "Megatron's own inference engine is not used: rollouts run on vLLM, sized by --rollout flags",
    """
    --inference-batch-times-seqlen-threshold:1 --max-tokens-to-oom:1
    --use-legacy-static-engine:0 --inference-max-requests:1 --inference-max-seq-length:1
    --inference-max-batch-size:1 --inference-dynamic-batching:0
    --inference-dynamic-batching-buffer-size-gb:1
    --inference-dynamic-batching-paused-buffer-size-gb:1
    --inference-dynamic-batching-block-size:1 --inference-dynamic-batching-chunk-size:1
    --inference-dynamic-batching-max-requests:1 --inference-dynamic-batching-max-tokens:1
    --inference-dynamic-batching-num-cuda-graphs:1
    --inference-dynamic-batching-track-paused-request-events:0
    --inference-dynamic-batching-unified-memory-level:1
    --inference-dynamic-batching-cuda-graph-max-tokens:1
    --inference-dynamic-batching-cuda-graph-mixed-prefill-count:1
    --inference-dynamic-batching-buffer-guaranteed-fraction:1
    --inference-dynamic-batching-buffer-overflow-factor:1
    --inference-dynamic-batching-max-requests-override:1
    --inference-dynamic-batching-max-tokens-override:1 --decode-only-cuda-graphs:0
    --nccl-all-reduce-for-prefill:0 --enable-chunked-prefill:0 --disable-chunked-prefill:0
    --inference-logging-step-interval:1 --inference-fuse-tp-communication:0
    --mlp-chunks-for-prefill:1 --flash-decode:0 --cache-mla-latents:0
    """,
)

GROUPS = (
    FILES,
    CHECKPOINT_FORMAT,
    CHECKPOINT_ARGS,
    CHECKPOINT_TOKENIZER,
    CHECKPOINT_CHOICE,
    CHECKPOINT_LAYOUT,
    CHECKPOINT_CONVERSION,
    TOKENIZER,
    INDEXED_DATA,
    SUPERVISED_DATA,
    DOCUMENT_MASKS,
    SUPERVISED_VALIDATION,
    NO_TRAINING,
    LOGGING,
    EXTERNAL_LOGGERS,
    DIAGNOSTICS,
    PROFILING,
    FAULT_INJECTION,
    FAULT_INJECTION_KNOBS,
    RESTARTS,
    STORAGE_CLIENT,
    MEGATRON_INFERENCE,
)
