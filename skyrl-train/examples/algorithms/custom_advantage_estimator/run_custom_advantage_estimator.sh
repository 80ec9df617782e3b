#!/usr/bin/env bash
# A custom advantage estimator on Catch. Any key=value argument overrides its settings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

export MAIN_MODULE=examples.algorithms.custom_advantage_estimator.main_custom_advantage_estimator
KEYS=(
  trainer.run_name=custom_advantage_estimator
  trainer.algorithm.advantage_estimator=median_baseline
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
