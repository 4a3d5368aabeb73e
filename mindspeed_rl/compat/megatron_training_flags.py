"""Flags of Megatron-LM (core 0.12 to 0.16) for training, parallelism and native RL.

One :class:`Group` per disposition and reason; the notation of the rows is in ``dispositions``.
"""

from mindspeed_rl.compat.dispositions import Disposition, Group

SOURCE = "Megatron-LM"

TRAINING = Group(
    Disposition.HONOURED,
    "",
    """
    --tensor-model-parallel-size:1 --pipeline-model-parallel-size:1 --context-parallel-size:1
    --expert-model-parallel-size:1 --expert-tensor-parallel-size:1 --sequence-parallel:0
    --num-layers-per-virtual-pipeline-stage:1 --num-virtual-stages-per-pipeline-rank:1
    --decoder-first-pipeline-num-layers:1 --decoder-last-pipeline-num-layers:1
    --account-for-embedding-in-pipeline-split:0 --account-for-loss-in-pipeline-split:0
    --use-distributed-optimizer:0 --micro-batch-size:1 --global-batch-size:1 --train-iters:1
    --lr:1 --min-lr:1 --lr-decay-style:1 --lr-decay-iters:1 --lr-warmup-iters:1
    --lr-warmup-fraction:1 --weight-decay:1 --adam-beta1:1 --adam-beta2:1 --adam-eps:1
    --clip-grad:1 --seed:1 --bf16:0 --seq-length:1 --distributed-timeout-minutes:1
    """,
)
NATIVE_RL = Group(
    Disposition.HONOURED,
    "",
    """
    --perform-rl-step:0 --rl-prompts-per-eval:1 --grpo-prompts-per-step:1 --grpo-group-size:1
    --grpo-iterations:1 --grpo-clamp-eps-lower:1 --grpo-clamp-eps-upper:1 --grpo-kl-beta:1
    --grpo-entropy-term-weight:1 --rl-default-temperature:1 --rl-default-top-p:1
    --rl-default-top-k:1 --rl-inference-tensor-model-parallel-size:1
    --rl-inference-expert-model-parallel-size:1 --rl-inference-logprobs-is-correction:0
    --rl-importance-sampling-truncation-coef:1 --grpo-filter-groups-with-same-reward:0
    """,
)
NATIVE_RL_NO_CORRECTION = Group(
    Disposition.NO_MEANING,
    "off unless --rl-inference-logprobs-is-correction is given",
    "--no-rl-inference-logprobs-is-correction:0",
)
NATIVE_RL_ENGINE_LAYOUT = Group(
    Disposition.REFUSED,
    "an engine has no such axis: use --rollout-tp, -dp and -ep; allowed here is 1",
    """
    --rl-inference-pipeline-model-parallel-size:1=1
    --rl-inference-expert-tensor-model-parallel-size:1=1
    """,
)
NATIVE_RL_SWITCHING = Group(
    Disposition.NO_MEANING,
    "the phase switch frees and restores optimizer, weights and KV cache itself",
    """
    --rl-offload-optimizer-during-inference:0 --rl-offload-kv-cache-during-training:0
    --no-rl-offload-kv-cache-during-training:0 --rl-remove-kv-cache-during-training:0
    --no-rl-remove-kv-cache-during-training:0 --rl-reset-cuda-graphs:0
    --no-rl-reset-cuda-graphs:0 --rl-training-cuda-graphs:0 --no-rl-training-cuda-graphs:0
    --rl-inference-model-unified-memory-level:1 --rl-offload-inference-model-weights-when-idle:0
    --no-rl-offload-inference-model-weights-when-idle:0
    """,
)
NATIVE_RL_RESHARD = Group(
    Disposition.NO_MEANING,
    "the reshard plan moves the weights and verifies them in any case",
    "--refit-method:1 --rl-verify-model-weights-swap:0 --no-rl-verify-model-weights-swap:0",
)
NATIVE_RL_BATCHES = Group(
    Disposition.NO_MEANING,
    "sequences are packed by the trainer and scheduled by the engine in any case",
    """
    --rl-use-sequence-packing:0 --no-rl-use-sequence-packing:0
    --rl-sequence-packing-max-sequences-per-bin:1 --rl-sequence-packing-algo:1
    --rl-parallel-generation-tasks:1 --no-rl-partial-rollouts:0
    """,
)
NATIVE_RL_PROMPTS = Group(
    Disposition.NO_MEANING,
    "the chat template of --hf-checkpoint decides which special tokens a prompt has",
    """
    --rl-skip-bos-token:0 --no-rl-skip-bos-token:0
    --langrl-inference-server-conversation-template:1
    """,
)
NATIVE_RL_STALE = Group(
    Disposition.REFUSED,
    "give --partial-rollout-tokens N: how far a response grows before it may go on later",
    "--rl-partial-rollouts:0",
)
NATIVE_RL_ENVIRONMENTS = Group(
    Disposition.REFUSED,
    "environments are not read; name the prompts in --prompt-data and choose a reward",
    "--langrl-env-config:1",
)
NATIVE_RL_SERVERS = Group(
    Disposition.REFUSED,
    "rollouts run in the training processes, without a server; remove the flag",
    "--langrl-inference-server-type:1 --langrl-external-server:0 --inference-coordinator-port:1",
)
NATIVE_RL_NO_SERVER = Group(
    Disposition.NO_MEANING,
    "rollouts run in the training processes, without a server",
    "--no-langrl-external-server:0",
)
REMOVED_BATCH_SIZE = Group(
    Disposition.REFUSED,
    "removed by Megatron-LM: use --micro-batch-size",
    "--batch-size:1",
)
REMOVED_MODEL_PARALLEL = Group(
    Disposition.REFUSED,
    "removed by Megatron-LM: use --tensor-model-parallel-size",
    "--model-parallel-size:1",
)
REMOVED_WARMUP = Group(
    Disposition.REFUSED,
    "removed by Megatron-LM: use --lr-warmup-fraction",
    "--warmup:1",
)
REMOVED_EXTENDED_TP = Group(
    Disposition.REFUSED,
    "removed by Megatron-LM: use --expert-tensor-parallel-size",
    "--moe-extended-tp:0",
)
SAMPLE_COUNTS = Group(
    Disposition.REFUSED,
    "lengths are counted in steps: use --train-iters, --lr-decay-iters, --lr-warmup-iters",
    "--train-samples:1 --lr-decay-samples:1 --lr-warmup-samples:1 --lr-wsd-decay-samples:1",
)
CHANGING_BATCH = Group(
    Disposition.REFUSED,
    "the batch size is constant: use --global-batch-size alone",
    "--rampup-batch-size:* --decrease-batch-size-if-needed:0 --iterations-to-skip:+",
)
OTHER_OPTIMIZERS = Group(
    Disposition.REFUSED,
    "the optimizer is Adam with one learning rate and weight decay; remove the flag",
    """
    --optimizer:1=adam --qk-clip:0 --decoupled-lr:1 --decoupled-min-lr:1
    --apply-wd-to-qk-layernorm:0 --no-weight-decay-cond-type:1 --lr-warmup-init:1=0,0.0
    --weight-decay-incr-style:1=constant
    """,
)
OTHER_OPTIMIZER_KNOBS = Group(
    Disposition.NO_MEANING,
    "read only by optimizers and schedules that RL refuses",
    """
    --sgd-momentum:1 --muon-momentum:1 --muon-no-split-qkv:0 --muon-use-nesterov:0
    --muon-scale-mode:1 --muon-fp32-matmul-prec:1 --muon-num-ns-steps:1 --muon-tp-mode:1
    --muon-extra-scale-factor:1 --qk-clip-alpha:1 --qk-clip-threshold:1 --start-weight-decay:1
    --end-weight-decay:1
    """,
)
WSD_SCHEDULE = Group(
    Disposition.NO_MEANING,
    "read only with --lr-decay-style WSD",
    "--lr-wsd-decay-style:1 --lr-wsd-decay-iters:1",
)
LOSS_DENOMINATOR = Group(
    Disposition.NO_MEANING,
    "the policy loss has global denominators in any case",
    "--calculate-per-token-loss:0",
)
LOGPROB_KERNEL = Group(
    Disposition.NO_MEANING,
    "log-probs and the loss are computed by the trainer's own chunked kernel",
    "--cross-entropy-loss-fusion:0 --cross-entropy-fusion-impl:1",
)
SCHEDULER_RESUME = Group(
    Disposition.NO_MEANING,
    "a resumed run takes its schedule from the flags and its position from --load",
    "--override-opt-param-scheduler:0 --use-checkpoint-opt-param-scheduler:0",
)
STOP_CONDITIONS = Group(
    Disposition.NO_MEANING,
    "a run ends after --train-iters; stop it earlier and resume from --load",
    """
    --exit-interval:1 --exit-duration-in-mins:1 --exit-signal-handler:0 --exit-signal:1
    --exit-signal-handler-for-dataloader:0
    """,
)
DETERMINISM = Group(
    Disposition.NO_MEANING,
    "determinism of device kernels is not chosen by this flag; CPU runs are deterministic",
    "--deterministic-mode:0 --batch-invariant-mode:0",
)
MODULES = Group(
    Disposition.HONOURED,
    "",
    "--transformer-impl:1 --moe-grouped-gemm:0 --moe-permute-fusion:0",
)
FUSIONS = Group(
    Disposition.NO_MEANING,
    "kernels and fusions are chosen by platform; results are the same",
    """
    --attention-backend:1 --use-flash-attn:0 --no-masked-softmax-fusion:0
    --no-bias-gelu-fusion:0 --no-bias-swiglu-fusion:0 --no-bias-dropout-fusion:0
    --no-rope-fusion:0 --no-persist-layer-norm:0 --no-gradient-accumulation-fusion:0
    --disable-jit-fuser:0 --use-fused-weighted-squared-relu:0 --use-te-activation-func:0
    --no-clone-scatter-output-in-embedding|--disable-clone-scatter-output-in-embedding:0
    --moe-use-legacy-grouped-gemm:0
    --moe-router-fusion:0 --te-rng-tracker:0 --inference-rng-tracker:0
    """,
)
DISPATCH = Group(
    Disposition.NO_MEANING,
    "how tokens travel to experts changes speed, not results",
    """
    --moe-token-dispatcher-type:1 --moe-enable-deepep:0 --moe-flex-dispatcher-backend:1
    --moe-deepep-num-sms:1 --moe-hybridep-num-sms:1 --moe-shared-expert-overlap:0
    --overlap-moe-expert-parallel-comm:0 --delay-wgrad-compute:0
    --ep-overlap-early-attn-memory-release:0
    """,
)
COMMUNICATION = Group(
    Disposition.NO_MEANING,
    "communication and its overlap change speed, not results",
    """
    --overlap-grad-reduce:0 --overlap-param-gather:0
    --overlap-param-gather-with-optimizer-step:0 --no-overlap-p2p-communication:0
    --overlap-p2p-communication-warmup-flush:0
    --no-async-tensor-model-parallel-allreduce|--disable-async-tensor-model-parallel-allreduce:0
    --tp-comm-overlap:0 --tp-comm-overlap-cfg:1
    --no-tp-comm-bulk-wgrad|--disable-tp-comm-bulk-wgrad:0
    --no-tp-comm-bulk-dgrad|--disable-tp-comm-bulk-dgrad:0
    --no-tp-comm-overlap-ag|--disable-tp-comm-overlap-ag:0
    --no-tp-comm-overlap-rs|--disable-tp-comm-overlap-rs:0 --tp-comm-overlap-rs-dgrad:0
    --no-tp-comm-split-ag|--disable-tp-comm-split-ag:0
    --no-tp-comm-split-rs|--disable-tp-comm-split-rs:0 --tp-comm-bootstrap-backend:1
    --use-ring-exchange-p2p:0 --defer-embedding-wgrad-compute:0 --wgrad-deferral-limit:1
    --no-align-grad-reduce:0 --no-align-param-gather:0 --ddp-num-buckets:1 --ddp-bucket-size:1
    --ddp-pad-buckets-for-high-nccl-busbw:0 --ddp-reduce-scatter-with-fp32-accumulation:0
    --ddp-average-in-collective:0 --no-scatter-gather-tensors-in-pipeline:0 --use-nccl-ub:0
    --disable-symmetric-registration:0 --use-sharp:0 --sharp-enabled-group:1
    --create-all-gather-group:0 --nccl-communicator-config-path:1
    --high-priority-stream-groups:* --pipeline-model-parallel-comm-backend:1
    --symmetric-ar-type:1 --cp-comm-type:+ --hierarchical-context-parallel-sizes:+
    """,
)
PROCESS_GROUPS = Group(
    Disposition.NO_MEANING,
    "torchrun and the platform decide the backend and the process groups",
    """
    --distributed-backend:1 --distributed-timeout-seconds-after-init:1 --local-rank:1
    --lazy-mpu-init:1 --disable-gloo-process-groups:0
    """,
)
PIPELINE_PLACEMENT = Group(
    Disposition.NO_MEANING,
    "where a layer runs changes speed, not results; see --num-layer-list",
    """
    --microbatch-group-size-per-virtual-pipeline-stage:1 --mtp-standalone:0
    """,
)
PIPELINE_LAYOUT = Group(
    Disposition.REFUSED,
    "give the decoder layers of each stage with --num-layer-list, in the order of the layout",
    "--pipeline-model-parallel-layout:1",
)
RECOMPUTE = Group(
    Disposition.HONOURED,
    "",
    """
    --recompute-granularity:1 --recompute-method:1 --recompute-num-layers:1
    --recompute-modules:*
    """,
)
OLD_RECOMPUTE = Group(
    Disposition.NO_MEANING,
    "recomputation changes memory, not results; if memory is short use --recompute-granularity",
    """
    --recompute-activations:0 --distribute-saved-activations:0
    --checkpoint-activations:0 --moe-layer-recompute:0
    """,
)
OFFLOAD = Group(
    Disposition.NO_MEANING,
    "offloading changes memory, not results; nothing is offloaded here yet",
    """
    --cpu-offloading-num-layers:1 --fine-grained-activation-offloading:0 --offload-modules:+
    --min-offloaded-tensor-size:1 --optimizer-cpu-offload:0 --optimizer-offload-fraction:1
    --use-torch-optimizer-for-cpu-offload:0 --overlap-cpu-optimizer-d2h-h2d:0
    --no-pin-cpu-grads:0 --no-pin-cpu-params:0
    """,
)
HOST_RUNTIME = Group(
    Disposition.NO_MEANING,
    "host-side housekeeping changes speed, not results",
    """
    --empty-unused-memory-level:1 --train-sync-interval:1 --manual-gc:0 --manual-gc-interval:1
    --no-manual-gc-eval|--disable-manual-gc-eval:0
    """,
)
CUDA_GRAPHS = Group(
    Disposition.NO_MEANING,
    "graph capture changes speed, not results; the engine has its own graphs",
    """
    --enable-cuda-graph:0 --cuda-graph-warmup-steps:1 --external-cuda-graph:0
    --cuda-graph-impl:1 --cuda-graph-scope:+ --moe-pad-experts-for-cuda-graph-inference:0
    """,
)
OTHER_SHARDING = Group(
    Disposition.REFUSED,
    "FSDP and other shardings are not supported: use --use-distributed-optimizer",
    """
    --use-megatron-fsdp:0 --use-custom-fsdp:0 --use-torch-fsdp2:0
    --data-parallel-sharding-strategy:1=no_shard --num-distributed-optimizer-instances:1=1
    --hybrid-context-parallel:0 --use-tp-pp-dp-mapping:0
    """,
)
OTHER_SHARDING_KNOBS = Group(
    Disposition.NO_MEANING,
    "read only by shardings that RL refuses",
    """
    --outer-dp-sharding-strategy:1 --no-gradient-reduce-div-fusion:0 --fsdp-double-buffer:0
    --fsdp-manual-registration:0 --suggested-communication-unit-size:1
    --enable-full-sharding-in-hsdp:0 --torch-fsdp2-no-reshard-after-forward:0
    --max-seqlen-per-dp-cp-rank:1
    """,
)
FAKE_GROUPS = Group(
    Disposition.REFUSED,
    "a run needs a process per rank: start it with torchrun and remove the flag",
    "--fake-process-group:0",
)
FLAG_FILES = Group(
    Disposition.REFUSED,
    "write the flags on the command line",
    "--yaml-cfg:1",
)

