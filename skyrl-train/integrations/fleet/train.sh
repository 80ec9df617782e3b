#!/usr/bin/env bash
# Train on the dataset of setup.sh, with the arguments as overrides key=value. Run it from the repository root.
# A run with the RUN_NAME of an earlier one resumes from its newest checkpoint.
set -euo pipefail

DATA_DIR=${DATA_DIR:-$HOME/data/fleet}
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=$PWD/skyrl-train/.venv/bin/python
  ENV_PYTHON=$PWD/.venv-fleet/bin/python
fi
scope=task
[[ -z ${ENV_KEYS:-} ]] || scope=${ENV_KEYS//,/-}
data=$DATA_DIR/$MODALITY

# The same name is the same run in Weights & Biases, also on another machine.
if [[ -n ${RUN_NAME:-} ]]; then export WANDB_RUN_ID=${WANDB_RUN_ID:-$RUN_NAME}; fi
export WANDB_TAGS=${WANDB_TAGS:-fleet,$MODALITY} WANDB_RUN_GROUP=${WANDB_RUN_GROUP:-$scope}

overrides=(
  "data.train_data=['$data/train.parquet']"
  "environment.skyrl_gym.fleet_task.tasks_file='$DATA_DIR/tasks_$MODALITY.json'"
  "trainer.project_name=${PROJECT_NAME:-fleet-$scope-grpo}"
  "trainer.run_name=${RUN_NAME:-fleet_${MODALITY}_$(date -u +%Y%m%d_%H%M%S)}"
  "trainer.resume_mode=latest"
  "trainer.logger=[${LOGGER:-wandb}]"
  "generator.backend=${INFERENCE_BACKEND:-vllm}"
  "environment.skyrl_gym.call_timeout_seconds=960" # the Fleet SDK waits up to 900 s for the software of an episode
)
# OpenEnv needs other versions than vLLM, so its environments have an interpreter of their own.
if [[ -n ${ENV_PYTHON:-} ]]; then
  overrides+=("environment.skyrl_gym.isolation=process" "environment.skyrl_gym.python=$ENV_PYTHON")
fi
if [[ -f $data/validation.parquet ]]; then
  overrides+=("data.val_data=['$data/validation.parquet']")
else
  overrides+=("data.val_data=[]" "trainer.eval_interval=-1")
fi
if [[ -n ${AWS_ACCESS_KEY_ID:-} ]]; then
  overrides+=("trainer.remote_ckpt_url=s3://${S3_CHECKPOINT_BUCKET:-skyrl-checkpoints}")
  overrides+=("trainer.remote_trajectory_url=s3://${S3_TRAJECTORY_BUCKET:-skyrl-trajectories}")
fi
read -r -a more <<<"${OVERRIDES:-}"

cd skyrl-train
# Later overrides count, so that OVERRIDES wins.
exec "$PYTHON" -m integrations.fleet.entrypoints.main_fleet "$@" "${overrides[@]}" "${more[@]}"
