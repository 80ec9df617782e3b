#!/usr/bin/env bash
# Check the programs and variables of the workflow, before it rents a machine. All faults are printed.
set -euo pipefail

status=0
fault() {
  echo "runner: $1" >&2
  status=1
}

# The program, and how to install it.
require() {
  command -v "$1" >/dev/null || fault "$1 is not installed; $2"
}

require sky "pip install 'skypilot[lambda,runpod,vast,primeintellect]==0.14.1'"
require aws "pip install awscli"
require git "install git"
require python3 "install Python 3.11 or newer"
for name in FLEET_API_KEY WANDB_API_KEY AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY; do
  [[ -n ${!name:-} ]] || fault "the secret $name is not set; add it to the repository's secrets"
done
[[ ${MODALITY:-} == tool_use || ${OVERRIDES:-} == *trainer.policy.model.path=* ]] ||
  fault "modality ${MODALITY:-} shows screenshots, and the task files' models read only text; add \
trainer.policy.model.path=MODEL with a vision-language model to the overrides, or choose tool_use"
exit $status
