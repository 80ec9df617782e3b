#!/usr/bin/env bash
# ReMax on Catch: the greedy score is the baseline. Any key=value argument overrides its settings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=remax
  trainer.algorithm.advantage_estimator=remax
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
