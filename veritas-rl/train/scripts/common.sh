# shellcheck shell=bash
# Settings and functions of the recipes. Each script sources this file in a subshell, so that a shell that sources the
# script keeps its options, its folder and its variables, and survives an error.

set -euo pipefail
unset CDPATH
CALLER=$PWD
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
TINY=0
DRY_RUN=0
STARTS_RUN=1
OVERRIDES=()

# Variables of the recipes. docker_run_verl.sh passes them on.
SETTINGS=(
    HF_TOKEN AGENT_MODEL_REPO_ID dataset_path gpu_count
    ENABLE_LORA LORA_ADAPTER_PATH LAYERED_SUMMON FSDP_STRATEGY ROLLOUT_BACKEND GAME_TYPES
    CHECKPOINT_BASE GLOBAL_STEP TARGET_DIR
    WANDB_API_KEY WANDB_MODE WANDB_PROJECT WANDB_EXP WANDB_DIR WANDB_ENTITY WANDB_TAGS WANDB_RUN_GROUP WANDB_RUN_ID
)

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

# Print a command and run it.
try() {
    printf '+' >&2
    printf ' %q' "$@" >&2
    printf '\n' >&2
    "$@"
}

# Print a command, run it, and end the recipe if it fails, also where set -e is off: . script || …
run() { try "$@" || exit; }

# Sort the arguments of a script: --help, --tiny, --dry-run, and overrides, which come last and therefore win.
read_arguments() {
    local argument
    for argument in "$@"; do
        case $argument in
        --tiny) TINY=1 ;;
        --dry-run) DRY_RUN=1 STARTS_RUN=0 ;;
        -h | --help)
            sed -n '2,/^(/s/^# \{0,1\}//p' "${BASH_SOURCE[1]}"
            exit 0
            ;;
        --print-config) STARTS_RUN=0 OVERRIDES+=("$argument") ;;
        *) OVERRIDES+=("$argument") ;;
        esac
    done
    load_settings
    if ! command -v skyrl >/dev/null && [ -x "$ROOT/../.venv/bin/skyrl" ]; then
        PATH="$ROOT/../.venv/bin:$PATH"
    fi
    command -v skyrl >/dev/null || die "the command skyrl is not installed; see docs/start/install.md"
    if [ "$DRY_RUN" = 1 ]; then OVERRIDES+=(--dry-run); fi
    cd "$ROOT"
}

# Export the settings of the environment and of .env; the environment wins. An empty setting counts as unset, except for
# GAME_TYPES, where it means all games.
load_settings() {
    local name
    for name in "${SETTINGS[@]}"; do
        if [ -z "${!name:-}" ] && [ "$name" != GAME_TYPES ]; then unset "$name"; fi
    done
    load_env "$ROOT/.env"
    for name in "${SETTINGS[@]}"; do
        if [ -z "${!name+set}" ]; then continue; fi
        # a shell that sources a script may not have exported it
        if [ -n "${!name}" ] || [ "$name" = GAME_TYPES ]; then export "${name?}"; else unset "$name"; fi
    done
}

