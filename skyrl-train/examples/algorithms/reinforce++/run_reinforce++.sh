#!/usr/bin/env bash
# REINFORCE++ on Catch: rewards-to-go, whitened over the batch. Any key=value argument overrides its settings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=reinforce++
  trainer.algorithm.advantage_estimator=reinforce++
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
