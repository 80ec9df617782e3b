#!/usr/bin/env bash
# DPPO on Catch: a trust region on probabilities instead of ratios. Any key=value argument overrides its settings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=dppo
  trainer.algorithm.policy_loss_type=dppo
  trainer.algorithm.dppo.dppo_type=binary_tv
  trainer.algorithm.dppo.delta_low=0.2
  trainer.algorithm.dppo.delta_high=0.2
  trainer.algorithm.eps_clip_high=0.2 # back to the default: PPO's clip has no effect
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
