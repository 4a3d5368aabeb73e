#!/usr/bin/env bash
# The main job on one machine without accelerators: makes data and a tiny model, warms it up with a
# few supervised steps, trains it with GRPO (Megatron TP2 x PP2, four vLLM engines in the same four
# processes), evaluates on held-out prompts and exports a Hugging Face checkpoint. Grade: executed on
# a CPU.
#
# usage: pretrain_scripts/quickstart.sh [--algorithm grpo|dapo|ppo] [--seed N]
#                                       [--control shuffled-rewards] [--output DIR]
#                                       [--family qwen2|llama|qwen3|qwen3_moe|deepseek_v3]
#                                       [flags of mindspeed_rl.train_rl ...]
#
# DAPO: higher upper clip, dynamic sampling, soft overlong punishment, two updates per step. PPO: a
# critic, its returns and two updates per step.
# With --rl-dry-run among the flags the RL run is predicted instead, without warm start. With
# --orchestrator ray Ray starts the ranks of the RL run (needs the extra ray), with the same result.
#
# Families with experts train with expert parallelism 2 and roll out in another layout.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SEED="${SEED:-0}"
FAMILY="${FAMILY:-qwen2}"
OUTPUT="${OUTPUT:-}"
CONTROL="${CONTROL:-none}"
ALGORITHM="${ALGORITHM:-grpo}"
EXTRA=()
DRY_RUN=0
ORCHESTRATOR=torchrun
while (( $# )); do
    case "$1" in
        -h|--help) sed -n '2,18s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        --seed|--control|--output|--family|--algorithm)
            (( $# >= 2 )) || { echo "quickstart: $1 needs a value" >&2; exit 2; }
            case "$1" in
                --seed) SEED="$2" ;; --control) CONTROL="$2" ;;
                --output) OUTPUT="$2" ;; --family) FAMILY="$2" ;;
                --algorithm) ALGORITHM="$2" ;;
            esac
            shift 2 ;;
        --orchestrator)
            (( $# >= 2 )) || { echo "quickstart: $1 needs a value" >&2; exit 2; }
            ORCHESTRATOR="$2"; EXTRA+=("$1" "$2"); shift 2 ;;
        --rl-dry-run) DRY_RUN=1; EXTRA+=("$1"); shift ;;
        *) EXTRA+=("$1"); shift ;;
    esac
done
case "$ALGORITHM" in
    grpo) ALGORITHM_ARGS=() ;;
    dapo)
        ALGORITHM_ARGS=(
            --rl-preset dapo --rl-max-resample 2 --global-batch-size 256 --lr 3e-4
            --rollout-max-response-length 10 --rl-overlong-buffer 3
        ) ;;
    ppo)
        ALGORITHM_ARGS=(
            --rl-preset ppo --global-batch-size 256 --lr 3e-4
            --critic-lr 2e-3 --critic-warmup-steps 10
        ) ;;
    *) echo "quickstart: --algorithm $ALGORITHM: allowed are grpo, dapo, ppo" >&2; exit 2 ;;
esac
NAME="seed$SEED"; [[ "$CONTROL" == none ]] || NAME+="-$CONTROL"
[[ "$FAMILY" == qwen2 ]] || NAME="$FAMILY-$NAME"
[[ "$ALGORITHM" == grpo ]] || NAME="$ALGORITHM-$NAME"
OUTPUT="${OUTPUT:-$ROOT/outputs/quickstart/$NAME}"

NNODES="${NNODES:-1}"
if (( NNODES > 1 )) && [[ -z "${MASTER_PORT:-}" || -z "${MASTER_ADDR:-}" ]]; then
    echo "quickstart: NNODES=$NNODES needs MASTER_ADDR and MASTER_PORT, the same on every node" >&2
    exit 2
fi

KV_CACHE_GB=0.0078125
WARM_ITERS=45
ROLLOUT_LAYOUT=(--rollout-tp 1)
case "$FAMILY" in
    qwen2|llama|qwen3)
        LAYOUT=(--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2) ;;
    qwen3_moe)
        LAYOUT=(--pipeline-model-parallel-size 2 --expert-model-parallel-size 2)
        ROLLOUT_LAYOUT=(--rollout-tp 2 --rollout-ep 2) ;;
    deepseek_v3)
        LAYOUT=(--tensor-model-parallel-size 2 --sequence-parallel
                --expert-model-parallel-size 2 --expert-tensor-parallel-size 1)
        KV_CACHE_GB=0.03125
        WARM_ITERS=100 ;;  # with fewer it forgets to end its answers before it learns to sort
    *)
        echo "quickstart: --family $FAMILY: allowed are qwen2, llama, qwen3, qwen3_moe," \
            "deepseek_v3" >&2
        exit 2 ;;
esac

EXTRAS=(); [[ "$ORCHESTRATOR" != ray ]] || EXTRAS=(--ray)
PYTHON="$("$ROOT/pretrain_scripts/setup_env.sh" "${EXTRAS[@]}" | tail -n 1)"
"$ROOT/pretrain_scripts/check_package.sh" "$PYTHON"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

NPROC_PER_NODE="${NPROC_PER_NODE:-4}"
NODE_RANK="${NODE_RANK:-0}"
MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
MASTER_PORT="${MASTER_PORT:-$(( 20000 + RANDOM % 20000 ))}"
DATA="$OUTPUT/data"; MODEL="$OUTPUT/model"; WARM="$OUTPUT/warm_start"; RL="$OUTPUT/rl"
mkdir -p "$OUTPUT"

