#!/usr/bin/env bash
# Check the variables of a Fleet task file, install the project, and prepare the dataset. Run it from the repository root.
# With PYTHON set, that interpreter is used and nothing is installed. ENV_PYTHON is the interpreter of the environments.
set -euo pipefail

fail() {
  echo "setup: $1" >&2
  exit 1
}

DATA_DIR=${DATA_DIR:-$HOME/data/fleet}
[[ -n ${FLEET_API_KEY:-} ]] || fail "FLEET_API_KEY is not set; pass --env FLEET_API_KEY=\$FLEET_API_KEY to sky launch"
[[ ${LOGGER:-wandb} != *wandb* || -n ${WANDB_API_KEY:-} || ${WANDB_MODE:-} == offline ]] ||
  fail "WANDB_API_KEY is not set; pass --env WANDB_API_KEY=\$WANDB_API_KEY, or --env LOGGER=console"
case ${MODALITY:-} in
tool_use) ;;
computer_use)
  [[ ${OVERRIDES:-} == *trainer.policy.model.path=* ]] ||
    fail "MODALITY=computer_use shows screenshots, and the task file's model reads only text, so it would refuse every task; \
set OVERRIDES=trainer.policy.model.path=MODEL to a vision-language model, or MODALITY=tool_use"
  ;;
*) fail "MODALITY='${MODALITY:-}' must be tool_use or computer_use" ;;
esac
source="s3://${S3_DATASET_BUCKET:-fleet-internal-datasets}/${DATA_VERSION:-v4}/openenv/all_$MODALITY.json"
if [[ -z ${TASKS_JSON:-} ]]; then
  for name in AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY; do
    [[ -n ${!name:-} ]] || fail "the tasks are in $source, and $name is not set; pass --env $name=\$$name, or TASKS_JSON"
  done
fi

if [[ -z ${PYTHON:-} ]]; then
  command -v uv >/dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
  export PATH=$HOME/.local/bin:$PATH
  (
    cd skyrl-train
    extras=(--extra wandb --extra ray)
    [[ ${INFERENCE_BACKEND:-vllm} != vllm ]] || extras+=(--extra vllm)
    uv sync --python 3.12 "${extras[@]}"
  )
  PYTHON=$PWD/skyrl-train/.venv/bin/python
  ENV_PYTHON=$PWD/.venv-fleet/bin/python
  uv pip install --quiet --python "$PYTHON" awscli
  uv venv --quiet --allow-existing --python 3.12 .venv-fleet
  uv pip install --quiet --python "$ENV_PYTHON" -e skyrl-gym -r skyrl-train/integrations/fleet/requirements.txt
fi
(cd skyrl-train && "${ENV_PYTHON:-$PYTHON}" -m skyrl_gym.runtime.packages integrations.fleet.env:FleetTaskEnv) ||
  fail "${ENV_PYTHON:-$PYTHON} cannot play Fleet tasks; the reason is above"

mkdir -p "$DATA_DIR"
tasks=$DATA_DIR/tasks_$MODALITY.json
if [[ -n ${TASKS_JSON:-} ]]; then
  [[ $TASKS_JSON -ef $tasks ]] || cp "$TASKS_JSON" "$tasks"
else
  "$PYTHON" -m awscli s3 cp "$source" "$tasks" || fail "$source cannot be downloaded; check DATA_VERSION=${DATA_VERSION:-v4}"
fi

flags=(--tasks-json "$tasks" --output-dir "$DATA_DIR/$MODALITY" --modality "$MODALITY")
[[ -z ${ENV_KEYS:-} ]] || flags+=(--env-filter "$ENV_KEYS")
[[ -z ${DIFFICULTY:-} ]] || flags+=(--difficulty-filter "$DIFFICULTY")
[[ -z ${MAX_TASKS:-} ]] || flags+=(--max-tasks "$MAX_TASKS")
cd skyrl-train
"$PYTHON" -m integrations.fleet.prepare_dataset "${flags[@]}"
