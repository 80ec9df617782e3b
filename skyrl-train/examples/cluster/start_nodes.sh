#!/usr/bin/env bash
# Start Ray on several machines over ssh, train on all of them, and stop Ray at the end:
#   NODES="node1 node2" GPUS_PER_NODE=8 bash start_nodes.sh data.train_data=… trainer.policy.model.path=…
# Run it on the first node. All nodes need the same Python environment at the same path, and a common file system.
set -euo pipefail

read -ra nodes <<<"${NODES:?set NODES to the names of the machines, this one first}"
: "${GPUS_PER_NODE:?set GPUS_PER_NODE}"
port=${RAY_PORT:-6379}
ray=$(command -v ray)
export RAY_ADDRESS="${nodes[0]}:$port"
export SKYRL_RAY_JOIN_TIMEOUT_IN_S=${SKYRL_RAY_JOIN_TIMEOUT_IN_S:-300}

stop() {
    for node in "${nodes[@]:1}"; do ssh "$node" "$ray stop" || true; done
    ray stop
}
trap stop EXIT

ray start --head --port="$port"
for node in "${nodes[@]:1}"; do ssh "$node" "$ray start --address=$RAY_ADDRESS"; done

skyrl train \
    trainer.placement.policy_num_nodes="${#nodes[@]}" \
    trainer.placement.policy_num_gpus_per_node="$GPUS_PER_NODE" \
    generator.num_inference_engines="$((${#nodes[@]} * GPUS_PER_NODE))" \
    "$@"
