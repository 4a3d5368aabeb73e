# How recipes start an entry; sourced after NNODES, NPUS_PER_NODE, NODE_RANK, MASTER_ADDR and
# MASTER_PORT are set. With --rl-dry-run among the arguments nothing is started: one process
# predicts the run, on any machine with python 3.11 and numpy. With --orchestrator ray the recipe is
# run once, on a node of a Ray cluster, which starts the ranks of all nodes.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
WORLD_SIZE=$(( NPUS_PER_NODE * NNODES ))
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    [[ ! -x "$ROOT/.venv/bin/python" ]] || PYTHON="$ROOT/.venv/bin/python"
fi

# is_dry_run ARG...: whether --rl-dry-run is among the arguments
is_dry_run() {
    local argument
    for argument in "$@"; do
        [[ "$argument" != --rl-dry-run && "$argument" != --rl_dry_run ]] || return 0
    done
    return 1
}

# config_of DIR PUBLISHED ARG...: DIR, or for a dry run without it the published config.json
config_of() {
    local checkpoint="$1" published="$ROOT/tests/support/hf_configs/$2.json"
    shift 2
    if is_dry_run "$@" && [[ ! -e "$checkpoint" ]]; then
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
    local module="$1"
    shift
    if is_in_ray "$@"; then
        set -- --ray-num-nodes "$NNODES" --ray-ranks-per-node "$NPUS_PER_NODE" "$@"
    fi
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
    if is_dry_run "$@"; then
        exec "$PYTHON" -m "$module" --rl-world-size "$WORLD_SIZE" "$@"
    fi
    "$ROOT/pretrain_scripts/check_package.sh" "$PYTHON"
    if is_in_ray "$@"; then
        exec "$PYTHON" -m "$module" --rl-world-size "$WORLD_SIZE" "$@"
    fi
    exec "$PYTHON" -m torch.distributed.run \
        --nproc-per-node "$NPUS_PER_NODE" --nnodes "$NNODES" --node-rank "$NODE_RANK" \
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
        -m "$module" --rl-world-size "$WORLD_SIZE" "$@"
}
