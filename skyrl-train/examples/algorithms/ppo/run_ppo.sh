#!/usr/bin/env bash
# PPO on Catch: generalised advantage estimation with a critic. Any key=value given here is passed on and wins.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=ppo
  trainer.algorithm.advantage_estimator=gae
  'trainer.critic.model.path=${trainer.policy.model.path}' # the same model, with a value head that starts at zero
  trainer.algorithm.lambd=0.3                              # rewards come every turn, and the critic knows little at first
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
