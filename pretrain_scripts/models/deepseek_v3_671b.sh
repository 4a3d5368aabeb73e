# shellcheck shell=bash disable=SC2034
# Architecture flags of DeepSeek-V3 and R1 (671B), in Megatron's and MindSpeed-LLM's spelling; they
# are compared with config.json at start. Sourced by recipes; sets MODEL_ARGS.
MODEL_ARGS=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
    --max-position-embeddings 163840 --vocab-size 129280
    --position-embedding-type rope --rotary-base 10000
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
)
MLA_ARGS=(
    --multi-latent-attention --qk-layernorm --q-lora-rank 1536 --kv-lora-rank 512
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
)
ROPE_ARGS=(
    --rope-scaling-type yarn --rope-scaling-factor 40 --beta-fast 32 --beta-slow 1
    --rope-scaling-mscale 1.0 --rope-scaling-mscale-all-dim 1.0
    --rope-scaling-original-max-position-embeddings 4096
)
MOE_ARGS=(
    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --first-k-dense-replace 3 --moe-layer-freq 1
    --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --norm-topk-prob
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall
)
MODEL_ARGS+=("${MLA_ARGS[@]}" "${ROPE_ARGS[@]}" "${MOE_ARGS[@]}")
