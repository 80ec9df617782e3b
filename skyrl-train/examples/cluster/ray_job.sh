#!/usr/bin/env bash
# Submit a run to a Ray cluster that exists already, and show its output:
#   RAY_API_SERVER_ADDRESS=http://head:8265 bash ray_job.sh data.train_data=… trainer.placement.policy_num_nodes=2 …
# The current folder is sent along; data and models must be at paths that all nodes have.
set -euo pipefail

exec ray job submit --working-dir="${WORKING_DIR:-.}" -- skyrl train "$@"
