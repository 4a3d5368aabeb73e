"""Flags that MindSpeed-LLM (2.1 to 26.1 and its main branch) adds to MindSpeed.

One :class:`Group` per disposition and reason; the notation of the rows is in ``dispositions``.
"""

from mindspeed_rl.compat.dispositions import Disposition, Group

SOURCE = "MindSpeed-LLM"

MOE_ARCHITECTURE = Group(
    Disposition.CHECKED_ARCH,
    "compared with the expert numbers of the HF config",
    """
    --first-k-dense-replace:1 --norm-topk-prob:0 --moe-intermediate-size:1 --n-group:1
    --topk-group:1 --routed-scaling-factor:1 --shared-expert-gate:0
    """,
)
ROPE_SCALING = Group(
    Disposition.CHECKED_ARCH,
    "compared with the rope parameters of the HF config",
    """
    --original-max-position-embeddings:1 --beta-fast:1 --beta-slow:1 --low-freq-factor:1
    --high-freq-factor:1 --long-factor:1 --short-factor:1 --long-mscale:1 --short-mscale:1
    --dynamic-factor:1 --partial-rotary-factor:1
    """,
)
ROPE_NUMERICS = Group(
    Disposition.NO_MEANING,
    "how rotary frequencies are computed follows from the HF config",
    "--longrope-freqs-type:1",
)
NPU_KERNELS = Group(
    Disposition.NO_MEANING,
    "device kernel choice: has meaning on NPU only",
    """
    --cp-attention-mask-type:1 --mla-fa-without-pad:0 --mla-mm-split:0 --mla-fa-divide-qk:0
    --mla-up-proj-tp-overlap:0 --padded-base-length:1 --enable-mla-absorb:0 --use-fused-mlp:0
    --use-sparse-flash-attn:0 --use-mc2:0 --kv-head-repeat-before-uly-alltoall:0
    --use-deter-comp:0
    """,
)
NPU_MEMORY = Group(
    Disposition.NO_MEANING,
    "device memory saving: has meaning on NPU only",
    """
    --mla-zero-memory:0 --mla-swap-core-attn-out:0 --recompute-mla-up-proj:0
    --mtp-mem-efficient-logits:0 --mtp-after-norm:0 --recompute-mtp-norm:0
    --recompute-mtp-layer:0 --moe-unperm2-mem-optim:0 --output-layer-slice-num:1
    """,
)
NPU_MOE_OVERLAP = Group(
    Disposition.NO_MEANING,
    "expert dispatch and overlap of the device: has meaning on NPU only",
    "--moe-zerc:0",
)
LOGPROB_KERNEL = Group(
    Disposition.NO_MEANING,
    "log-probs and the loss are computed by the trainer's own chunked kernel",
    "--loss-compute-mode:1 --loss-chunk-size:1",
)
ROUTER_NUMERICS = Group(
    Disposition.NO_MEANING,
    "the router's dtype and permutation follow from the model family",
    "--router-gating-in-fp32:0 --moe-revert-type-after-topk:0 --topk-softmax-in-fp32:0",
)
ROUTER_TRAINING = Group(
    Disposition.NO_MEANING,
    "the policy loss has no load-balancing term and router biases stay as loaded",
    """
    --seq-aux:0 --moe-device-level-aux-loss-coeff:1 --moe-comm-aux-loss-coeff:1
    --use-global-aux-loss:0
    """,
)
WEIGHT_CONVERSION = Group(
    Disposition.NO_MEANING,
    "weights are read from --hf-checkpoint and converted in memory",
    "--model-type-hf:1 --enable-hf2mg-convert:0 --hf-cfg-dir:1",
)
WEIGHT_EXPORT = Group(
    Disposition.NO_MEANING,
    "HF weights are written by --export-hf",
    """
    --enable-mg2hf-convert:0 --only-convert-last-checkpoint:0 --mg-save-dir:1 --hf-save-dir:1
    --save-layer-by-layer:0
    """,
)
CHECKPOINT_FILES = Group(
    Disposition.NO_MEANING,
    "the trainer chooses its checkpoint format and how it is written and read",
    "--no-shared-storage:0 --md5-validate:0",
)
LOOSE_LOADING = Group(
    Disposition.REFUSED,
    "every weight must be found in the checkpoint; remove the flag and repair the checkpoint",
    "--load-checkpoint-loosely:0",
)
SUPERVISED_DATA = Group(
    Disposition.NO_MEANING,
    "a setting of indexed data; train_rl reads --prompt-data and pretrain reads --sft-data",
    """
    --enable-share-memory:0 --handler-name:1 --streaming:0 --hf-datasets-params:1 --datasets:+
    --json-keys:+ --split-sentences:0 --keep-newlines:0 --interleave-probs:1 --mix-strategy:1
    --dataset-dir:1 --overwrite-cache:0 --max-samples:1 --cache-dir:1 --map-keys:1 --pack:0
    --script-data-dir:1 --append-eod:0 --pad-vocab-size-to:1 --reward-tokens:+ --output-prefix:1
    --dataset-impl:1 --workers:1 --n-subs:1 --merge-group-keys:+ --no-shuffle:0 --neat-pack:0
    --padded-samples:0 --pad-to-multiple-of:1 --is-pairwise-dataset:0 --is-instruction-dataset:0
    --no-cut-token:0 --full-shuffle-instruction-dataset:0 --cut-max-seqlen:0
    --dataset-additional-keys:* --no-pad-to-seq-lengths:0 --placeholder-token:1
    --return-document-ids:0 --dataset-category:1
    """,
)
CHAT_TEMPLATE = Group(
    Disposition.NO_MEANING,
    "prompts are written by the chat template of the tokenizer in --hf-checkpoint",
    """
    --prompt-type:1 --prompt-type-path:1 --enable-thinking:1 --reasoning-effort:1
    --drop-thinking:1 --tokenizer-padding-side:1 --tokenizer-kwargs:+
    """,
)
EXTERNAL_LOGGERS = Group(
    Disposition.NO_MEANING,
    "--wandb-project asks for it",
    "--use-wandb:0",
)
PROFILING = Group(
    Disposition.NO_MEANING,
    "traces are written in the profiler's default format",
    "--profile-export-type:1 --profile-data-simplification:0",
)
RESTARTS = Group(
    Disposition.NO_MEANING,
    "torchrun restarts a failed run and --load resumes it",
    """
    --enable-high-availability:0 --enable-hbmfault-repair:0 --enable-worker-reboot:0
    --distributed-optimizer-no-replica:0 --enable-elastic-training:0
    --enable-optimizer-state-local-copy:0
    """,
)
REFUSED_FEATURE_KNOBS = Group(
    Disposition.NO_MEANING,
    "read only by a MindSpeed-LLM feature that RL refuses or does not run",
    """
    --dpo-loss-type:1 --dpo-beta:1 --dpo-label-smoothing:1 --pref-ftx:1 --refer-model-iter:1
    --simpo-beta:1 --gamma-beta-ratio:1 --simpo-loss-type:1 --simpo-label-smoothing:1
    --task-data-path:* --evaluation-batch-size:1 --greedy:0 --instruction-template:1
    --no-chat-template:0 --eval-language:1 --max-eval-samples:1 --broadcast:0
    --alternative-prompt:0 --origin-postprocess:0 --chain-of-thought:0 --hf-chat-template:0
    --add-eos-token:+ --use-kv-cache:0 --history-turns:1 --use-triton-swiglu-limit:0 --hc-mult:1
    --hc-sinkhorn-iters:1 --hc-eps:1 --use-triton-mhc:0 --use-fused-mhc:0 --index-n-heads:1
    --index-head-dim:1 --index-topk:1 --index-topk-freq:1 --index-topk-pattern:1
    --index-skip-topk-offset:1 --index-share-for-mtp-iteration:0 --scale-fmt:1
    --indexer-loss-coeff:1 --use-fused-lightning-indexer-loss:0 --init-norm-weight-in-fp32:0
    --max-batch-size:1 --original-seq-len:1 --compress-rope-theta:1 --apply-rope-no-in-complex:0
    --no-use-sparse-c8-indexer:0 --indexer-qk-quant-scheme:1 --use-triton-gdn:0
    --moba-chunk-size:1 --moba-topk:1 --moba-calc-method:1 --seq1f1b-splits:1
    --seq1f1b-balance-method:1 --enable-a2avc:1 --mtp-spec:* --lora-alpha:1
    --lora-modules-to-save:+ --lora-register-forward-hook:+ --lora-fusion:0 --lora-ckpt-filter:0
    --save-lora-to-hf:0 --lu-lora-lr:1 --lu-lora-lr-ratio:1 --qlora-save-dequantize:0
    --share-kvstates:0 --interleave-sliding-window:1 --mamba-d-ssm:1 --mamba-chunk-size:1
    --mamba-d-conv:1 --mamba-expand:1
    """,
)
TRAINING_STAGE = Group(
    Disposition.REFUSED,
    "this entry runs RL: remove --stage; see --rl-advantage-estimator and --rl-policy-loss",
    "--stage:1=sft",
)
LORA = Group(
    Disposition.REFUSED,
    "all weights are trained: remove the LoRA flags",
    "--lora-r:1 --lora-load:1 --lora-target-modules:+ --lu-lora-final-layer-index:1 --qlora:0",
)
REFERENCE_MODEL = Group(
    Disposition.REFUSED,
    "the reference model is the start checkpoint, --hf-checkpoint; remove the flag",
    "--ref-model:1",
)
REWARD_MODELS = Group(
    Disposition.REFUSED,
    "reward models of MindSpeed-LLM are not read; choose a reward function instead",
    "--reward-model:1 --verifier:0 --extract-content-for-reward:1 --missing-eos-penalty:1",
)
RAY_PPO = Group(
    Disposition.REFUSED,
    "flags of MindSpeed-LLM's Ray trainer: use --grpo-... and --rl-default-... flags",
    """
    --max-prompt-length:1 --num-samples-per-step:1 --rollout-batch-size:1 --cliprange-value:1
    --critic-mini-batch-size:1 --critic-update-epochs:1 --ppo-mini-batch-size:1 --clip-ratio:1
    --entropy-coeff:1 --ppo-epochs:1 --shuffle-minibatch:0 --do-sample:0
    --n-samples-per-prompt:1 --kl-coef:1 --gamma:1 --lam:1 --advantage-whiten:1
    --num-gpus-for-train:1 --num-gpus-for-infer:1 --inference-tensor-model-parallel-size:1
    """,
)
OFFLINE_GENERATION = Group(
    Disposition.REFUSED,
    "flag of the generation entry: use --rl-default-temperature, -top-p, -top-k or remove it",
    "--task:* --temperature:1 --top-p:1 --top-k:1 --max-length:1 --max-new-tokens:1",
)
OTHER_OPTIMIZERS = Group(
    Disposition.REFUSED,
    "the optimizer is Adam with fp32 states; remove the flag",
    "--o2-optimizer:0 --o2-gradient:0",
)
OTHER_SHARDING = Group(
    Disposition.REFUSED,
    "this schedule or sharding is not supported; remove the flag",
    "--layerwise-disaggregated-training:0 --enable-seq1f1b:0",
)
MODEL_VARIANTS = Group(
    Disposition.REFUSED,
    "this layer variant is in no supported model family; remove the flag",
    """
    --use-glm-rope:0 --scale-depth:1 --add-output-layer-bias:0 --swiglu-limit:1
    --embedding-multiplier-scale:1 --input-jitter:0 --post-norm:0 --output-multiplier-scale:1
    --scale-emb:1 --dim-model-base:1 --gelu-tanh:0 --output-logit-softcapping:1
    --attn-logit-softcapping:1 --query-pre-attn-scalar:1 --add-rmsnorm-offset:0
    --input-embeds-norm:0 --cla-share-factor:1 --input-layernorm-in-fp32:0 --geglu:0
    --no-post-layer-norm:0 --rmsnorm-weight-in-fp32:0 --no-enable-linear-qkv:0 --fc-type:1
    --shared-expert-gate-output-dimension:1=1 --num-zero-experts:1 --n-hash-layers:1
    --enable-mla-scale-q-lora:0 --enable-mla-scale-kv-lora:0 --embed-layernorm:0 --enable-mhc:0
    """,
)
ATTENTION_VARIANTS = Group(
    Disposition.REFUSED,
    "sparse, sliding-window and linear attention are in no supported model family; remove the flag",
    """
    --sliding-window:1 --o-groups:1 --o-lora-rank:1 --sliding-window-size:1
    --enable-dsa-indexer:0 --kv-compress:0 --compress-ratios:+ --full-attention-interval:1
    --use-moba-attn:0 --rope-theta:1 --rope-factor:1
    """,
)
STATE_SPACE_MODELS = Group(
    Disposition.REFUSED,
    "Mamba and hybrid models are not supported; use a transformer decoder",
    "--mamba-ngroups:1 --mamba-d-state:1 --mamba-headdim:1",
)

GROUPS = (
    MOE_ARCHITECTURE,
    ROPE_SCALING,
    ROPE_NUMERICS,
    NPU_KERNELS,
    NPU_MEMORY,
    NPU_MOE_OVERLAP,
    LOGPROB_KERNEL,
    ROUTER_NUMERICS,
    ROUTER_TRAINING,
    WEIGHT_CONVERSION,
    WEIGHT_EXPORT,
    CHECKPOINT_FILES,
    LOOSE_LOADING,
    SUPERVISED_DATA,
    CHAT_TEMPLATE,
    EXTERNAL_LOGGERS,
    PROFILING,
    RESTARTS,
    REFUSED_FEATURE_KNOBS,
    TRAINING_STAGE,
    LORA,
    REFERENCE_MODEL,
    REWARD_MODELS,
    RAY_PPO,
    OFFLINE_GENERATION,
    OTHER_OPTIMIZERS,
    OTHER_SHARDING,
    MODEL_VARIANTS,
    ATTENTION_VARIANTS,
    STATE_SPACE_MODELS,
)
