#!/usr/bin/env bash
# Clip-Cov on Catch: a few tokens of high covariance are excluded. Any key=value argument overrides its settings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=clip_cov
  trainer.algorithm.policy_loss_type=clip_cov
  trainer.algorithm.clip_cov.clip_ratio=0.01 # 6 of the 640 tokens of a mini-batch; the paper's 2e-4 would exclude one
  trainer.algorithm.clip_cov.clip_cov_lb=1.0
  trainer.algorithm.clip_cov.clip_cov_ub=5.0
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
