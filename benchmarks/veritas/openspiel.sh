#!/usr/bin/env bash
# The OpenSpiel recipe with a tiny model on a CPU: an adapter, the same adapter continued, and all weights. Writes
# benchmarks/veritas/openspiel.md, and fails if a run ends below 95% legal moves. Extra arguments are overrides of every
# run. make bench-veritas runs it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
name=curve-$(date +%Y%m%d-%H%M%S)
checkpoints=$PWD/veritas-rl/train/artifacts/RL/checkpoints
common=(
    +data.custom_cls.config.adapter_config.num_tasks_per_case=3000
    data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.n=8
    actor_rollout_ref.actor.clip_ratio_high=0.28
    trainer.val_before_train=True trainer.test_freq=5 trainer.save_freq=40
    "$@"
)

train() {
    WANDB_EXP=$name-$1 bash veritas-rl/train/scripts/openspiel-ppo-trainer.sh --tiny "${common[@]}" "${@:2}"
}

train lora trainer.total_training_steps=40
LORA_ADAPTER_PATH=$checkpoints/$name-lora/global_step_40/policy/lora_adapter \
    train continued trainer.total_training_steps=10 actor_rollout_ref.actor.optim.lr=1e-3
CHECKPOINT_BASE=$checkpoints/$name-lora TARGET_DIR=$checkpoints/$name-merged bash veritas-rl/train/scripts/merge.sh
ENABLE_LORA=0 train full trainer.total_training_steps=80
ENABLE_LORA=0 train merged trainer.total_training_steps=10 actor_rollout_ref.actor.optim.lr=1e-4 \
    actor_rollout_ref.model.path="$checkpoints/$name-merged"
PYTHONPATH=benchmarks python benchmarks/veritas/table.py veritas-rl/train/outputs "$name" >benchmarks/veritas/openspiel.md
