"""Flags of Megatron-LM (core 0.12 to 0.16) that describe the model and its numerics.

One :class:`Group` per disposition and reason; the notation of the rows is in ``dispositions``.
"""

from mindspeed_rl.compat.dispositions import Disposition, Group

SOURCE = "Megatron-LM"

DENSE_ARCHITECTURE = Group(
    Disposition.HONOURED,
    "checked against --hf-checkpoint",
    """
    --num-layers:1 --hidden-size:1 --ffn-hidden-size:1 --num-attention-heads:1
    --group-query-attention:0 --num-query-groups:1 --kv-channels:1 --max-position-embeddings:1
    --norm-epsilon:1 --normalization:1 --position-embedding-type:1 --rotary-base:1 --swiglu:0
    --untie-embeddings-and-output-weights:0 --add-qkv-bias:0 --disable-bias-linear:0
    --make-vocab-size-divisible-by:1 --padded-vocab-size:1 --vocab-size:1 --attention-dropout:1
    --hidden-dropout:1
    """,
)
QK_NORM = Group(
    Disposition.CHECKED_ARCH,
    "compared with the query/key norm of the model family in the HF config",
    "--qk-layernorm:0",
)
MOE_ARCHITECTURE = Group(
    Disposition.CHECKED_ARCH,
    "compared with the expert numbers of the HF config",
    """
    --num-experts:1 --moe-layer-freq:1 --moe-ffn-hidden-size:1
    --moe-shared-expert-intermediate-size:1 --moe-shared-expert-gate:0 --moe-router-topk:1
    --moe-router-num-groups:1 --moe-router-group-topk:1 --moe-router-topk-scaling-factor:1
    --moe-router-score-function:1 --moe-router-enable-expert-bias:0
    """,
)
MLA_ARCHITECTURE = Group(
    Disposition.CHECKED_ARCH,
    "compared with the latent-attention numbers of the HF config",
    """
    --multi-latent-attention:0 --q-lora-rank:1 --kv-lora-rank:1 --qk-head-dim:1
    --qk-pos-emb-head-dim:1 --v-head-dim:1
    """,
)
ROPE_SCALING = Group(
    Disposition.CHECKED_ARCH,
    "compared with the rope parameters of the HF config",
    """
    --rotary-percent:1 --rotary-interleaved:0 --use-rope-scaling:0 --rope-scaling-factor:1
    --rope-type:1 --rotary-scaling-factor:1 --mscale:1 --mscale-all-dim:1
    """,
)
MTP_LAYERS = Group(
    Disposition.CHECKED_ARCH,
    "compared with num_nextn_predict_layers of the HF config",
    "--mtp-num-layers:1",
)
MTP_TRAINING = Group(
    Disposition.NO_MEANING,
    "the policy loss has no multi-token-prediction term",
    "--mtp-loss-scaling-factor:1",
)
IMPLIED_ARCHITECTURE = Group(
    Disposition.NO_MEANING,
    "the position embedding and layer spec follow from the HF config",
    """
    --use-rotary-position-embeddings:0 --no-position-embedding:0 --spec:* --use-mcore-models:0
    --onnx-safe:1 --enable-experimental:0
    """,
)
WEIGHT_INITIALISATION = Group(
    Disposition.NO_MEANING,
    "weights come from --hf-checkpoint or --load, never from a random start",
    """
    --init-method-std:1 --no-initialization:0 --use-cpu-initialization:0
    --init-model-with-meta-device:0 --embedding-init-method-std:1 --init-method-xavier-uniform:0
    --data-parallel-random-init:0
    """,
)
ROUTER_NUMERICS = Group(
    Disposition.NO_MEANING,
    "the router's dtype, order and permutation follow from the model family",
    """
    --moe-router-dtype:1 --moe-router-pre-softmax:0 --moe-router-padding-for-quantization:0
    --moe-router-padding-for-fp8:0
    """,
)
ROUTER_TRAINING = Group(
    Disposition.NO_MEANING,
    "the policy loss has no load-balancing term and router biases stay as loaded",
    """
    --moe-aux-loss-coeff:+ --moe-z-loss-coeff:1 --moe-router-load-balancing-type:+
    --moe-router-bias-update-rate:1
    """,
)
ROUTER_CHANGES = Group(
    Disposition.REFUSED,
    "trainer and engine would route tokens differently; remove the flag",
    """
    --moe-expert-capacity-factor:1 --moe-pad-expert-input-to-capacity:0
    --moe-router-force-load-balancing:0 --moe-input-jitter-eps:1=0,0.0
    --moe-apply-probs-on-input:0 --moe-enable-routing-replay:0
    """,
)
TOKEN_DROP = Group(
    Disposition.NO_MEANING,
    "read only with --moe-expert-capacity-factor, which RL refuses",
    "--moe-token-drop-policy:1",
)
UPCYCLING = Group(
    Disposition.REFUSED,
    "upcycle the checkpoint first and name the result in --hf-checkpoint",
    "--moe-use-upcycling:0 --moe-upcycling-granularity:1",
)
MODEL_VARIANTS = Group(
    Disposition.REFUSED,
    "this layer variant is in no supported model family; remove the flag",
    """
    --apply-residual-connection-post-layernorm:0 --fp32-residual-connection:0
    --apply-layernorm-1p:0 --glu-linear-offset:1=0,0.0 --activation-func-clamp-value:1
    --softmax-type:1=vanilla --window-size:1 --window-attn-skip-freq:1 --qk-l2-norm:0
    --attention-output-gate:0 --rotary-seq-len-interpolation-factor:1 --no-rope-freq:1
    --openai-gelu:0 --squared-relu:0 --quick-geglu:0 --moe-latent-size:1
    --heterogeneous-layers-config-path:1 --heterogeneous-layers-config-encoded-json:1
    --use-legacy-models:0 --apply-query-key-layer-scaling:0
    """,
)
ATTENTION_VARIANTS = Group(
    Disposition.REFUSED,
    "sparse and linear attention are in no supported model family; remove the flag",
    "--experimental-attention-variant:1 --linear-attention-freq:1",
)
ATTENTION_VARIANT_KNOBS = Group(
    Disposition.NO_MEANING,
    "read only with --experimental-attention-variant, which RL refuses",
    """
    --dsa-indexer-n-heads:1 --dsa-indexer-head-dim:1 --dsa-indexer-topk:1
    --dsa-indexer-loss-coeff:1 --dsa-indexer-use-sparse-loss:0 --linear-conv-kernel-dim:1
    --linear-key-head-dim:1 --linear-value-head-dim:1 --linear-num-key-heads:1
    --linear-num-value-heads:1
    """,
)
STATE_SPACE_MODELS = Group(
    Disposition.REFUSED,
    "Mamba and hybrid models are not supported; use a transformer decoder",
    """
    --is-hybrid-model:0 --hybrid-attention-ratio:1 --hybrid-mlp-ratio:1
    --hybrid-override-pattern:1 --mamba-state-dim:1 --mamba-head-dim:1 --mamba-num-groups:1
    --mamba-num-heads:1 --disable-mamba-mem-eff-path:0
    """,
)
ENCODER_MODELS = Group(
    Disposition.REFUSED,
    "encoder models (BERT, T5, retrievers) are not supported; use a transformer decoder",
    """
    --encoder-num-layers:1 --decoder-num-layers:1 --relative-attention-num-buckets:1
    --relative-attention-max-distance:1 --bert-no-binary-head:0 --encoder-seq-length:1
    --decoder-seq-length:1 --mask-prob:1 --short-seq-prob:1 --output-bert-embeddings:0
    --bert-embedder-type:1 --ict-head-size:1 --biencoder-projection-dim:1
    --biencoder-shared-query-context-model:0 --ict-load:1 --bert-load:1 --titles-data-path:1
    --query-in-block-prob:1 --use-one-sent-docs:0 --evidence-data-path:1
    --retriever-report-topk-accuracies:+ --retriever-score-scaling:0 --block-data-path:1
    --embedding-path:1 --indexer-batch-size:1 --indexer-log-interval:1
    --encoder-tensor-model-parallel-size:1 --encoder-pipeline-model-parallel-size:1
    --pipeline-model-parallel-split-rank:1
    """,
)
RETRO_MODELS = Group(
    Disposition.REFUSED,
    "retrieval-augmented (Retro) models are not supported; use a transformer decoder",
    """
    --retriever-seq-length:1 --retro-project-dir:1 --retro-add-retriever:0
    --retro-cyclic-train-iters:1 --retro-encoder-layers:1 --retro-encoder-hidden-dropout:1
    --retro-encoder-attention-dropout:1 --retro-num-neighbors:1 --retro-num-retrieved-chunks:1
    --retro-attention-gate:1 --retro-no-verify-neighbor-count:0
    """,
)
VISION_MODELS = Group(
    Disposition.REFUSED,
    "vision and multimodal models are not supported; use a text-only decoder",
    """
    --mrope-section:+ --num-classes:1 --img-h:1 --img-w:1 --num-channels:1 --patch-dim:1
    --classes-fraction:1 --data-per-class-fraction:1 --no-data-sharding:0 --head-lr-mult:1
    --vision-pretraining:0 --vision-pretraining-type:1 --vision-backbone-type:1
    --swin-backbone-type:1 --mask-type:1 --mask-factor:1 --iter-per-epoch:1 --sample-rate:1
    --dino-local-img-size:1 --dino-local-crops-number:1 --dino-head-hidden-size:1
    --dino-bottleneck-size:1 --dino-freeze-last-layer:1 --dino-norm-last-layer:0
    --dino-warmup-teacher-temp:1 --dino-teacher-temp:1 --dino-warmup-teacher-temp-epochs:1
    """,
)
LOW_PRECISION_TRAINING = Group(
    Disposition.REFUSED,
    "the policy trains in bf16 with fp32 master weights; remove the flag",
    """
    --fp16:0 --fp16-lm-cross-entropy:0 --fp8-format:1 --fp4-format:1 --fp8-param-gather:0
    --fp4-param-gather:0 --te-precision-config-file:1 --use-kitchen-attention:0
    --kitchen-config-file:1 --kitchen-recipe-number:1 --grad-reduce-in-bf16:0
    --use-precision-aware-optimizer:0 --main-grads-dtype:1=fp32 --main-params-dtype:1=fp32
    --exp-avg-dtype:1=fp32 --exp-avg-sq-dtype:1=fp32 --disable-bf16-reduced-precision-matmul:0
    """,
)
LOW_PRECISION_KNOBS = Group(
    Disposition.NO_MEANING,
    "read only by fp8, fp4 or fp16 training, which RL refuses",
    """
    --fp8-recipe:1 --fp8-quantizer-factory:1 --fp8-margin:1 --fp8-interval:1
    --fp8-amax-history-len:1 --fp8-amax-compute-algo:1 --no-fp8-wgrad|--disable-fp8-wgrad:0
    --first-last-layers-bf16:0 --num-layers-at-start-in-bf16:1 --num-layers-at-end-in-bf16:1
    --kitchen-attention-backend:1 --fp4-recipe:1 --fp4-quantizer-factory:1
    --reuse-grad-buf-for-mxfp8-param-ag:0 --keep-fp8-transpose-cache:0
    --keep-fp8-transpose-cache-when-using-custom-fsdp:0 --loss-scale:1 --initial-loss-scale:1
    --min-loss-scale:1 --loss-scale-window:1 --hysteresis:1
    """,
)
HIGH_PRECISION_PLACES = Group(
    Disposition.NO_MEANING,
    "softmax and gradient reduction run in fp32 in any case",
    "--attention-softmax-in-fp32:0 --accumulate-allreduce-grads-in-fp32:0",
)

GROUPS = (
    DENSE_ARCHITECTURE,
    QK_NORM,
    MOE_ARCHITECTURE,
    MLA_ARCHITECTURE,
    ROPE_SCALING,
    MTP_LAYERS,
    MTP_TRAINING,
    IMPLIED_ARCHITECTURE,
    WEIGHT_INITIALISATION,
    ROUTER_NUMERICS,
    ROUTER_TRAINING,
    ROUTER_CHANGES,
    TOKEN_DROP,
    UPCYCLING,
    MODEL_VARIANTS,
    ATTENTION_VARIANTS,
    ATTENTION_VARIANT_KNOBS,
    STATE_SPACE_MODELS,
    ENCODER_MODELS,
    RETRO_MODELS,
    VISION_MODELS,
    LOW_PRECISION_TRAINING,
    LOW_PRECISION_KNOBS,
    HIGH_PRECISION_PLACES,
)