DISTRIBUTED_ARGS=(
    --nproc-per-node "$NPROC_PER_NODE" --nnodes "$NNODES" --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"
)
MODEL_PARALLEL_ARGS=(
    "${LAYOUT[@]}" --use-distributed-optimizer --make-vocab-size-divisible-by 8
)
TRAIN_ARGS=(--clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.0 --seed "$SEED")
# So many samples in a row, all rows of one length: sums are taken in the order of docs/quickstart.md.
TRAIN_ARGS+=(--max-tokens-per-micro-batch 0 --equal-micro-batch-lengths)
SFT_ARGS=(
    --sft-data "$DATA/sft.jsonl" --train-iters "$WARM_ITERS" --global-batch-size 64 --micro-batch-size 64
    --lr 2e-3 --lr-warmup-iters 20 --log-interval 15
    --output-dir "$WARM" --overwrite-output-dir --export-hf "$WARM/hf"
)
RL_ARGS=(
    --perform-rl-step --prompt-data "$DATA/rl.jsonl" --eval-prompt-data "$DATA/heldout.jsonl"
    --train-iters 200 --grpo-prompts-per-step 64 --grpo-group-size 8 --grpo-kl-beta 0.0
    --micro-batch-size 256 --lr 5e-4 --lr-warmup-iters 10
    --eval-interval 20 --log-interval 10 --rl-control "$CONTROL"
    --reward-function "$ROOT/pretrain_scripts/rewards_digit_sort.py:sorted_digits"
    --output-dir "$RL" --overwrite-output-dir
)
ROLLOUT_ARGS=(
    "${ROLLOUT_LAYOUT[@]}" --max-prompt-length 16 --rollout-max-response-length 7
    --rollout-kv-cache-gb "$KV_CACHE_GB" --vllm-block-size 32 --vllm-max-num-seqs 256
)

RAY_ARGS=()
[[ "$ORCHESTRATOR" != ray ]] ||
    RAY_ARGS=(--ray-num-nodes "$NNODES" --ray-ranks-per-node "$NPROC_PER_NODE")

make_model() {  # DIR
    "$PYTHON" "$ROOT/tools/make_tiny_model.py" --family "$FAMILY" --output "$1" --seed "$SEED"
}
predict() {  # MODEL
    "$PYTHON" -m mindspeed_rl.train_rl --hf-checkpoint "$1" --rl-dry-run \
        --rl-world-size "$(( NPROC_PER_NODE * NNODES ))" --rl-dry-run-machine cpu \
        "${MODEL_PARALLEL_ARGS[@]}" "${TRAIN_ARGS[@]}" "${RL_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
        "${ALGORITHM_ARGS[@]}" "${RAY_ARGS[@]}" "${EXTRA[@]}"
}

if (( DRY_RUN )); then
    [[ -e "$MODEL/config.json" ]] || make_model "$MODEL"
    predict "$MODEL"
    exit
fi

make_data() { "$PYTHON" "$ROOT/tools/make_task_data.py" --task digit_sort "$@"; }
launch() { "$PYTHON" -m mindspeed_rl.launch.bound_store "${DISTRIBUTED_ARGS[@]}" -m "$@"; }
launch_rl() {
    if [[ "$ORCHESTRATOR" != ray ]]; then
        launch mindspeed_rl.train_rl "$@"
    elif [[ "$NODE_RANK" == 0 ]]; then  # Ray starts the ranks of all nodes
        "$PYTHON" -m mindspeed_rl.train_rl "${RAY_ARGS[@]}" "$@"
    fi
}

echo "== a tiny model and data"
# A wrong flag of the RL run ends the job here, before anything is replaced; 3 is a doubt about memory.
NEW="$OUTPUT/new_model$NODE_RANK"
trap 'rm -rf "$NEW"' EXIT
make_model "$NEW"
predict "$NEW" > /dev/null || (( $? == 3 )) || exit 2
[[ ! -e "$RL/summary.json" ]] || echo "== replacing the results of $OUTPUT"
mkdir -p "$MODEL" && mv -f "$NEW"/* "$MODEL"
make_data --num-rows 4000 --seed "$((1000 + SEED))" --output "$DATA/sft.jsonl"
make_data --num-rows 16000 --seed "$((2000 + SEED))" --output "$DATA/rl.jsonl"
make_data --num-rows 500 --seed 3000 --split heldout --output "$DATA/heldout.jsonl" \
    --disjoint-from "$DATA/sft.jsonl" "$DATA/rl.jsonl"

echo "== warm start: supervised, on right answers only"
launch mindspeed_rl.pretrain --hf-checkpoint "$MODEL" \
    "${MODEL_PARALLEL_ARGS[@]}" "${TRAIN_ARGS[@]}" "${SFT_ARGS[@]}"

echo "== ${ALGORITHM^^}"
launch_rl --hf-checkpoint "$WARM/hf" \
    "${MODEL_PARALLEL_ARGS[@]}" "${TRAIN_ARGS[@]}" "${RL_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
    "${ALGORITHM_ARGS[@]}" "${EXTRA[@]}"

[[ "$NODE_RANK" == 0 ]] || exit 0
echo "== results in $RL"
"$PYTHON" -m json.tool "$RL/summary.json"
