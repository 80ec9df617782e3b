#!/usr/bin/env bash
# GRPO per turn on Catch: one advantage for each turn. Any key=value argument overrides its settings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=turn_level_rewards
  trainer.algorithm.advantage_estimator=grpo_per_turn
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
