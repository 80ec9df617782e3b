#!/usr/bin/env bash
# CISPO on Catch: the weight of a token is clipped, but not its gradient. Any key=value argument overrides its settings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=cispo
  trainer.algorithm.policy_loss_type=cispo
  trainer.algorithm.cispo.cispo_eps_clip_low=1.0  # no lower bound
  trainer.algorithm.cispo.cispo_eps_clip_high=4.0 # the highest weight is 5
  trainer.algorithm.eps_clip_high=0.2             # back to the default: PPO's clip has no effect
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
