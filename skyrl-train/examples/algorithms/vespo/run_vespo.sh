#!/usr/bin/env bash
# VESPO on Catch: a smooth weight of the whole trajectory's ratio. Any key=value given here is passed on and wins.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=vespo
  trainer.algorithm.policy_loss_type=vespo
  trainer.algorithm.eps_clip_high=0.2 # the default again: nothing is clipped
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
