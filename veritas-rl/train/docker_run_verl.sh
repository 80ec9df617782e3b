#!/usr/bin/env bash
# Start a container with this repository's packages, where veritas-rl/ is /workspace/veritas-rl.
#
#   ./docker_run_verl.sh [--tiny] [--dry-run] [COMMAND …]
#
# Without a command, it opens a shell. --tiny runs the tiny SFT recipe and ends. --dry-run prints the commands of Docker.
# Flags after the command are the command's own. Variables, from the environment or .env: IMAGE, an image that has the
# packages (by default, one is built from train/Dockerfile), and those of the recipes, which are passed on.
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
    if [ -z "${IMAGE:-}" ]; then unset IMAGE; fi # .env may set it
    load_settings

    start() {
        if [ "$DRY_RUN" = 1 ]; then
            printf '%q ' "$@"
            echo
        else
            "$@" || exit
        fi
    }

    if [ -z "${IMAGE:-}" ]; then
        IMAGE=skyrl-veritas
        start docker build -t "$IMAGE" -f "$ROOT/train/Dockerfile" "$ROOT/.."
    fi
    options=(--rm --init --shm-size=16g --ipc=host --network=host -v "$ROOT:/workspace/veritas-rl" -w /workspace/veritas-rl)
    if [ -t 0 ] && [ -t 1 ]; then options+=(-it); fi
    if command -v nvidia-smi >/dev/null; then options+=(--gpus all); fi
    for name in "${SETTINGS[@]}"; do
        if [ -n "${!name+set}" ]; then
            case ${!name} in "$ROOT"/*) export "$name=/workspace/veritas-rl${!name#"$ROOT"}" ;; esac
            options+=(-e "$name") # without a value: the token is not on the command line
        fi
    done
    start docker run "${options[@]}" "$IMAGE" "${@:-bash}"
)
