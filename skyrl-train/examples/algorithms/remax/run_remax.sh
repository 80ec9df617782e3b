#!/usr/bin/env bash
# ReMax on Catch: the greedy answer is the baseline. Any key=value given here is passed on and wins.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=remax
  trainer.algorithm.advantage_estimator=remax
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
