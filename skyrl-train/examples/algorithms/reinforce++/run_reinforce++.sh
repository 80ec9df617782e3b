#!/usr/bin/env bash
# REINFORCE++ on Catch: rewards to go, whitened over the batch. Any key=value given here is passed on and wins.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=reinforce++
  trainer.algorithm.advantage_estimator=reinforce++
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