# Export the variables of a .env file that are not set. The file is read, not run.
load_env() {
    local line name value number=0 end='[[:space:]]*(#.*)?$'
    local double_quoted='^[[:space:]]*"(([^"\\]|\\.)*)"'$end single_quoted="^[[:space:]]*'([^']*)'"$end
    [ -f "$1" ] || return 0
    while IFS= read -r line || [ -n "$line" ]; do
        number=$((number + 1))
        line=${line#$'\xef\xbb\xbf'} # byte-order mark
        line=${line%$'\r'}
        line=${line#"${line%%[![:space:]]*}"}
        line=${line#export }
        case $line in '' | '#'*) continue ;; esac
        name=${line%%=*}
        if [[ $line != *=* || ! $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]]; then # the line may hold a token
            die "$1: line $number is not NAME=value; write NAME=value, or # before a comment"
        fi
        value=${line#*=}
        if [[ $value =~ $double_quoted ]]; then
            value=$(printf '%s' "${BASH_REMATCH[1]}" | sed 's/\\\(["\\$`]\)/\1/g')
        elif [[ $value =~ $single_quoted ]]; then
            value=${BASH_REMATCH[1]}
        else
            value=${value%%[[:space:]]#*}
            value=${value#"${value%%[![:space:]]*}"}
            value=${value%"${value##*[![:space:]]}"}
            case $value in
            [\"\']*) die "$1: the value of $name does not end with its quote; write $name='value'" ;;
            esac
        fi
        if [ -z "${!name+set}" ]; then export "$name=$value"; fi
    done <"$1"
}

# Succeed for 1, true, yes and on; fail for 0, false, no, off and the empty string. Arguments: name and value of a
# variable.
is_on() {
    case $(printf '%s' "$2" | tr '[:upper:]' '[:lower:]') in
    1 | true | yes | on) return 0 ;;
    0 | false | no | off | '') return 1 ;;
    *) die "$1=$2 must be 1 or 0" ;;
    esac
}

# Succeed if a Python package is installed.
is_installed() { python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1"; }

# Print a path that is relative to the caller's folder, or else to veritas-rl/, as an absolute one. No shell expands the
# home folder in .env.
absolute() {
    case $1 in
    /*) printf '%s' "$1" ;;
    '~/'*) printf '%s' "$HOME/${1#'~/'}" ;;
    *) if [ -e "$CALLER/$1" ]; then printf '%s' "$CALLER/$1"; else printf '%s' "$ROOT/$1"; fi ;;
    esac
}

# Print the override key='value', quoted for Hydra: quotes and ${ are escaped; backslashes before them and at the end are
# doubled. Arguments: key and value.
format_option() {
    local escape="s/\(\\\\*\)\([$]{\)/\1\1\\\\\2/g; s/\(\\\\*\)'/\1\1\\\\'/g; s/\\\\*$/&&/"
    printf "%s='%s'" "$1" "$(printf '%s' "$2" | LC_ALL=C sed "$escape")"
}

# Set MODEL and MODEL_NAME: the folder AGENT_MODEL_REPO_ID, or that model of the Hub, downloaded into train/models/ if a
# run starts.
choose_model() {
    local repo=${AGENT_MODEL_REPO_ID:-rhuanmatias/trained-top-sn120}
    repo=${repo%/}
    MODEL_NAME=${repo##*/}
    MODEL=$(absolute "$repo")
    if [ -d "$MODEL" ]; then return 0; fi
    case $repo in
    /* | '~/'* | ./* | ../*) die "AGENT_MODEL_REPO_ID=$repo is not a folder; use one, or a name on the Hub (owner/name)" ;;
    esac
    MODEL=$ROOT/train/models/$repo
    if [ -d "$MODEL" ]; then return 0; fi
    if [ -z "${HF_TOKEN:-}" ]; then
        die "HF_TOKEN is not set, which the download of $repo needs; add HF_TOKEN=<token> to $ROOT/.env, or set" \
            "AGENT_MODEL_REPO_ID to the folder of a model"
    fi
    if [ "$STARTS_RUN" = 0 ]; then
        MODEL=$repo
        return 0
    fi
    # If another recipe completes the same download first, it renames the folder, and this download fails.
    if ! try hf download "$repo" --local-dir "$MODEL.partial" && [ ! -d "$MODEL" ]; then
        die "$repo could not be downloaded; rerun to resume"
    fi
    publish "$MODEL.partial" "$MODEL"
}

# Set TIME to the time of the run, and OUTPUTS to its folder in train/outputs/. If another run has started in the same
# second, wait for the next one.
reserve_outputs() {
    while :; do
        TIME=$(date +%Y%m%d-%H%M%S)
        OUTPUTS=$ROOT/train/outputs/${TIME:0:4}-${TIME:4:2}-${TIME:6:2}/${TIME:9:2}-${TIME:11:2}-${TIME:13:2}
        if [ "$STARTS_RUN" = 0 ]; then return 0; fi
        mkdir -p "${OUTPUTS%/*}" || exit
        if mkdir "$OUTPUTS" 2>/dev/null; then return 0; fi
        [ -d "$OUTPUTS" ] || die "$OUTPUTS cannot be created; check permissions and free space"
        sleep 1
    done
}

# Name the run and set up Weights & Biases: OUTPUTS, WANDB_PROJECT, WANDB_EXP, WANDB_DIR and LOGGER. Arguments: task,
# batch size.
name_run() {
    reserve_outputs
    WANDB_EXP=${WANDB_EXP:-$MODEL_NAME-$TIME-batch_size-$2}
    WANDB_PROJECT=${WANDB_PROJECT:-Qwen3-4B-Instruct}
    WANDB_DIR=$(absolute "${WANDB_DIR:-$ROOT/train/artifacts/wandb/$WANDB_PROJECT-$1-${TIME%-*}}")
    export WANDB_PROJECT WANDB_DIR
    LOGGER='[console,wandb]'
    if ! is_installed wandb; then
        LOGGER='[console,tensorboard]'
        say "wandb is not installed: metrics go to TensorBoard; pip install wandb, and rerun"
    elif [ -z "${WANDB_MODE:-}" ] && { [ "$TINY" = 1 ] || [ -z "${WANDB_API_KEY:-}" ]; }; then
        export WANDB_MODE=offline
        [ "$TINY" = 1 ] || say "WANDB_API_KEY is not set: W&B logs to $WANDB_DIR; upload it later with wandb sync, or" \
            "add WANDB_API_KEY=<key> to $ROOT/.env"
    fi
}

# Set RUN to the options that all recipes share. Argument: folder of checkpoints, below train/artifacts/.
set_run_options() {
    RUN=(
        "$(format_option trainer.project_name "$WANDB_PROJECT")"
        "$(format_option trainer.experiment_name "$WANDB_EXP")"
        "trainer.logger=$LOGGER"
        "$(format_option trainer.default_local_dir "$ROOT/train/artifacts/$1/$WANDB_EXP")"
        "$(format_option hydra.run.dir "$OUTPUTS")"
    )
}

# Print the number of visible GPUs; 1 on a machine without any.
count_gpus() {
    local gpus=''
    if command -v nvidia-smi >/dev/null; then
        if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
            gpus=$(printf '%s' "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep '^[^-]' || true)
        else
            gpus=$(nvidia-smi -L | grep '^GPU ' || true)
        fi
    fi
    if [ -n "$gpus" ]; then printf '%s\n' "$gpus" | wc -l | tr -d ' '; else echo 1; fi
}

# Set BACKEND to ROLLOUT_BACKEND; by default, vLLM where it is installed, and else the embedded engine.
choose_backend() {
    BACKEND=${ROLLOUT_BACKEND:-}
    case $BACKEND in
    vllm | sglang)
        is_installed "$BACKEND" || die "ROLLOUT_BACKEND=$BACKEND is not installed; install it (docs/start/install.md)," \
            "or, in the container, start it with EXTRAS=ray,wandb,$BACKEND; or unset ROLLOUT_BACKEND"
        ;;
    '')
        BACKEND=vllm
        if [ "$TINY" = 1 ]; then
            BACKEND=hf
        elif ! is_installed vllm; then
            BACKEND=hf
            say "vLLM is not installed: ROLLOUT_BACKEND=hf, the embedded engine"
        fi
        ;;
    esac
}

# Set LORA to the options of the adapter, if there is one, and LR to the learning rate. LORA_ADAPTER_PATH turns LoRA on.
# Arguments: default of ENABLE_LORA, section of the model, learning rates of full fine-tuning and of LoRA.
choose_lora() {
    local enabled=${ENABLE_LORA:-${LORA_ADAPTER_PATH:+1}}
    LORA=()
    LR=$3
    if is_on ENABLE_LORA "${enabled:-$1}"; then
        LR=$4
        LORA=("$2.use_shm=True")
        if [ -n "${LORA_ADAPTER_PATH:-}" ]; then # its rank, alpha and modules apply
            LORA+=("$(format_option "$2.lora_adapter_path" "$(absolute "$LORA_ADAPTER_PATH")")")
        else
            LORA+=("$2.lora_rank=32" "$2.lora_alpha=32" "$2.target_modules=all-linear")
        fi
    elif [ -n "${LORA_ADAPTER_PATH:-}" ]; then
        die "LORA_ADAPTER_PATH=$LORA_ADAPTER_PATH is not read with ENABLE_LORA=$ENABLE_LORA; unset one of them." \
            "To fine-tune all weights from an adapter, merge it first: train/tools/merge_adapter_into_base.py"
    fi
}

# Set SYNC to the options of weight sync. They are accepted for compatibility and have no effect; the log says so.
choose_sync() {
    SYNC=(actor_rollout_ref.rollout.load_format=safetensors)
    if is_on LAYERED_SUMMON "${LAYERED_SUMMON:-0}"; then SYNC+=(actor_rollout_ref.rollout.layered_summon=True); fi
}

# Rename a folder; remove it if another process has made the target meanwhile.
publish() {
    if ! python -c 'import os, sys; os.rename(*sys.argv[1:])' "$1" "$2" 2>/dev/null; then
        [ -d "$2" ] || die "$2 cannot be written"
        rm -rf "$1"
    fi
}

# Set WORK to a new folder beside a path, on the same file system. Two scripts that one shell sources have the same $$.
make_work_folder() {
    mkdir -p "${1%/*}" || exit
    WORK=$(mktemp -d "$1.XXXXXX") || exit
}

# Set MODEL to a tiny model that writes answers of the right format, but to other tasks. Arguments: its name, a task
# family, and the family's options as JSON.
make_tiny_model() {
    local folder=$ROOT/train/models/$1
    MODEL_NAME=$1
    MODEL=$folder
    if [ -d "$folder" ]; then return 0; fi
    make_work_folder "$folder"
    run python train/tools/write_attempts.py --env "$2" --adapter-config "$3" --output "$WORK/attempts.jsonl"
    run skyrl tiny "$WORK/random" --data "$WORK/attempts.jsonl"
    run skyrl sft "$(format_option data.train_data "$WORK/attempts.jsonl")" \
        "$(format_option trainer.policy.model.path "$WORK/random")" \
        data.truncation=left trainer.epochs=2 trainer.train_batch_size=16 trainer.policy.optimizer_config.lr=3e-3 \
        trainer.ckpt_interval=-1 trainer.hf_save_interval=100000 trainer.logger=jsonl \
        trainer.project_name=warm trainer.run_name=up \
        "$(format_option trainer.output_dir "$WORK")" "$(format_option trainer.export_path "$WORK/export")"
    publish "$WORK"/export/global_step_*/policy "$folder"
    rm -rf "$WORK"
}

# Merge the newest checkpoint of CHECKPOINT_BASE, or that of GLOBAL_STEP, into TARGET_DIR. With --tiny, train a tiny model
# and merge its checkpoint. Argument: default of TARGET_DIR, below veritas-rl/.
merge_actor() {
    local base source target=$ROOT/$1 runs
    if [ "$TINY" = 1 ]; then target+=_tiny; fi
    target=$(absolute "${TARGET_DIR:-$target}")
    target=${target%/}
    if [ -e "$target" ] && { [ "$TINY" = 0 ] || [ -n "${TARGET_DIR:-}" ]; }; then
        die "$target already exists; set TARGET_DIR to a new folder"
    fi
    if [ "$TINY" = 1 ]; then
        if [ "$DRY_RUN" = 1 ]; then
            say "would train a tiny model and merge its checkpoint into $target"
            return 0
        fi
        mkdir -p train/artifacts/RL/checkpoints
        base=$(mktemp -d "$ROOT/train/artifacts/RL/checkpoints/tiny-merge-XXXXXX") || exit
        run env WANDB_EXP="${base##*/}" bash train/scripts/openspiel-ppo-trainer.sh --tiny \
            trainer.total_training_steps=2 trainer.save_freq=2 trainer.test_freq=-1
        make_work_folder "$target"
        run skyrl merge checkpoint "$base" "$WORK/merged" ${OVERRIDES[@]+"${OVERRIDES[@]}"}
        [ -n "${TARGET_DIR:-}" ] || rm -rf "$target" # from an earlier --tiny
        publish "$WORK/merged" "$target"
        rm -rf "$WORK" "$base"
        say "merged into $target"
        return 0
    fi
    base=$(absolute "${CHECKPOINT_BASE:-$ROOT/train/artifacts/RL/checkpoints}")
    source=$base${GLOBAL_STEP:+/global_step_$GLOBAL_STEP}
    [ -d "$base" ] || die "$base does not exist; set CHECKPOINT_BASE to the folder of a run's checkpoints"
    if [ -z "${GLOBAL_STEP:-}" ] && [ -z "$(find -H "$base" -maxdepth 1 -name 'global_step_*')" ]; then
        runs=$(find -H "$base" -mindepth 2 -maxdepth 2 -name 'global_step_*' -exec dirname {} \; | sort -u)
        die "$base has no checkpoint; set CHECKPOINT_BASE to the folder of a run's checkpoints${runs:+:$'\n'$runs}"
    fi
    if [ "$DRY_RUN" = 1 ]; then
        [ -d "$source" ] || die "$source does not exist"
        say "would merge $source into $target"
        return 0
    fi
    run skyrl merge checkpoint "$source" "$target" ${OVERRIDES[@]+"${OVERRIDES[@]}"}
}