GROUPS = (
    TRAINING,
    NATIVE_RL,
    NATIVE_RL_NO_CORRECTION,
    NATIVE_RL_ENGINE_LAYOUT,
    NATIVE_RL_SWITCHING,
    NATIVE_RL_RESHARD,
    NATIVE_RL_BATCHES,
    NATIVE_RL_PROMPTS,
    NATIVE_RL_STALE,
    NATIVE_RL_ENVIRONMENTS,
    NATIVE_RL_SERVERS,
    NATIVE_RL_NO_SERVER,
    REMOVED_BATCH_SIZE,
    REMOVED_MODEL_PARALLEL,
    REMOVED_WARMUP,
    REMOVED_EXTENDED_TP,
    SAMPLE_COUNTS,
    CHANGING_BATCH,
    OTHER_OPTIMIZERS,
    OTHER_OPTIMIZER_KNOBS,
    WSD_SCHEDULE,
    LOSS_DENOMINATOR,
    LOGPROB_KERNEL,
    SCHEDULER_RESUME,
    STOP_CONDITIONS,
    DETERMINISM,
    MODULES,
    FUSIONS,
    DISPATCH,
    COMMUNICATION,
    PROCESS_GROUPS,
    PIPELINE_PLACEMENT,
    PIPELINE_LAYOUT,
    RECOMPUTE,
    OLD_RECOMPUTE,
    OFFLOAD,
    HOST_RUNTIME,
    CUDA_GRAPHS,
    OTHER_SHARDING,
    OTHER_SHARDING_KNOBS,
    FAKE_GROUPS,
    FLAG_FILES,
)
