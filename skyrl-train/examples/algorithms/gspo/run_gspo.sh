#!/usr/bin/env bash
# GSPO on Catch: one ratio and one clip per trajectory. Any key=value argument overrides its settings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=gspo
  trainer.algorithm.policy_loss_type=gspo
  trainer.algorithm.loss_reduction=sequence_mean
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
