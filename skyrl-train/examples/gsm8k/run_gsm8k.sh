#!/usr/bin/env bash
# Train on GSM8K with GRPO. Any key=value argument is passed on and overrides the settings below.
#
#   NUM_GPUS=4 bash examples/gsm8k/run_gsm8k.sh trainer.logger=wandb
#
# On a GPU, vLLM samples if it is installed, otherwise the embedded engine. With several GPUs, each has a rank and an
# engine. Missing data is generated. Variables: NUM_GPUS (1), DATA_DIR, SOURCE (hub or sample, for generated data), PYTHON.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

NUM_GPUS=${NUM_GPUS:-1}
DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k}
PYTHON=${PYTHON:-$([[ -x ../.venv/bin/python ]] && echo ../.venv/bin/python || echo python)}

if [[ "$*" != *data.train_data=* && ! -f $DATA_DIR/train.parquet ]]; then
  "$PYTHON" -m examples.gsm8k.gsm8k_dataset --output_dir "$DATA_DIR" --source "${SOURCE:-hub}"
fi

ENGINE=()
if [[ "$*" == *generator.backend=* ]]; then
  : # the caller has chosen
elif ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "No GPU here: sampling with the embedded engine"
elif "$PYTHON" -c 'import sys; from importlib.util import find_spec; sys.exit(find_spec("vllm") is None)'; then
  echo "Sampling with vLLM"
  ENGINE=(generator.backend=vllm)
else
  echo "vLLM is not installed: sampling with the embedded engine"
fi

exec "$PYTHON" -m skyrl_train.entrypoints.main_base \
  "data.train_data=['$DATA_DIR/train.parquet']" \
  "data.val_data=['$DATA_DIR/validation.parquet']" \
  trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct \
  trainer.policy.optimizer_config.lr=1e-6 \
  trainer.algorithm.advantage_estimator=grpo \
  trainer.algorithm.use_kl_loss=true \
  trainer.strategy=fsdp2 \
  trainer.placement.colocate_all=true \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  generator.num_inference_engines="$NUM_GPUS" \
  trainer.train_batch_size=256 \
  trainer.policy_mini_batch_size=64 \
  trainer.max_prompt_length=512 \
  trainer.epochs=10 \
  trainer.eval_batch_size=1024 \
  trainer.eval_interval=5 \
  trainer.ckpt_interval=10 \
  trainer.max_ckpts_to_keep=2 \
  generator.n_samples_per_prompt=5 \
  generator.sampling_params.max_generate_length=1024 \
  generator.gpu_memory_utilization=0.8 \
  environment.env_class=gsm8k \
  trainer.project_name=gsm8k \
  trainer.run_name=gsm8k_test \
  ${ENGINE[@]+"${ENGINE[@]}"} \
  "$@"
