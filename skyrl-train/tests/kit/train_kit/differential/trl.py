"""TRL's trainers on a CPU: their loss for given inputs, and their training inputs for given rewards.

Only public interfaces are used: `compute_loss` as declared by transformers.Trainer, and the names of its input
tensors.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from skyrl_train.models.loading import load_tokenizer
from skyrl_train.models.logprobs import TokenScores, response_logprobs

Inputs = dict[str, torch.Tensor]
Score = Callable[[Sequence[int]], float]

MAX_LENGTH = 8  # maximum number of tokens of a completion
GROUP_SIZE = 4
PROMPTS = ["1", "22", "333", "4444"]

ON_CPU: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "learning_rate": 0.0,
    "per_device_train_batch_size": 2 * GROUP_SIZE,
    "num_generations": GROUP_SIZE,
}


def loss_trainer(model_path: Path, config: GRPOConfig, trainer_class: type[GRPOTrainer] = GRPOTrainer) -> GRPOTrainer:
    """Return a trainer that computes losses, with its model in training mode."""
    trainer = trainer_class(
        str(model_path),
        lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=load_tokenizer(str(model_path)),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # as transformers.Trainer.train() sets it
    return trainer


def random_inputs(model: PreTrainedModel, seed: int, drift: float, temperature: float, min_length: int = 1) -> Inputs:
    """Return inputs of `compute_loss`: random tokens, and policies with a gap of `drift` nats per token.

    Prompts are padded on the left, completions on the right; each of the 8 rows has at least `min_length`
    tokens.
    """
    random = torch.Generator().manual_seed(seed)
    n_rows, n_prompt = 8, 3

    def near(log_probs: torch.Tensor) -> torch.Tensor:
        noise = drift * torch.randn(log_probs.shape, generator=random)
        return torch.where(inputs["completion_mask"] > 0, log_probs + noise, 0.0)

    prompt_lengths = torch.randint(1, n_prompt + 1, (n_rows, 1), generator=random)
    lengths = torch.randint(min_length, MAX_LENGTH + 1, (n_rows, 1), generator=random)
    prompt_mask = (torch.arange(n_prompt) >= n_prompt - prompt_lengths).long()
    completion_mask = (torch.arange(MAX_LENGTH) < lengths).long()
    n_tokens = model.config.vocab_size
    inputs = {
        "prompt_ids": torch.randint(n_tokens, prompt_mask.shape, generator=random) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(n_tokens, completion_mask.shape, generator=random) * completion_mask,
        "completion_mask": completion_mask,
        "advantages": torch.randn(n_rows, generator=random),
        "num_items_in_batch": completion_mask.sum(),
    }
    old_log_probs = near(scores_of(model, inputs, temperature).logprobs.detach())
    return inputs | {
        "old_per_token_logps": old_log_probs,
        "sampling_per_token_logps": near(old_log_probs),
        "ref_per_token_logps": near(old_log_probs),
    }


def scores_of(model: PreTrainedModel, inputs: Inputs, temperature: float) -> TokenScores:
    """Return the scores of the completions by our worker, (B, R) each."""
    sequences = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    mask = inputs["completion_mask"]
    return response_logprobs(model, sequences, attention_mask, mask, temperature, entropy_grad=True)


def gradient(loss: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """Return the gradient of a loss in all weights, as one vector."""
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])


def training_inputs(
    model_path: Path, config: GRPOConfig | RLOOConfig, scores: Sequence[Score]
) -> list[tuple[Inputs, list[str], torch.Tensor]]:
    """Train on completions sampled by the model, with rewards `score(token ids)`.

    Return the inputs of `compute_loss`, the prompts [B] and the rewards (B, one per score) of each step.
    """
    steps: list[Inputs] = []
    base = GRPOTrainer if isinstance(config, GRPOConfig) else RLOOTrainer

    class RecordingTrainer(base):  # type: ignore[misc,valid-type]
        def compute_loss(self, model: Any, inputs: Inputs, *args: Any, **kwargs: Any) -> torch.Tensor:
            steps.append(dict(inputs))
            return super().compute_loss(model, inputs, *args, **kwargs)

    def reward(score: Score) -> Callable[..., list[float]]:
        return lambda completion_ids, **_: [score(ids) for ids in completion_ids]

    rewards = [reward(score) for score in scores]
    for number, function in enumerate(rewards):
        function.__name__ = f"reward_{number}"
    RecordingTrainer(
        str(model_path),
        rewards,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=load_tokenizer(str(model_path)),
    ).train()
    return [(inputs, _prompts(inputs), _rewards(inputs, scores)) for inputs in steps]


def _prompts(inputs: Inputs) -> list[str]:
    return [str(row[mask > 0].tolist()) for row, mask in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)]


def _rewards(inputs: Inputs, scores: Sequence[Score]) -> torch.Tensor:
    completions = zip(inputs["completion_ids"], inputs["completion_mask"], strict=True)
    return torch.tensor([[score(row[mask > 0].tolist()) for score in scores] for row, mask in completions])
