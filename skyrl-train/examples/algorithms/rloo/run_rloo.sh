#!/usr/bin/env bash
# RLOO on Catch: the mean of the other samples is the baseline. Any key=value argument overrides its settings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=rloo
  trainer.algorithm.advantage_estimator=rloo
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
