#!/usr/bin/env bash
# MaxRL on Catch: rare successes weigh more. Any key=value given here is passed on and wins.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

export REWARD_MODE=${REWARD_MODE:-episodic} # caught or missed: what the method is made for
KEYS=(
  trainer.run_name=maxrl
  trainer.algorithm.advantage_estimator=maxrl
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
