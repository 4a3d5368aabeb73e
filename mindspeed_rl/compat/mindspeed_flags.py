"""Flags that MindSpeed (core 0.12 and 0.16 branches) adds to Megatron-LM.

One :class:`Group` per disposition and reason; the notation of the rows is in ``dispositions``.
"""

from mindspeed_rl.compat.dispositions import Disposition, Group

SOURCE = "MindSpeed"

TOKENIZER = Group(
    Disposition.HONOURED,
    "",
    "--tokenizer-name-or-path:1",
)
MOE_ARCHITECTURE = Group(
    Disposition.CHECKED_ARCH,
    "compared with the expert numbers of the HF config",
    "--n-shared-experts:1",
)
MLA_ARCHITECTURE = Group(
    Disposition.CHECKED_ARCH,
    "compared with the latent-attention numbers of the HF config",
    "--multi-head-latent-attention:0 --qk-rope-head-dim:1 --qk-nope-head-dim:1",
)
ROPE_SCALING = Group(
    Disposition.CHECKED_ARCH,
    "compared with the rope parameters of the HF config",
    """
    --rope-scaling-type:1 --rope-scaling-beta-fast:1 --rope-scaling-beta-slow:1
    --yarn-scaling-factor:1 --rope-scaling-mscale:1 --rope-scaling-mscale-all-dim:1
    --rope-scaling-original-max-position-embeddings:1
    """,
)
NOOP_LAYERS = Group(
    Disposition.HONOURED,
    "",
    "--noop-layers:1 --num-layer-list:1 --moe-tp-extend-ep:0",
)
NPU_FEATURES = Group(
    Disposition.HONOURED,
    "",
    """
    --use-fused-rotary-pos-emb:0 --use-fused-moe-token-permute-and-unpermute:0
    --swap-optimizer:0 --swap-optimizer-times:1 --npu-deterministic:0 --hccl-group-buffer:1
    """,
)
NPU_KERNELS = Group(
    Disposition.NO_MEANING,
    "device kernel choice: on NPUs attention, norms and activations are fused",
    """
    --use-fused-rmsnorm:0 --use-fused-swiglu:0 --use-fusion-attn-v2:0
    --gemm-gradient-accumulation-fusion:0 --attention-mask-type:1 --pre-tockens:1
    --next-tockens:1 --sparse-mode:1 --shape-order:1 --jit-compile:0 --optimization-level:1
    --te-gmm-mode:1 --moe-bmm-mc2:0 --no-use-rts:0 --enable-token-rearrange-opt:0
    """,
)
NPU_COMMUNICATION = Group(
    Disposition.NO_MEANING,
    "device communication choice: changes speed only; on NPUs some are refused",
    """
    --use-ascend-coc:0 --coc-mode:1 --coc-parallel-num:1 --coc-fused-kernel:0 --use-ascend-mc2:0
    --hccl-group-buffer-adaptive:0
    --hccl-ep-group-buffer-adaptive-factor:1 --hccl-op-mode:1 --hccl-slice-size:1
    --disable-gloo-group:0 --aiqos:0 --aiqos-mode:1 --aiqos-schedule:1 --aiqos-enable-roce:0
    --param-and-grad-buffer-pad:1 --reset-bucket-group-order:0 --optimize-send-recv-comm:0
    --optimize-vpp-send-recv-comm:0 --async-log-allreduce:0
    --use-multiparameter-pipeline-model-parallel:0
    """,
)
NPU_CONTEXT_PARALLEL = Group(
    Disposition.NO_MEANING,
    "the trainer gathers keys and values (as kvallgather_cp_algo); others change speed only",
    """
    --context-parallel-algo:1 --cp-window-size:1 --use-cp-send-recv-overlap:0
    --use-fused-ring-attention-update:0 --megatron-cp-in-bnsd:0 --ulysses-degree-in-cp:1
    --context-parallel-kv-cache-policy:1 --context-parallel-cache-interval:1
    --use-ulysses-allgather-kv:0 --attention-mask-on-cpu:0 --adaptive-cp-without-coarse:0
    --adaptive-cp-dynamic-attn-mask:0 --adaptive-cp-only-reschedule:0
    --adaptive-cp-manually-set-mask-list:0
    """,
)
NPU_MOE_OVERLAP = Group(
    Disposition.NO_MEANING,
    "expert dispatch and overlap of the device: changes speed only; on NPUs some are refused",
    """
    --moe-permutation-async-comm:0 --moe-alltoall-overlap-comm:0 --moe-allgather-overlap-comm:0
    --moe-fb-overlap:0 --moe-alltoall-mc2:0 --balanced-moe-experts:0
    --balanced-moe-hot-expert-num:1 --trans-hot-expert-group-num:1 --use-nanopipe:0
    --use-nanopipe-swap:0 --use-pipe-experts:0 --pipe-experts-multi-data:1
    --pipe-experts-multi-stream:0 --ampipe-degree:1 --ampipe-tp-sp-comm-overlap:0
    --dualpipev-dw-detach:0
    """,
)
NPU_MEMORY = Group(
    Disposition.NO_MEANING,
    "device memory saving: not used; on NPUs some are refused",
    """
    --virtual-optimizer:+ --smart-swap:0
    --swap-attention:0 --swap-modules:1 --swap-layer-input:0 --reuse-fp32-param:0
    --moe-zero-memory:1 --moe-zero-memory-num-layers:1 --moe-unperm2-mem-optim-swap:0
    --compress-dense:1 --compress-activation:1 --compress-optimizer:0
    """,
)
NPU_DETERMINISM = Group(
    Disposition.NO_MEANING,
    "determinism of device kernels: has meaning on NPU only",
    "--use-batch-invariant-ops:0 --use-flash-attn-npu-batch-invariant:0",
)
RECOMPUTE = Group(
    Disposition.NO_MEANING,
    "recomputation changes memory, not results; if memory is short use --recompute-granularity",
    """
    --recompute-activation-function:0 --recompute-activation-function-num-layers:1
    --recompute-norm:0 --recompute-norm-num-layers:1 --recompute-in-bubble:0
    --recompute-in-advance:0 --enable-recompute-layers-per-pp-rank:0
    --adaptive-recompute-device-size:1 --adaptive-recompute-profiling-step:1
    --adaptive-recompute-device-swap:0 --adaptive-memory-optimization:0
    --moe-adaptive-recompute-activation:0 --moe-adaptive-recompute-activation-scale:1
    """,
)
PIPELINE_PLACEMENT = Group(
    Disposition.NO_MEANING,
    "where a layer runs changes speed, not results; stages hold equal shares of the layers",
    "--pipeline-num-transformer-layers:1",
)
AUTOMATED_PIPELINE = Group(
    Disposition.NO_MEANING,
    "automated pipeline tuning changes speed and memory, not results",
    """
    --automated-pipeline:0 --automated-pipeline-perf:0 --recompute-module-list:1
    --save-memory-ratio:1 --recompute-type:1 --optimized-mbs-list:1
    --mbs-idx:1 --pp-schedule-list:1 --optimized-mbs-mode:0
    """,
)
BATCH_LENGTHS = Group(
    Disposition.NO_MEANING,
    "RL packs sequences and pads micro-batches itself",
    "--variable-seq-lengths:0 --fix-sub-seq-length:1",
)
TOKENIZER_SETTINGS = Group(
    Disposition.NO_MEANING,
    "the tokenizer is the one in --hf-checkpoint",
    "--tokenizer-not-use-fast:0",
)
PROFILING = Group(
    Disposition.NO_MEANING,
    "--profile records the host in any case; dumps attach to Megatron's own loop",
    "--profile-with-cpu:0 --op-cal-tflops:0 --npu-datadump:0 --print-expert-load:0",
)
RESTARTS = Group(
    Disposition.NO_MEANING,
    "torchrun restarts a failed run and --load resumes it",
    """
    --ttp-enabled:0 --ttp-server-ip:1 --ttp-server-port:1 --ttp-dump-dir:1
    --ttp-max-dump-ckpt-to-keep:1 --ttp-save-optimizer:0 --ttp-save-rng:0
    --ttp-dump-timeout-seconds:1 --ttp-wait-dump-file-timeout:1 --ttp-heartbeat-interval-ms:1
    --ttp-heartbeat-timeout-ms:1 --ttp-max-missed-count:1
    """,
)
REFUSED_FEATURE_KNOBS = Group(
    Disposition.NO_MEANING,
    "read only by a MindSpeed feature that RL refuses",
    """
    --auto-settings-work-dir:1 --auto-settings-ranks:1 --auto-settings-log-level:1
    --auto-settings-type:1 --target-nnodes:1 --prof-file:1 --layerzero-config:1
    --fsdp2-config-path:1 --expert-placement-freq:1 --fine-grained-expert-placement-thre:1
    --ema-decay:1 --muon-nesterov:0 --muon-coefficient-type:1 --muon-scalar-optimizer:1 --tp-x:1
    --tp-y:1 --enable-overlap-ag-with-matmul:0 --enable-overlap-matmul-with-rs:0
    --enable-backward-overlap-ag-with-matmul:0 --nd1-dim1-size:1 --nd2-dim1-size:1
    --no-use-gmm-fp8:0 --te-comparison-with-cpu:0 --te-comparison-with-bf16:0
    --fp8-reuse-quantized-weight:0 --qat-quant-block-size:1 --no-qad-enable:0
    --qad-teacher-load:1 --kl-temperature:1 --kl-loss-weight:1 --kl-loss-reduction:1
    --use-naive-l2norm:0 --use-dsa-absorb:0 --use-fused-lightning-indexer:0
    --use-fused-sparse-flash-attention:0 --use-fused-lightning-indexer-kl-loss:0
    --apply-rope-in-complex:0 --alibi-fusion-attn-type:1 --alibi-diagonal-opposite:0
    --square-alibi-mask:0 --fill-neg-inf:0 --expert-interval:1 --moe-train-capacity-factor:1
    --noisy-gate-policy:1 --moe-no-drop:0 --moe-dynamic-padding:0 --moe-use-sinkhorn:0
    """,
)
LAUNCHER = Group(
    Disposition.REFUSED,
    "this is an argument of torchrun: put it before -m mindspeed_rl.train_rl",
    "--nnodes:1 --nproc-per-node:1 --node-rank:1 --master-addr:1 --master-port:1",
)
AUTO_SETTINGS = Group(
    Disposition.REFUSED,
    "layouts are not searched for: set the parallel sizes and remove the flag",
    "--auto-settings:0",
)
PIPELINE_SCHEDULES = Group(
    Disposition.NO_MEANING,
    "the pipeline runs 1F1B; the schedule changes speed and memory, not results",
    "--schedules-method:1",
)
EXPERT_PLACEMENT = Group(
    Disposition.REFUSED,
    "moved experts contradict the reshard plan; remove the flag",
    "--enable-expert-placement:0 --enable-fine-grained-expert-placement:0",
)
ROUTER_CHANGES = Group(
    Disposition.REFUSED,
    "trainer and engine would route tokens differently; remove the flag",
    "--fix-router:0",
)
OTHER_SHARDING = Group(
    Disposition.REFUSED,
    "the reshard plan knows no such sharding: use tensor, pipeline, context, expert sizes",
    """
    --layerzero:0 --enable-zero3:0 --tp-2d:0 --use-nd-matmul:0 --unaligned-linear:0
    --dist-train:0
    """,
)
OTHER_OPTIMIZERS = Group(
    Disposition.REFUSED,
    "the optimizer is Adam with fp32 states; remove the flag",
    """
    --optimizer-selection:1=fused_adamw,fused_torch_adamw --quant-states:1 --quant-grads:0
    --use-ema:0
    """,
)
MODEL_VARIANTS = Group(
    Disposition.REFUSED,
    "this layer variant is in no supported model family; remove the flag",
    "--moe-model-type:1=megatron_moe --add-dense-bias:0 --skip-bias-add:0 --additional-config:1",
)
QUANTISED_TRAINING = Group(
    Disposition.REFUSED,
    "the policy trains in bf16 with fp32 master weights; remove the flag",
    "--qat-scheme:1 --qad-enable:0",
)
AI_FRAMEWORK = Group(
    Disposition.REFUSED,
    "training runs on PyTorch; remove the flag",
    "--ai-framework:1=pytorch",
)

GROUPS = (
    TOKENIZER,
    MOE_ARCHITECTURE,
    MLA_ARCHITECTURE,
    ROPE_SCALING,
    NOOP_LAYERS,
    NPU_FEATURES,
    NPU_KERNELS,
    NPU_COMMUNICATION,
    NPU_CONTEXT_PARALLEL,
    NPU_MOE_OVERLAP,
    NPU_MEMORY,
    NPU_DETERMINISM,
    RECOMPUTE,
    PIPELINE_PLACEMENT,
    AUTOMATED_PIPELINE,
    BATCH_LENGTHS,
    TOKENIZER_SETTINGS,
    PROFILING,
    RESTARTS,
    REFUSED_FEATURE_KNOBS,
    LAUNCHER,
    AUTO_SETTINGS,
    PIPELINE_SCHEDULES,
    EXPERT_PLACEMENT,
    ROUTER_CHANGES,
    OTHER_SHARDING,
    OTHER_OPTIMIZERS,
    MODEL_VARIANTS,
    QUANTISED_TRAINING,
    AI_FRAMEWORK,
)
