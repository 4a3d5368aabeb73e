#!/usr/bin/env bash
# GRPO of Qwen2.5-7B-Instruct on a Ray cluster of Ascend A2 nodes: the layout of the one-node recipe,
# more engines and more data parallelism. Control goes through Ray, tensors do not.
# Grade: dry run only, not executed on hardware.
#
# usage: pretrain_scripts/grpo_qwen2_5_7b_ray.sh [flags of mindspeed_rl.train_rl ...]
#   on one node of the cluster, after "ray start --head" there and "ray start --address" on the others
#   --rl-dry-run    memory and volumes on any machine, without devices or weights
#   NNODES=4        nodes of the cluster to use; other variables as of the one-node recipe
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export ORCHESTRATOR=ray
export NNODES="${NNODES:-2}"
export OUTPUT_DIR="${OUTPUT_DIR:-$HERE/../outputs/qwen2_5_7b_ray}"
exec bash "$HERE/grpo_qwen2_5_7b_1node.sh" "$@"
