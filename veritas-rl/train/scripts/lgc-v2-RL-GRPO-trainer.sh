#!/usr/bin/env bash
# GRPO on puzzles that are generated while the run draws them, scored by their verifiers.
#
#   bash train/scripts/lgc-v2-RL-GRPO-trainer.sh [--tiny] [--dry-run] [KEY=VALUE …]
#
# Or source it. --tiny makes a tiny model, and takes a minute on a CPU. Variables, from the environment or .env:
# AGENT_MODEL_REPO_ID, HF_TOKEN, gpu_count, ENABLE_LORA, LORA_ADAPTER_PATH, LAYERED_SUMMON, ROLLOUT_BACKEND, FSDP_STRATEGY,
# WANDB_PROJECT, WANDB_EXP, WANDB_DIR, WANDB_MODE, WANDB_API_KEY.
(
    [ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sourced by zsh, where $0 is this file
    # shellcheck source=SCRIPTDIR/common.sh
    . "$(dirname "${BASH_SOURCE[0]}")/common.sh"
    read_arguments "$@"

    train_batch_size=32 ppo_mini_batch_size=16 micro_batch_size=4 n_samples=8
    max_prompt_length=9182 max_response_length=2048
    lr=6e-6 lora_lr=6e-5
    total_training_steps=10000 save_freq=50 test_freq=50
    TASKS=()
    if [ "$TINY" = 1 ]; then lr=1e-3 lora_lr=3e-3; fi

    choose_backend
    choose_lora 0 actor_rollout_ref.model "$lr" "$lora_lr"
    choose_sync
    if [ "$TINY" = 1 ]; then
        make_tiny_model tiny-operation lgc-v2 '{"task_types": ["operation"]}'
        train_batch_size=8 ppo_mini_batch_size=8 max_prompt_length=1024 max_response_length=12
        gpu_count=${gpu_count:-1}
        total_training_steps=2 save_freq=2 test_freq=2
        TASKS=('+data.custom_cls.config.task_types=[operation]' +data.custom_cls.config.num_val_tasks=8)
    else
        choose_model
    fi
    gpu_count=${gpu_count:-$(count_gpus)}
    name_run GRPO "$train_batch_size"
    set_run_options RL/checkpoints

    cd train # paths of tools are relative to it
    run skyrl verl main_ppo \
        algorithm.adv_estimator=grpo \
        data.custom_cls.path=tools/dataset-manager.py \
        data.custom_cls.name=LGCV2DynamicDataset \
        ${TASKS[@]+"${TASKS[@]}"} \
        custom_reward_function.path=tools/reward-manager.py \
        custom_reward_function.name=compute_lgc_v2_score \
        'data.train_files=[]' \
        'data.val_files=[]' \
        data.train_batch_size="$train_batch_size" \
        data.max_prompt_length="$max_prompt_length" \
        data.max_response_length="$max_response_length" \
        "$(format_option actor_rollout_ref.model.path "$MODEL")" \
        ${LORA[@]+"${LORA[@]}"} \
        "$(format_option actor_rollout_ref.actor.strategy "${FSDP_STRATEGY:-fsdp}")" \
        actor_rollout_ref.actor.optim.lr="$LR" \
        actor_rollout_ref.actor.ppo_mini_batch_size="$ppo_mini_batch_size" \
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="$micro_batch_size" \
        actor_rollout_ref.actor.use_kl_loss=True \
        actor_rollout_ref.actor.kl_loss_coef=0.001 \
        actor_rollout_ref.actor.kl_loss_type=low_var_kl \
        actor_rollout_ref.actor.entropy_coeff=0 \
        "$(format_option actor_rollout_ref.rollout.name "$BACKEND")" \
        "${SYNC[@]}" \
        actor_rollout_ref.rollout.n="$n_samples" \
        actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
        trainer.n_gpus_per_node="$gpu_count" \
        trainer.total_training_steps="$total_training_steps" \
        trainer.save_freq="$save_freq" \
        trainer.test_freq="$test_freq" \
        trainer.val_before_train=False \
        "${RUN[@]}" ${OVERRIDES[@]+"${OVERRIDES[@]}"}
)
