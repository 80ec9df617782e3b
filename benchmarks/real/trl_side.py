"""The child process of `make bench-real` that trains with TRL: `trl_side.py METHOD SEED MODEL FOLDER`.

METHOD is grpo, grpo-continuous (with the continuous batching of transformers) or sft.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from task import N_NEW, N_PROMPTS, N_SAMPLES, SFT_ROWS, reward
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl_child import OnRequest

CACHE = {"page_size": 64, "num_blocks": 2 * N_PROMPTS * N_SAMPLES, "max_batch_tokens": 2048}
"""Settings of transformers' continuous batching. The defaults need more memory than the machine has."""


def score(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    """Return the rewards of the completions."""
    return [reward(completion[0]["content"], truth) for completion, truth in zip(completions, answer, strict=True)]


def main() -> None:
    """Train one step for each request of the parent process."""
    method, seed, model_path, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    dataset = load_dataset("json", data_files=str(folder / "ordered.jsonl"), split="train")
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    settings: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": N_SAMPLES,  # a whole batch takes 6 GB, and no less time
        "gradient_accumulation_steps": SFT_ROWS // N_SAMPLES if method == "sft" else N_PROMPTS,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "num_train_epochs": 1,
        "seed": seed,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    common: dict[str, Any] = {"processing_class": tokenizer, "callbacks": [OnRequest(method == "sft")]}
    if method == "sft":  # as text, because TRL would also train the newline that the template puts after the EOS token
        dataset = dataset.map(
            lambda row: {
                "prompt": tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False),
                "completion": row["response"],
            }
        )
        config = SFTConfig(completion_only_loss=True, train_sampling_strategy="sequential", **settings)
        SFTTrainer(model, args=config, train_dataset=dataset, **common).train()
        return
    is_continuous = method == "grpo-continuous"
    config = GRPOConfig(
        num_generations=N_SAMPLES,
        max_completion_length=N_NEW,
        temperature=1.0,
        beta=0.0,
        shuffle_dataset=False,
        use_transformers_continuous_batching=is_continuous,
        transformers_continuous_batching_config=CACHE if is_continuous else None,
        **settings,
    )
    GRPOTrainer(model, reward_funcs=score, args=config, train_dataset=dataset, **common).train()


if __name__ == "__main__":
    main()
