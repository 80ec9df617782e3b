#!/usr/bin/env bash
# Merge a checkpoint of a recipe into one Hugging Face folder; an adapter is also copied to its subfolder lora_adapter/.
#
#   CHECKPOINT_BASE=train/artifacts/RL/checkpoints/<run> bash train/scripts/merge-ppo.sh [--tiny] [--dry-run] [--dtype float32]
#
# Variables: CHECKPOINT_BASE, GLOBAL_STEP (the newest by default), TARGET_DIR (train/merged_model_ppo).
(
    [ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sourced by zsh, where $0 is this file
    # shellcheck source=SCRIPTDIR/common.sh
    . "$(dirname "${BASH_SOURCE[0]}")/common.sh"
    read_arguments "$@"
    merge_actor train/merged_model_ppo
)
