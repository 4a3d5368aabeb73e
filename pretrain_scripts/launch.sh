# shellcheck shell=bash
# How recipes start an entry; sourced after NPUS_PER_NODE (or GPUS_PER_NODE), NNODES, NODE_RANK,
# MASTER_ADDR (may be empty with one node) and MASTER_PORT are set. Among the arguments of launch
#   --rl-dry-run   starts nothing: one process predicts the run, on any machine with python 3.11
#                  and numpy
#   --doctor       starts the ranks, looks at packages, environment and devices, tries every process
#                  group of the layout, and ends
# With --orchestrator ray, or ORCHESTRATOR=ray, the recipe is run once, on a node of a Ray cluster,
# which starts the ranks of all nodes.
# MAX_RESTARTS=N, or --max-restarts N among the arguments, starts the job of the node again, up to N
# times, from the newest checkpoint of --save (mindspeed_rl/launch/restart.py); the first pause is
# RESTART_BACKOFF_S, or --restart-backoff-s. With Ray its driver does so. ELASTIC_MIN_NODES=N, or
# --elastic-min-nodes N, lets it go on with N nodes or more when others are lost for longer than
# ELASTIC_WAIT_S, or --elastic-wait-s; NODE_ADDR is this node's address where the route to
# MASTER_ADDR does not tell it.
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
# and for the doctor, which a note says
config_of() {
    local checkpoint="$1" published="$ROOT/pretrain_scripts/models/configs/$2.json"
    shift 2
    if [[ ! -e "$checkpoint" ]] && { has_flag --rl-dry-run "$@" || has_flag --doctor "$@"; }; then
        echo "note: $checkpoint is not on this machine; the published config of the model is used: $published" >&2
        echo "$published"
    else
        echo "$checkpoint"
    fi
}

# is_in_ray ARG...: whether --orchestrator ray is among the arguments
is_in_ray() {
    [[ " $* " == *" --orchestrator ray "* || " $* " == *" --orchestrator=ray "* ]]
}

# meeting_address: sets MASTER_ADDR of one node, and refuses several nodes without it: each of them
# would wait for itself
meeting_address() {
    if (( NNODES <= 1 )); then
        MASTER_ADDR="${MASTER_ADDR:-localhost}"
        return
    fi
    case "${MASTER_ADDR:-}" in
        "")
            echo "NNODES=$NNODES needs MASTER_ADDR, the address of the first node, the same on every" \
                "node: export MASTER_ADDR=..., or leave NNODES out to run on this machine alone" >&2
            exit 2 ;;
        localhost|127.*|::1)
            echo "warning: MASTER_ADDR=$MASTER_ADDR with NNODES=$NNODES: only launchers on this machine" \
                "reach it; other machines need the address of the first node" >&2 ;;
    esac
    echo "node $NODE_RANK: waiting for $NNODES nodes at $MASTER_ADDR:$MASTER_PORT" >&2
}

# check_flags MODULE ARG...: ends with the mistakes of the flags, once, before a process per rank is
# started. With several nodes the ranks do it: a node that has ended would leave the others waiting.
check_flags() {
    local rc=0
    case "$1" in mindspeed_rl.train_rl|mindspeed_rl.pretrain) ;; *) return 0 ;; esac
    (( NNODES == 1 )) || return 0
    MINDSPEED_RL_CHECK_ONLY="$WORLD_SIZE" "$PYTHON" -m "$@" > /dev/null || rc=$?
    (( rc != 2 )) || exit 2
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
    local restarts="${MAX_RESTARTS:-0}" backoff="${RESTART_BACKOFF_S:-10}" replays=0
    local fewest="${ELASTIC_MIN_NODES:-0}" patience="${ELASTIC_WAIT_S:-30}"
    while (( $# )); do
        argument="${1//_/-}"
        case "$argument" in
            --doctor) module=mindspeed_rl.doctor ;;
            --replay|--replay=*) replays=1; arguments+=("$1") ;;
            --max-restarts=*) restarts="${1#*=}" ;;
            --restart-backoff-s=*) backoff="${1#*=}" ;;
            --elastic-min-nodes=*) fewest="${1#*=}" ;;
            --elastic-wait-s=*) patience="${1#*=}" ;;
            --elastic-min-nodes) fewest="${2:?--elastic-min-nodes takes a number}"; shift ;;
            --elastic-wait-s) patience="${2:?--elastic-wait-s takes seconds}"; shift ;;
            --max-restarts) restarts="${2:?--max-restarts takes a number}"; shift ;;
            --restart-backoff-s) backoff="${2:?--restart-backoff-s takes seconds}"; shift ;;
            *) arguments+=("$1") ;;
        esac
        shift
    done
    # A replay whose numbers differ has failed, and would do so again.
    if [[ "$module" == mindspeed_rl.doctor ]] || (( replays )); then
        restarts=0 fewest=0
    fi
    if (( fewest )) && (( ! restarts )); then
        echo "--elastic-min-nodes $fewest: a job goes on when it is started again; add --max-restarts" >&2
        exit 2
    fi
    if has_flag --rl-dry-run "${arguments[@]}"; then
        exec "$PYTHON" -m "$module" --rl-world-size "$WORLD_SIZE" "${arguments[@]}"
    fi
    if has_flag --help "${arguments[@]}" || has_flag -h "${arguments[@]}"; then
        exec "$PYTHON" -m "$module" "${arguments[@]}"
    fi
    "$ROOT/pretrain_scripts/check_package.sh" "$PYTHON"
    if [[ "$module" == mindspeed_rl.doctor ]] || ! is_in_ray "${arguments[@]}"; then
        meeting_address
        check_flags "$module" --rl-world-size "$WORLD_SIZE" "${arguments[@]}"
    fi
    if [[ -n "${LOG_DIR:-}" ]]; then
        mkdir -p "$LOG_DIR"
        # Not a pipe: signals and the exit code stay those of torchrun, which replaces this shell.
        exec > >(exec tee -a -i "$LOG_DIR/node$NODE_RANK.log") 2>&1
    fi
    if is_in_ray "${arguments[@]}" && [[ "$module" != mindspeed_rl.doctor ]]; then
        if (( restarts )); then
            arguments+=(--max-restarts "$restarts" --restart-backoff-s "$backoff")
        fi
        if (( fewest )); then
            arguments+=(--elastic-min-nodes "$fewest" --elastic-wait-s "$patience")
        fi
        exec "$PYTHON" -m "$module" --rl-world-size "$WORLD_SIZE" "${arguments[@]}"
    fi
    local again=()
    if (( restarts )); then
        again=("$PYTHON" -m mindspeed_rl.launch.restart --max-restarts "$restarts"
            --restart-backoff-s "$backoff" --node-rank "$NODE_RANK"
            --elastic-min-nodes "$fewest" --elastic-wait-s "$patience" --)
    fi
    exec "${again[@]}" "$PYTHON" -m mindspeed_rl.launch.bound_store \
        --nproc-per-node "$RANKS_PER_NODE" --nnodes "$NNODES" --node-rank "$NODE_RANK" \
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
        -m "$module" --rl-world-size "$WORLD_SIZE" "${arguments[@]}"
}
