#!/usr/bin/env bash
# Truncated importance sampling on Catch, for an engine that differs slightly from the policy. Any key=value argument
# overrides its settings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=tis_correction
  trainer.algorithm.off_policy_correction.tis_ratio_type=token
  trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=2.0
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
