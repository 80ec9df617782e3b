#!/usr/bin/env bash
# Dr. GRPO on Catch: no division by the group's spread, none by lengths. Any key=value given here is passed on and wins.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=drgrpo
  trainer.algorithm.grpo_norm_by_std=false
  trainer.algorithm.loss_reduction=seq_mean_token_sum_norm
  trainer.algorithm.max_seq_len=5 # most tokens that a trajectory samples: five turns of one
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
