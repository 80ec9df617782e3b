#!/usr/bin/env bash
# CISPO on Catch: the weight of a token is clipped, its gradient is not. Any key=value given here is passed on and wins.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=cispo
  trainer.algorithm.policy_loss_type=cispo
  trainer.algorithm.cispo.cispo_eps_clip_low=1.0  # no lower bound
  trainer.algorithm.cispo.cispo_eps_clip_high=4.0 # a weight of 5 at most
  trainer.algorithm.eps_clip_high=0.2             # the default again: PPO's clip is not read
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
