#!/usr/bin/env bash
# DPPO on Catch: a trust region in probability instead of in ratio. Any key=value given here is passed on and wins.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=dppo
  trainer.algorithm.policy_loss_type=dppo
  trainer.algorithm.dppo.dppo_type=binary_tv
  trainer.algorithm.dppo.delta_low=0.2
  trainer.algorithm.dppo.delta_high=0.2
  trainer.algorithm.eps_clip_high=0.2 # the default again: PPO's clip is not read
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
