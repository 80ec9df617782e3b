#!/usr/bin/env bash
# DAPO on Catch with all five parts. Any key=value argument overrides its settings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=dapo
  # clip higher, with a bound on ratios with a negative advantage
  trainer.algorithm.policy_loss_type=dual_clip
  trainer.algorithm.eps_clip_low=0.2
  trainer.algorithm.eps_clip_high=0.28
  trainer.algorithm.clip_ratio_c=10
  # all tokens have the same weight
  trainer.algorithm.loss_reduction=token_mean
  # groups with equal rewards are replaced by others
  trainer.algorithm.dynamic_sampling.type=filter
  # a reply is a letter and the end of the turn; the penalty of a third token is 0.5, of a fourth 1
  generator.sampling_params.max_generate_length=4
  trainer.algorithm.overlong_buffer_len=2
  trainer.algorithm.overlong_buffer_penalty_factor=1.0
  generator.apply_overlong_filtering=true
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
