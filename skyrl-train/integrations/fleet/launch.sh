#!/usr/bin/env bash
# Launch a task file with SkyPilot and follow its log until the run ends:
#
#   CLUSTER=fleet-a1b2 RUN_NAME=fleet_tool_use_a1b2 launch.sh skyrl-train/tasks/openenv-fleet-grpo.yaml [sky flags …]
#
# Only provisioning is repeated, PROVISIONING_ATTEMPTS times. A run that crashes is launched again with the same RUN_NAME,
# at most MAX_RESTARTS times, and resumes from its newest checkpoint. Values of SECRETS go to the run by name; without one
# of those in REQUIRED, nothing is rented.
set -euo pipefail

task=$1
shift
attempts=${PROVISIONING_ATTEMPTS:-4}
restarts=${MAX_RESTARTS:-2}
required=${REQUIRED-FLEET_API_KEY WANDB_API_KEY AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY}
for name in $required; do
  [[ -n ${!name:-} ]] || { echo "launch: $name is not set; export it, or leave it out of REQUIRED" >&2 && exit 3; }
done
flags=(--cluster "$CLUSTER" --env RUN_NAME --yes --detach-run "$@")
for name in ${SECRETS:-FLEET_API_KEY WANDB_API_KEY AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY}; do
  flags+=(--env "$name=") # a value of the task file that is null counts as missing, beside a secret too
  [[ -z ${!name:-} ]] || flags+=(--secret "$name")
done

# Write a line to the summary of a workflow, and to the log.
note() {
  echo "launch: $1"
  echo "$1" >>"${GITHUB_STEP_SUMMARY:-/dev/null}"
}

provision() {
  local wait_s=${PROVISIONING_WAIT_S:-120} attempt
  for ((attempt = 1; attempt <= attempts; attempt++)); do
    if sky launch "${flags[@]}" "$task"; then
      note "- Provisioned in attempt $attempt of $attempts"
      return 0
    fi
    sky down --yes "$CLUSTER" || true # a part of it may have started
    ((attempt == attempts)) && break
    note "- Provisioning attempt $attempt of $attempts failed; the next one is in $wait_s s"
    sleep "$wait_s"
    wait_s=$((2 * wait_s))
  done
  note "- No cloud had the GPUs in $attempts attempts; try later, or another cloud"
  return 2
}

for ((restart = 0; restart <= restarts; restart++)); do
  provision
  status=0
  sky logs --follow "$CLUSTER" || status=$?
  # The log may end because the runner lost its connection (101: the job is not finished).
  while [[ $status == 101 ]]; do
    sleep "${RECONNECT_WAIT_S:-30}"
    status=0
    sky logs --follow "$CLUSTER" || status=$?
  done
  case $status in
  0)
    note "- Run $RUN_NAME finished after $restart restarts"
    exit 0
    ;;
  103)
    note "- Run $RUN_NAME was cancelled"
    exit 103
    ;;
  esac
  ((restart == restarts)) || note "- Run $RUN_NAME ended with status $status; it resumes from its newest checkpoint"
done
note "- Run $RUN_NAME failed $((restarts + 1)) times; launch with RUN_NAME=$RUN_NAME to resume it"
exit 1
