# shellcheck shell=bash disable=SC2034
# Architecture flags of Qwen3-30B-A3B, in Megatron's and MindSpeed-LLM's spelling; they are
# compared with config.json at start. Sourced by recipes; sets MODEL_ARGS.
MODEL_ARGS=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
    --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm
    --max-position-embeddings 40960 --vocab-size 151936
    --position-embedding-type rope --rotary-base 1000000
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
)
MOE_ARGS=(
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --norm-topk-prob
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall
)
MODEL_ARGS+=("${MOE_ARGS[@]}")
