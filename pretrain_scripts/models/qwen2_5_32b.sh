# shellcheck shell=bash disable=SC2034
# Architecture flags of Qwen2.5-32B, in Megatron's and MindSpeed-LLM's spelling; they are compared
# with config.json at start (the instruct model has another epsilon: NORM_EPSILON=1e-6). Sourced by
# recipes; sets MODEL_ARGS.
MODEL_ARGS=(
    --num-layers 64 --hidden-size 5120 --ffn-hidden-size 27648 --num-attention-heads 40
    --group-query-attention --num-query-groups 8
    --max-position-embeddings 131072 --vocab-size 152064
    --position-embedding-type rope --rotary-base 1000000
    --normalization RMSNorm --norm-epsilon "${NORM_EPSILON:-1e-5}" --swiglu --add-qkv-bias
    --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
)
