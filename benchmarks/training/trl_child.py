"""The child process of `make bench-training` that trains with TRL: `trl_child.py WORKLOAD FOLDER`."""

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from harness import Requests
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from workloads import WORKLOADS, Workload, encode_prompt, reward

from examples.catch.env import CatchEnv


class OnRequest(TrainerCallback):  # type: ignore[misc]
    """A callback that starts a step when the parent process requests it, and reports the step."""

    def __init__(self, is_sft: bool) -> None:
        self.requests = Requests()
        self._is_sft = is_sft

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.requests.wait():
            sys.exit()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "train_runtime" in logs:  # the summary after the last step
            return
        names = ("loss", "grad_norm") if self._is_sft else ("entropy", "grad_norm", "reward")
        self.requests.report({}, {name: float(logs[name]) for name in names})


class CatchRollouts:
    """A rollout function that plays Catch with `generate`, with one batch of all games per turn."""

    def __init__(self, workload: Workload, rows: Any) -> None:
        self._workload = workload
        self._games = {str(row["prompt"]): row for row in rows}

    @torch.inference_mode()
    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        tokenizer, model = trainer.processing_class, trainer.model
        envs = [CatchEnv({}, self._games[str(prompt)]) for prompt in prompts]
        prompt_ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
        completions: list[list[int]] = [[] for _ in prompts]
        masks: list[list[int]] = [[] for _ in prompts]
        rewards = [0.0] * len(prompts)
        for _ in range(self._workload.n_turns):
            inputs = tokenizer.pad(
                {"input_ids": [ids + done for ids, done in zip(prompt_ids, completions, strict=True)]},
                padding_side="left",
                return_tensors="pt",
            )
            n_new = self._workload.n_new
            output = model.generate(
                **inputs, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=n_new, min_new_tokens=n_new
            )
            for i, new in enumerate(output[:, inputs["input_ids"].shape[1] :].tolist()):
                completions[i] += new
                masks[i] += [1] * len(new)
                result = envs[i].step(tokenizer.decode(new, skip_special_tokens=True))
                rewards[i] += result["reward"]
                if not result["done"]:
                    text = tokenizer.apply_chat_template(
                        result["observations"], tokenize=False, add_generation_prompt=True
                    )
                    observed = tokenizer(f"{tokenizer.eos_token}\n{text}", add_special_tokens=False)["input_ids"]
                    completions[i] += observed
                    masks[i] += [0] * len(observed)
        logprobs = [[0.0] * len(completion) for completion in completions]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completions,
            "logprobs": logprobs,
            "env_mask": masks,
            "episode_reward": rewards,
        }


def score(completions: list[Any], episode_reward: list[float] | None = None, **_: Any) -> list[float]:
    """Return the rewards of the episodes, or else of the responses."""
    return episode_reward or [reward(completion[0]["content"]) for completion in completions]


def main() -> None:
    """Train one step for each request of the parent process."""
    workload, folder = WORKLOADS[sys.argv[1]], Path(sys.argv[2])
    path = next(folder.glob("train.*"))
    dataset = load_dataset({"jsonl": "json"}.get(path.suffix[1:], "parquet"), data_files=str(path), split="train")
    rows = workload.trl_rows or workload.n_trajectories
    settings: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": workload.n_trajectories // rows,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "max_steps": 1000,
        "gradient_checkpointing": False,
        "bf16": torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    if workload.is_sft:  # as text, because TRL would also train the newline that the template puts after the EOS token
        dataset = dataset.map(
            lambda row: {
                "prompt": tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False),
                "completion": row["response"],
            }
        )
    common: dict[str, Any] = {
        "train_dataset": dataset,
        "processing_class": tokenizer,
        "callbacks": [OnRequest(workload.is_sft)],
    }
    if workload.lora_rank:
        common["peft_config"] = LoraConfig(
            r=workload.lora_rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    if workload.is_sft:
        config = SFTConfig(completion_only_loss=True, **settings)
        SFTTrainer(model, args=config, **common).train()
        return
    GRPOTrainer(
        model,
        reward_funcs=score,
        args=GRPOConfig(
            num_generations=workload.n_samples,
            max_completion_length=256 if workload.n_turns > 1 else workload.n_new,
            generation_kwargs={"min_new_tokens": workload.n_new},
            temperature=1.0,
            beta=workload.kl,
            **settings,
        ),
        rollout_func=CatchRollouts(workload, dataset) if workload.n_turns > 1 else None,
        **common,
    ).train()


if __name__ == "__main__":
    main()
