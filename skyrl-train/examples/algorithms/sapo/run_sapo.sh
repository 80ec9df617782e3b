#!/usr/bin/env bash
# SAPO on Catch: a sigmoid replaces the clip. Any key=value argument overrides its settings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=sapo
  trainer.algorithm.policy_loss_type=sapo
  trainer.algorithm.sapo.tau_pos=1.0
  trainer.algorithm.sapo.tau_neg=1.05
  trainer.algorithm.loss_reduction=sequence_mean
  trainer.algorithm.eps_clip_high=0.2 # back to the default: PPO's clip has no effect
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
