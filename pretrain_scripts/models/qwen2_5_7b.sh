# shellcheck shell=bash disable=SC2034
# Architecture flags of Qwen2.5-7B, in Megatron's and MindSpeed-LLM's spelling; they are compared
# with config.json at start. Sourced by recipes; sets MODEL_ARGS.
MODEL_ARGS=(
    --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28
    --group-query-attention --num-query-groups 4
    --max-position-embeddings 32768 --vocab-size 152064
    --position-embedding-type rope --rotary-base 1000000
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --add-qkv-bias --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
)
