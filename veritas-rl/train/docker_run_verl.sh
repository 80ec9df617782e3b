#!/usr/bin/env bash
# Start a container with this repository's packages, where veritas-rl/ is /workspace/veritas-rl.
#
#   ./docker_run_verl.sh [--tiny] [--dry-run] [COMMAND …]
#
# Without a command, it opens a shell. --tiny runs the tiny SFT recipe and ends. --dry-run prints the commands of Docker.
# Flags after the command are the command's own. Variables, from the environment or .env: IMAGE, an image that has the
# packages (by default, one is built from train/Dockerfile), EXTRAS of skyrl-train in that image (ray,wandb, on a machine
# with a GPU also vllm), and those of the recipes, which are passed on.
(
    # shellcheck source=SCRIPTDIR/scripts/common.sh
    . "$(dirname "${BASH_SOURCE[0]}")/scripts/common.sh"
    while [[ ${1:-} == -* ]]; do
        case $1 in
        --tiny) TINY=1 ;;
        --dry-run) DRY_RUN=1 ;;
        *) die "there is no flag $1; before the command, docker_run_verl.sh takes --tiny and --dry-run" ;;
        esac
        shift
    done
    if [ "$TINY" = 1 ]; then
        [ $# = 0 ] || die "--tiny takes no command, but got: $*; write --tiny after the name of a recipe"
        set -- bash train/scripts/lgc-v2-SFT-trainer.sh --tiny
    fi
    if [ "$DRY_RUN" = 0 ] && ! command -v docker >/dev/null; then
        die "docker is not installed; install it, or run the recipes without a container"
    fi
    if [ -z "${IMAGE:-}" ]; then unset IMAGE; fi # .env may set them
    if [ -z "${EXTRAS:-}" ]; then unset EXTRAS; fi
    load_settings

    start() {
        if [ "$DRY_RUN" = 1 ]; then
            printf '%q ' "$@"
            echo
        else
            "$@" || exit
        fi
    }

    has_gpu=0
    if command -v nvidia-smi >/dev/null; then has_gpu=1; fi
    if [ -z "${IMAGE:-}" ]; then
        IMAGE=skyrl-veritas
        extras=ray,wandb
        if [ "$has_gpu" = 1 ]; then extras+=,vllm; fi
        start docker build -t "$IMAGE" --build-arg "EXTRAS=${EXTRAS:-$extras}" --build-arg PIP_EXTRA_INDEX_URL \
            -f "$ROOT/train/Dockerfile" "$ROOT/.."
    fi
    options=(--rm --init --shm-size=16g --ipc=host --network=host -v "$ROOT:/workspace/veritas-rl" -w /workspace/veritas-rl)
    if [ -t 0 ] && [ -t 1 ]; then options+=(-it); fi
    if [ "$has_gpu" = 1 ]; then options+=(--gpus all); fi
    # Files belong to this user, whose name and home folder, for caches, the image does not know. Root in a container of a
    # rootless daemon is this user already.
    case $(docker info --format '{{.SecurityOptions}}' 2>/dev/null || true) in
    *name=rootless*) ;;
    *) options+=(--user "$(id -u):$(id -g)" -e "USER=$(id -un)" -e HOME=/tmp) ;;
    esac
    for name in "${SETTINGS[@]}"; do
        if [ -n "${!name+set}" ]; then
            case ${!name} in "$ROOT"/*) export "$name=/workspace/veritas-rl${!name#"$ROOT"}" ;; esac
            options+=(-e "$name") # without a value: the token is not on the command line
        fi
    done
    start docker run "${options[@]}" "$IMAGE" "${@:-bash}"
)
