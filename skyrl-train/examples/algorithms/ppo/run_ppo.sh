#!/usr/bin/env bash
# PPO on Catch: generalized advantage estimation with a critic. Any key=value argument overrides its settings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KEYS=(
  trainer.run_name=ppo
  trainer.algorithm.advantage_estimator=gae
  'trainer.critic.model.path=${trainer.policy.model.path}' # the same model, with a value head initialized to zero
  trainer.algorithm.lambd=0.3                              # every turn has a reward, and the critic is inaccurate at first
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
