# shellcheck shell=bash
# How recipes start an entry; sourced after NPUS_PER_NODE (or GPUS_PER_NODE), NNODES, NODE_RANK,
# MASTER_ADDR and MASTER_PORT are set. Among the arguments of launch
#   --rl-dry-run   starts nothing: one process predicts the run, on any machine with python 3.11
#                  and numpy
#   --doctor       starts the ranks, looks at packages, environment and devices, tries every process
#                  group of the layout, and ends
# With --orchestrator ray, or ORCHESTRATOR=ray, the recipe is run once, on a node of a Ray cluster,
# which starts the ranks of all nodes.
# What a node prints also goes to $LOG_DIR/node<rank>.log where LOG_DIR is set; the exit code is the
# one of the run.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
RANKS_PER_NODE="${NPUS_PER_NODE:-${GPUS_PER_NODE:-1}}"
WORLD_SIZE=$(( RANKS_PER_NODE * NNODES ))
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    [[ ! -x "$ROOT/.venv/bin/python" ]] || PYTHON="$ROOT/.venv/bin/python"
fi

# npu_environment: what HCCL must know before a run; the run sets how long a collective may take
npu_environment() {
    export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-3600}"
    # Listens on the host where nothing else does; MASTER_PORT stays outside.
    export HCCL_IF_BASE_PORT="${HCCL_IF_BASE_PORT:-60000}"
    export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-1}"
    export CUDA_DEVICE_MAX_CONNECTIONS=1
}

# has_flag FLAG ARG...: whether FLAG is among the arguments, with dashes or underscores
has_flag() {
    local flag="$1" argument
    shift
    for argument in "$@"; do
        [[ "${argument//_/-}" != "$flag" ]] || return 0
    done
    return 1
}

# config_of DIR PUBLISHED ARG...: DIR; before it is downloaded, the published config.json for a dry run
# and for the doctor
config_of() {
    local checkpoint="$1" published="$ROOT/pretrain_scripts/models/configs/$2.json"
    shift 2
    if [[ ! -e "$checkpoint" ]] && { has_flag --rl-dry-run "$@" || has_flag --doctor "$@"; }; then
        echo "$published"
    else
        echo "$checkpoint"
    fi
}

# is_in_ray ARG...: whether --orchestrator ray is among the arguments
is_in_ray() {
    [[ " $* " == *" --orchestrator ray "* || " $* " == *" --orchestrator=ray "* ]]
}

# launch MODULE ARG...
launch() {
    local module="$1" argument
    local arguments=()
    shift
    if [[ "${ORCHESTRATOR:-torchrun}" == ray ]]; then
        set -- --orchestrator ray --ray-address "${RAY_ADDRESS:-auto}" "$@"
    fi
    if is_in_ray "$@"; then
        set -- --ray-num-nodes "$NNODES" --ray-ranks-per-node "$RANKS_PER_NODE" "$@"
    fi
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
    if has_flag --rl-dry-run "$@"; then
        exec "$PYTHON" -m "$module" --rl-world-size "$WORLD_SIZE" "$@"
    fi
    for argument in "$@"; do
        if [[ "$argument" == --doctor ]]; then module=mindspeed_rl.doctor; else arguments+=("$argument"); fi
    done
    "$ROOT/pretrain_scripts/check_package.sh" "$PYTHON"
    if [[ -n "${LOG_DIR:-}" ]]; then
        mkdir -p "$LOG_DIR"
        # Not a pipe: signals and the exit code stay those of torchrun, which replaces this shell.
        exec > >(exec tee -a -i "$LOG_DIR/node$NODE_RANK.log") 2>&1
    fi
    if is_in_ray "${arguments[@]}" && [[ "$module" != mindspeed_rl.doctor ]]; then
        exec "$PYTHON" -m "$module" --rl-world-size "$WORLD_SIZE" "${arguments[@]}"
    fi
    exec "$PYTHON" -m torch.distributed.run \
        --nproc-per-node "$RANKS_PER_NODE" --nnodes "$NNODES" --node-rank "$NODE_RANK" \
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
        -m "$module" --rl-world-size "$WORLD_SIZE" "${arguments[@]}"
}
