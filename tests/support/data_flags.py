"""The flags that published MindSpeed-LLM scripts pass, in their order, paths replaced."""


def _argv(text: str) -> list[str]:
    return text.split()


# examples/mcore/qwen3/pretrain_qwen3_8b_4K_ptd_A3.sh
QWEN3_8B_PRETRAIN = _argv("""
--use-mcore-models --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec
--qk-layernorm --tokenizer-name-or-path PATH --max-position-embeddings 4096 --num-layers 36
--hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32
--tokenizer-type PretrainedFromHF --make-vocab-size-divisible-by 1
--padded-vocab-size 151936 --rotary-base 1000000 --untie-embeddings-and-output-weights
--disable-bias-linear --position-embedding-type rope --normalization RMSNorm --swiglu
--attention-softmax-in-fp32 --group-query-attention --num-query-groups 8 --norm-epsilon 1e-6
--ckpt-format torch --data-path PATH --handler-name GeneralPretrainHandler --split 100,0,0
--log-interval 1 --save-interval 2000 --eval-interval 2000 --eval-iters 0 --no-load-optim
--no-load-rng --use-flash-attn --use-fused-rotary-pos-emb --use-rotary-position-embeddings
--use-fused-swiglu --use-fused-rmsnorm --no-masked-softmax-fusion
--use-distributed-optimizer --reuse-fp32-param --overlap-grad-reduce --overlap-param-gather
--use-ascend-coc --micro-batch-size 1 --global-batch-size 128 --lr 1.25e-6
--lr-decay-style cosine --min-lr 1.25e-7 --weight-decay 1e-1 --lr-warmup-fraction 0.01
--attention-dropout 0.0 --init-method-std 0.01 --hidden-dropout 0.0 --clip-grad 1.0
--adam-beta1 0.9 --adam-beta2 0.95 --initial-loss-scale 4096 --seed 42 --bf16
--train-iters 2000 --seq-length 4096 --tensor-model-parallel-size 2
--pipeline-model-parallel-size 1 --enable-hf2mg-convert --model-type-hf qwen3 --load PATH
--save PATH --distributed-backend nccl --transformer-impl local
""")
# examples/mcore/qwen3/tune_qwen3_32b_32K_full_pack_A3_ptd.sh
QWEN3_32B_TUNE = _argv("""
--use-mcore-models --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec
--kv-channels 128 --qk-layernorm --tokenizer-name-or-path PATH
--max-position-embeddings 32768 --num-layers 64 --hidden-size 5120 --ffn-hidden-size 25600
--num-attention-heads 64 --tokenizer-type PretrainedFromHF --make-vocab-size-divisible-by 1
--padded-vocab-size 151936 --rotary-base 1000000 --untie-embeddings-and-output-weights
--disable-bias-linear --position-embedding-type rope --normalization RMSNorm
--norm-epsilon 1e-6 --swiglu --attention-softmax-in-fp32 --no-gradient-accumulation-fusion
--group-query-attention --num-query-groups 8 --ckpt-format torch --data-path PATH
--split 100,0,0 --handler-name AlpacaStyleInstructionHandler
--tokenizer-type PretrainedFromHF --workers 4 --log-interval 1000 --enable-thinking true
--prompt-type qwen3 --pack --neat-pack --log-interval 1 --save-interval 2000
--eval-interval 2000 --eval-iters 0 --no-load-optim --no-load-rng --log-throughput
--use-flash-attn --use-fused-rotary-pos-emb --use-rotary-position-embeddings
--use-fused-swiglu --use-fused-rmsnorm --no-masked-softmax-fusion
--use-distributed-optimizer --recompute-granularity full --recompute-method uniform
--recompute-num-layers 1 --use-ascend-mc2 --micro-batch-size 1 --global-batch-size 32
--lr 1.25e-6 --lr-decay-style cosine --min-lr 1.25e-7 --weight-decay 1e-1
--lr-warmup-fraction 0.01 --attention-dropout 0.0 --init-method-std 0.01
--hidden-dropout 0.0 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95
--initial-loss-scale 4096 --seed 42 --bf16 --train-iters 2000 --seq-length 32768
--no-shared-storage --finetune --stage sft --is-instruction-dataset --tokenizer-not-use-fast
--prompt-type qwen3 --reset-attention-mask --attention-mask-type general
--enable-hf2mg-convert --model-type-hf qwen3 --tensor-model-parallel-size 4
--pipeline-model-parallel-size 2 --context-parallel-size 2
--context-parallel-algo ulysses_cp_algo --num-layers-per-virtual-pipeline-stage 16
--sequence-parallel --load PATH --save PATH --distributed-backend nccl
--transformer-impl local
""")
# examples/mcore/qwen3_moe/pretrain_qwen3_235b_a22b_4k_A3_ptd.sh
QWEN3_235B_A22B_PRETRAIN = _argv("""
--kv-channels 128 --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec
--qk-layernorm --use-mcore-models --tokenizer-name-or-path PATH
--max-position-embeddings 4096 --noop-layers 94,95 --num-layers 96 --hidden-size 4096
--ffn-hidden-size 12288 --num-attention-heads 64 --tokenizer-type PretrainedFromHF
--make-vocab-size-divisible-by 1 --padded-vocab-size 151936 --rotary-base 1000000
--untie-embeddings-and-output-weights --disable-bias-linear --position-embedding-type rope
--normalization RMSNorm --norm-epsilon 1e-6 --swiglu --attention-softmax-in-fp32
--group-query-attention --num-query-groups 4 --ckpt-format torch --data-path PATH
--handler-name GeneralPretrainHandler --split 100,0,0 --num-experts 128 --moe-router-topk 8
--moe-ffn-hidden-size 1536 --moe-router-load-balancing-type aux_loss --norm-topk-prob
--moe-grouped-gemm --moe-token-dispatcher-type alltoall_seq --moe-aux-loss-coeff 0.001
--moe-permutation-async-comm --moe-alltoall-overlap-comm --moe-layer-freq -1
--first-k-dense-replace -1 --log-interval 1 --save-interval 2000 --eval-interval 2000
--eval-iters 0 --no-load-optim --no-load-rng --use-flash-attn --use-fused-rotary-pos-emb
--use-rotary-position-embeddings --use-fused-swiglu --use-fused-rmsnorm
--no-masked-softmax-fusion --use-distributed-optimizer --gemm-gradient-accumulation-fusion
--reuse-fp32-param --overlap-grad-reduce --overlap-param-gather --micro-batch-size 1
--global-batch-size 1024 --lr 1.25e-6 --lr-decay-style cosine --min-lr 1.25e-7
--weight-decay 1e-1 --lr-warmup-fraction 0.01 --attention-dropout 0.0 --init-method-std 0.01
--hidden-dropout 0.0 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95
--initial-loss-scale 4096 --seed 42 --bf16 --train-iters 2000 --seq-length 4096
--no-shared-storage --disable-gloo-group --recompute-granularity full
--recompute-method block --recompute-num-layers 8 --tensor-model-parallel-size 1
--pipeline-model-parallel-size 4 --expert-model-parallel-size 32 --context-parallel-size 1
--context-parallel-algo megatron_cp_algo --num-layers-per-virtual-pipeline-stage 8
--sequence-parallel --enable-hf2mg-convert --model-type-hf qwen3-moe --load PATH --save PATH
--distributed-backend nccl --transformer-impl local
""")
# examples/mcore/deepseek3/pretrain_deepseek3_671b_4k_A3_ptd.sh
DEEPSEEK3_671B_PRETRAIN = _argv("""
--transformer-impl local --spec mindspeed_llm.tasks.models.spec.deepseek_spec layer_spec
--reset-attention-mask --gemm-gradient-accumulation-fusion --noop-layers 61,62,63
--manual-gc --manual-gc-interval 50 --no-shared-storage --use-distributed-optimizer
--use-flash-attn --use-mcore-models --tensor-model-parallel-size 2
--pipeline-model-parallel-size 8 --expert-model-parallel-size 32
--expert-tensor-parallel-size 1 --sequence-parallel --context-parallel-size 1
--context-parallel-algo ulysses_cp_algo --num-layers 64 --hidden-size 7168
--ffn-hidden-size 18432 --num-attention-heads 128 --tokenizer-type PretrainedFromHF
--tokenizer-name-or-path PATH --seq-length 4096 --max-position-embeddings 163840
--micro-batch-size 1 --global-batch-size 3840 --make-vocab-size-divisible-by 1 --lr 1.0e-5
--train-iters 2000 --lr-decay-style cosine --untie-embeddings-and-output-weights
--disable-bias-linear --attention-dropout 0.0 --init-method-std 0.02 --hidden-dropout 0.0
--position-embedding-type rope --normalization RMSNorm --use-fused-rotary-pos-emb
--use-rotary-position-embeddings --use-fused-swiglu --use-fused-rmsnorm --swiglu
--no-masked-softmax-fusion --attention-softmax-in-fp32 --min-lr 1.0e-7 --weight-decay 1e-2
--lr-warmup-iters 500 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.999
--initial-loss-scale 65536 --vocab-size 129280 --padded-vocab-size 129280
--rotary-base 10000 --norm-epsilon 1e-6 --no-load-optim --no-load-rng --bf16
--distributed-timeout-minutes 120 --ckpt-format torch --data-path PATH
--handler-name GeneralPretrainHandler --split 100,0,0 --log-interval 1 --save-interval 2000
--eval-interval 2000 --eval-iters 0 --no-save-optim --no-save-rng --multi-latent-attention
--qk-pos-emb-head-dim 64 --qk-head-dim 128 --q-lora-rank 1536 --kv-lora-rank 512
--v-head-dim 128 --qk-layernorm --mla-mm-split --mla-fa-without-pad --moe-fb-overlap
--schedules-method dualpipev --mtp-mem-efficient-logits --swap-optimizer
--recompute-granularity full --recompute-method block --recompute-num-layers 8
--beta-fast 32 --beta-slow 1 --rope-scaling-factor 40 --rope-scaling-mscale 1.0
--rope-scaling-mscale-all-dim 1.0 --rope-scaling-original-max-position-embeddings 4096
--rope-scaling-type yarn --moe-grouped-gemm --moe-permutation-async-comm
--moe-token-dispatcher-type alltoall --moe-permute-fusion --first-k-dense-replace 3
--moe-layer-freq 1 --moe-shared-expert-intermediate-size 2048 --num-experts 256
--moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-router-load-balancing-type none
--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5
--moe-aux-loss-coeff 0.0001 --seq-aux --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --moe-router-dtype fp32 --mtp-num-layers 1
--mtp-loss-scaling-factor 0.3 --enable-hf2mg-convert --model-type-hf deepseek3 --save PATH
--load PATH --transformer-impl local --distributed-backend nccl
""")
