#!/usr/bin/env bash
# Dr. GRPO on Catch: no division by the standard deviation or by lengths. Any key=value argument overrides its settings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=drgrpo
  trainer.algorithm.grpo_norm_by_std=false
  trainer.algorithm.loss_reduction=seq_mean_token_sum_norm
  trainer.algorithm.max_seq_len=5 # maximum number of sampled tokens of a trajectory: five turns of one token
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
