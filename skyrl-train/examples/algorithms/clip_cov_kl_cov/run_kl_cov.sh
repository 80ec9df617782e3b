#!/usr/bin/env bash
# KL-Cov on Catch: a KL penalty on the tokens of the highest covariance. Any key=value argument overrides its settings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=kl_cov
  trainer.algorithm.policy_loss_type=kl_cov
  trainer.algorithm.kl_cov.kl_cov_frac=0.01 # 6 of the 640 tokens of a mini-batch
  trainer.algorithm.kl_cov.ppo_kl_coef=1.0
  trainer.algorithm.eps_clip_high=0.2 # back to the default: nothing is clipped
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
