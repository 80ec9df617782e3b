#!/usr/bin/env bash
# A custom policy loss on Catch. Any key=value argument overrides its settings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

export MAIN_MODULE=examples.algorithms.custom_policy_loss.main_custom_policy_loss
KEYS=(
  trainer.run_name=custom_policy_loss
  trainer.algorithm.policy_loss_type=soft_clip
  trainer.algorithm.custom.width=0.3 # the loss reads it as config.custom["width"]
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
