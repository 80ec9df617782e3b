#!/usr/bin/env bash
# Train on Catch. Any key=value argument is passed on and overrides the settings below.
#
#   bash examples/catch/run_catch.sh generator.batched=true trainer.logger=tensorboard
#
# With a GPU the model is Qwen3-1.7B-Base, and vLLM samples if it is installed. Without a GPU it is a tiny Qwen3,
# created on the first run, whose heads are too small for vLLM: the embedded engine samples.
# Metrics go to Weights & Biases if WANDB_API_KEY is set, and to TensorBoard otherwise.
# Missing data is generated. Variables: DATA_DIR, REWARD_MODE (shaped or episodic, for generated data),
# MODEL_DIR (of the tiny model), MAIN_MODULE (the training module), PYTHON.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

REWARD_MODE=${REWARD_MODE:-shaped}
DATA_DIR=${DATA_DIR:-$HOME/data/catch$([[ $REWARD_MODE == shaped ]] || echo "-$REWARD_MODE")}
MODEL_DIR=${MODEL_DIR:-$HOME/models/catch-tiny-qwen3}
MAIN_MODULE=${MAIN_MODULE:-examples.catch.main_catch}
PYTHON=${PYTHON:-$([[ -x ../.venv/bin/python ]] && echo ../.venv/bin/python || echo python)}

if [[ "$*" != *data.train_data=* && ! -f $DATA_DIR/train.parquet ]]; then
  "$PYTHON" -m examples.catch.catch_dataset --output_dir "$DATA_DIR" --reward_mode "$REWARD_MODE"
fi

LOGGER=tensorboard
has() { "$PYTHON" -c 'import sys; from importlib.util import find_spec; sys.exit(find_spec(sys.argv[1]) is None)' "$1"; }
if [[ -n ${WANDB_API_KEY:-} ]] && has wandb; then
  LOGGER=wandb
fi

if "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  MODEL=(
    trainer.policy.model.path=Qwen/Qwen3-1.7B-Base
    trainer.policy.optimizer_config.lr=1e-6
    trainer.train_batch_size=128
    trainer.policy_mini_batch_size=32
    trainer.critic_mini_batch_size=32
    generator.n_samples_per_prompt=4
  )
  if [[ "$*" != *preset=* ]]; then
    MODEL+=(+preset=auto) # settings that fit the memory of this machine
  fi
  if [[ "$*" == *generator.backend=* ]]; then
    : # the caller has chosen
  elif has vllm; then
    echo "Sampling with vLLM"
    MODEL+=(generator.backend=vllm)
  else
    echo "vLLM is not installed: sampling with the embedded engine"
  fi
else
  echo "No GPU here: a tiny Qwen3 and the embedded engine on the CPU instead of Qwen3-1.7B-Base"
  if [[ "$*" != *trainer.policy.model.path=* && ! -d $MODEL_DIR ]]; then
    "$PYTHON" -m examples.catch.warm_start --data_dir "$DATA_DIR" --output_dir "$MODEL_DIR"
  fi
  MODEL=()
  while IFS= read -r setting; do MODEL+=("$setting"); done < <("$PYTHON" -m examples.catch.recipe) # bash 3 has no mapfile
  MODEL+=(
    "trainer.policy.model.path='$MODEL_DIR'"
    trainer.critic_mini_batch_size=4 # a critic, if configured, makes more and smaller updates than the policy
    trainer.critic.optimizer_config.lr=5e-4
    environment.skyrl_gym.max_env_workers=0
    generator.batched=true # one forward pass for a turn of all games; vLLM batches games at different turns by itself
  )
fi

exec "$PYTHON" -m "$MAIN_MODULE" \
  "data.train_data=['$DATA_DIR/train.parquet']" \
  "data.val_data=['$DATA_DIR/validation.parquet']" \
  trainer.strategy=fsdp2 \
  trainer.algorithm.advantage_estimator=grpo \
  trainer.algorithm.use_kl_loss=true \
  trainer.placement.colocate_all=true \
  trainer.epochs=10 \
  trainer.eval_batch_size=128 \
  trainer.eval_interval=10 \
  trainer.ckpt_interval=25 \
  trainer.max_ckpts_to_keep=2 \
  trainer.max_prompt_length=256 \
  generator.max_turns=5 \
  generator.batched=false \
  generator.sampling_params.max_generate_length=1 \
  "trainer.logger=$LOGGER" \
  trainer.project_name=catch \
  trainer.run_name=catch_shaped \
  "${MODEL[@]}" \
  "$@"
