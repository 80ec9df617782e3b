#!/usr/bin/env bash
# Start a container with this repository's packages, where veritas-rl/ is /workspace/veritas-rl.
#
#   ./docker_run_verl.sh [--tiny] [--dry-run] [COMMAND …]
#
# Without a command, it opens a shell. --tiny runs the tiny SFT recipe and ends. --dry-run prints the command of Docker.
# Variables: IMAGE, an image that has the packages (by default, one is built from train/Dockerfile). Variables of
# veritas-rl/.env, and HF_TOKEN, WANDB_* and others of the recipes, are passed on.
(
    set -euo pipefail
    unset CDPATH
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    dry_run=0 command=()
    for argument in "$@"; do
        case $argument in
        --tiny) command=(bash train/scripts/lgc-v2-SFT-trainer.sh --tiny) ;;
        --dry-run) dry_run=1 ;;
        *) command+=("$argument") ;;
        esac
    done
    if [ "$dry_run" = 0 ] && ! command -v docker >/dev/null; then
        echo "error: docker is not installed; install it, or run the recipes without a container" >&2
        exit 1
    fi

    start() {
        if [ "$dry_run" = 1 ]; then
            printf '%q ' "$@"
            echo
        else
            "$@" || exit
        fi
    }

    if [ -z "${IMAGE:-}" ]; then
        IMAGE=skyrl-veritas
        start docker build -t "$IMAGE" -f "$root/train/Dockerfile" "$root/.."
    fi
    options=(--rm --init --shm-size=16g --ipc=host --network=host -v "$root:/workspace/veritas-rl" -w /workspace/veritas-rl)
    if [ -t 0 ] && [ -t 1 ]; then options+=(-it); fi
    if command -v nvidia-smi >/dev/null; then options+=(--gpus all); fi
    for name in HF_TOKEN WANDB_API_KEY WANDB_MODE WANDB_PROJECT WANDB_EXP WANDB_ENTITY WANDB_TAGS WANDB_RUN_GROUP \
        AGENT_MODEL_REPO_ID GAME_TYPES ENABLE_LORA LAYERED_SUMMON FSDP_STRATEGY ROLLOUT_BACKEND gpu_count; do
        if [ -n "${!name+set}" ]; then
            export "${name?}"
            options+=(-e "$name") # without a value: the token is not on the command line
        fi
    done
    start docker run "${options[@]}" "$IMAGE" "${command[@]:-bash}"
)
