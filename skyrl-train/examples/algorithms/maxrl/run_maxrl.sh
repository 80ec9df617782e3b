#!/usr/bin/env bash
# MaxRL on Catch: higher weight for rare successes. Any key=value argument overrides its settings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

export REWARD_MODE=${REWARD_MODE:-episodic} # caught or missed: the method assumes binary rewards
KEYS=(
  trainer.run_name=maxrl
  trainer.algorithm.advantage_estimator=maxrl
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
