#!/usr/bin/env bash
# GRPO turn by turn on Catch: a turn answers for what follows it. Any key=value given here is passed on and wins.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=turn_level_rewards
  trainer.algorithm.advantage_estimator=grpo_per_turn
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
