# shellcheck shell=bash disable=SC2034
# Architecture flags of Qwen2.5-0.5B, in Megatron's and MindSpeed-LLM's spelling; they are compared
# with config.json at start. Sourced by recipes; sets MODEL_ARGS.
MODEL_ARGS=(
    --num-layers 24 --hidden-size 896 --ffn-hidden-size 4864 --num-attention-heads 14
    --group-query-attention --num-query-groups 2
    --max-position-embeddings 32768 --vocab-size 151936
    --position-embedding-type rope --rotary-base 1000000
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --add-qkv-bias --disable-bias-linear
    --attention-dropout 0.0 --hidden-dropout 0.0
)
