#!/usr/bin/env bash
# RLOO on Catch: a trajectory against the mean of the others. Any key=value given here is passed on and wins.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=rloo
  trainer.algorithm.advantage_estimator=rloo
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
