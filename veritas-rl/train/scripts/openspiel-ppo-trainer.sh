#!/usr/bin/env bash
# GRPO on moves in OpenSpiel games, with a LoRA adapter by default.
#
#   bash train/scripts/openspiel-ppo-trainer.sh [--tiny] [--dry-run] [KEY=VALUE …]
#
# Or source it. --tiny makes a tiny model that plays tic-tac-toe, or the games of GAME_TYPES, and takes a minute or two
# on a CPU. Variables, from the environment or .env: GAME_TYPES ("hex,go"; empty: all games), ENABLE_LORA,
# LORA_ADAPTER_PATH, LAYERED_SUMMON, FSDP_STRATEGY, ROLLOUT_BACKEND, AGENT_MODEL_REPO_ID, HF_TOKEN, gpu_count,
# WANDB_PROJECT, WANDB_EXP, WANDB_DIR, WANDB_MODE, WANDB_API_KEY. Settings of the tasks are overrides:
# +data.custom_cls.config.adapter_config.num_tasks_per_case=200 and cases, game_list, max_random_steps, reward_mode, seed.
(
    [ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sourced by zsh, where $0 is this file
    # shellcheck source=SCRIPTDIR/common.sh
    . "$(dirname "${BASH_SOURCE[0]}")/common.sh"
    read_arguments "$@"

    export GAME_TYPES=${GAME_TYPES:-}
    train_batch_size=32 ppo_mini_batch_size=16 micro_batch_size=8 n_samples=12
    max_prompt_length=12000 max_response_length=4096
    kl_loss_coef=0.001
    lr=6e-6 lora_lr=6e-5
    total_training_steps=10 save_freq=50 test_freq=50
    TASKS=()
    if [ "$TINY" = 1 ]; then lr=1e-3 lora_lr=3e-3; fi

    if ! is_installed pyspiel; then
        try python -m pip install 'open_spiel>=2' || die "open_spiel could not be installed; install it from source:" \
            "https://github.com/google-deepmind/open_spiel#installation"
    fi
    choose_backend
    choose_lora 1 actor_rollout_ref.model "$lr" "$lora_lr"
    choose_sync
    if [ "$TINY" = 1 ]; then
        options='{"cases": ["tic_tac_toe"], "num_tasks_per_case": 1000, "max_random_steps": 6}'
        if [ -n "$GAME_TYPES" ]; then options='{"max_listed_moves": 25}'; fi
        make_tiny_model "tiny-openspiel${GAME_TYPES:+-${GAME_TYPES//[^a-zA-Z0-9]/_}}" openspiel "$options"
        ppo_mini_batch_size=8 max_prompt_length=480 max_response_length=12 kl_loss_coef=0.01
        total_training_steps=3 save_freq=3 test_freq=3
        gpu_count=${gpu_count:-1}
        TASKS=(
            "+data.custom_cls.config.adapter_config=$(printf '%s' "$options" | tr -d '" ')"
            +data.custom_cls.config.adapter_config.reward_mode=legal
        )
    else
        choose_model
    fi
    gpu_count=${gpu_count:-$(count_gpus)}
    name_run openspiel "$train_batch_size"
    set_run_options RL/checkpoints

    cd train # paths of tools are relative to it
    run skyrl verl main_ppo \
        algorithm.adv_estimator=grpo \
        data.custom_cls.path=tools/openspiel_adapter.py \
        data.custom_cls.name=OpenSpielDataset \
        ${TASKS[@]+"${TASKS[@]}"} \
        custom_reward_function.path=tools/reward-manager.py \
        custom_reward_function.name=compute_score \
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
        actor_rollout_ref.actor.kl_loss_coef="$kl_loss_coef" \
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
