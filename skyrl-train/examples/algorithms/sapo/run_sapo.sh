#!/usr/bin/env bash
# SAPO on Catch: a sigmoid in the place of the clip. Any key=value given here is passed on and wins.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=sapo
  trainer.algorithm.policy_loss_type=sapo
  trainer.algorithm.sapo.tau_pos=1.0
  trainer.algorithm.sapo.tau_neg=1.05
  trainer.algorithm.loss_reduction=sequence_mean
  trainer.algorithm.eps_clip_high=0.2 # the default again: PPO's clip is not read
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
