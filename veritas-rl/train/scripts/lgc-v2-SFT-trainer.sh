#!/usr/bin/env bash
# Fine-tune a model on parquet files with the columns prompt and response (docs/dataset_generation.md).
#
#   bash train/scripts/lgc-v2-SFT-trainer.sh [--tiny] [--dry-run] [KEY=VALUE …]
#
# Or source it: `. train/scripts/lgc-v2-SFT-trainer.sh`. --tiny makes a tiny model and data, and takes a minute on a CPU.
# Variables, from the environment or .env: AGENT_MODEL_REPO_ID, HF_TOKEN, gpu_count, dataset_path, ENABLE_LORA,
# LORA_ADAPTER_PATH, WANDB_PROJECT, WANDB_EXP, WANDB_DIR, WANDB_MODE, WANDB_API_KEY.
(
    [ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sourced by zsh, where $0 is this file
    # shellcheck source=SCRIPTDIR/common.sh
    . "$(dirname "${BASH_SOURCE[0]}")/common.sh"
    read_arguments "$@"

    dataset_path=$(absolute "${dataset_path:-$ROOT/train/parquet}")
    train_batch_size=32
    micro_batch_size=8
    max_length=2048
    total_epochs=10
    model_dtype=bf16
    lr=2e-6 lora_lr=2e-5
    save_freq=50
    test_freq=50
    if [ "$TINY" = 1 ]; then lr=3e-3 lora_lr=3e-3; fi

    choose_lora 0 model "$lr" "$lora_lr"
    if [ "$TINY" = 1 ]; then
        dataset_path=$ROOT/train/parquet_tiny
        gpu_count=${gpu_count:-1}
        train_batch_size=8 micro_batch_size=4 max_length=512 total_epochs=2 model_dtype=fp32
        save_freq=5 test_freq=5
        MODEL_NAME=tiny-sft
        MODEL=$ROOT/train/models/$MODEL_NAME
        if [ ! -d "$dataset_path" ]; then
            make_work_folder "$dataset_path"
            run python -m data_processing.generate_dataset --env lgc-v2 --task-types operation --num-samples 50 \
                --output "$WORK/tasks.jsonl"
            run python -m data_processing.convert_to_parquet --input "$WORK/tasks.jsonl" --format sft \
                --out-dir "$WORK/parquet"
            publish "$WORK/parquet" "$dataset_path"
            rm -rf "$WORK"
        fi
        if [ ! -d "$MODEL" ]; then
            make_work_folder "$MODEL"
            run skyrl tiny "$WORK/model" --data "$dataset_path/train.parquet"
            publish "$WORK/model" "$MODEL"
            rm -rf "$WORK"
        fi
    else
        [ -f "$dataset_path/train.parquet" ] || die "$dataset_path/train.parquet does not exist; write it with" \
            "data_processing.convert_to_parquet --format sft (docs/dataset_generation.md), or set dataset_path"
        choose_model
    fi
    gpu_count=${gpu_count:-2}
    validation='data.val_files=[]'
    if [ -f "$dataset_path/val.parquet" ]; then
        validation=$(format_option data.val_files "$dataset_path/val.parquet")
    else
        say "$dataset_path/val.parquet does not exist: there is no validation loss"
    fi
    name_run SFT "$train_batch_size"
    set_run_options checkpoints

    run skyrl verl torchrun --nnodes=1 --nproc_per_node="$gpu_count" -m verl.trainer.fsdp_sft_trainer \
        "$(format_option data.train_files "$dataset_path/train.parquet")" \
        "$validation" \
        data.prompt_key=prompt \
        data.response_key=response \
        data.train_batch_size="$train_batch_size" \
        data.micro_batch_size_per_gpu="$micro_batch_size" \
        data.max_length="$max_length" \
        "$(format_option model.partial_pretrain "$MODEL")" \
        ${LORA[@]+"${LORA[@]}"} \
        model.fsdp_config.model_dtype="$model_dtype" \
        optim.lr="$LR" \
        'optim.betas=[0.9,0.98]' \
        optim.weight_decay=0.05 \
        trainer.total_epochs="$total_epochs" \
        trainer.save_freq="$save_freq" \
        trainer.test_freq="$test_freq" \
        "${RUN[@]}" ${OVERRIDES[@]+"${OVERRIDES[@]}"}
)
