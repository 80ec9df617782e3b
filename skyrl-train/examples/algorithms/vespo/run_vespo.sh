#!/usr/bin/env bash
# VESPO on Catch: a smooth weight per trajectory. Any key=value argument overrides its settings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=vespo
  trainer.algorithm.policy_loss_type=vespo
  trainer.algorithm.eps_clip_high=0.2 # back to the default: nothing is clipped
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
