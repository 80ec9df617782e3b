"""Log-probs of the last tokens of each row, behind a subset of SkyRL's `HFModelWrapper` interface.

Pass constructor arguments by keyword, because their order may differ from SkyRL's.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from skyrl_train.config.policy import LoraConfig
from skyrl_train.errors import ConfigError
from skyrl_train.models.loading import check_head, checkpointed_layers, default_device, load_model
from skyrl_train.models.logprobs import response_logprobs
from skyrl_train.models.lora import add_adapter
from skyrl_train.types.specs import LoraSpec

SOURCE = "pretrain_or_model"


class HFModelWrapper(torch.nn.Module):
    """A Hugging Face causal language model (`model`) that returns log-probs of tokens."""

    def __init__(
        self,
        pretrain_or_model: str | PreTrainedModel,
        use_flash_attention_2: bool = False,
        bf16: bool = True,
        lora_rank: int = 0,
        lora_alpha: int = 16,
        lora_dropout: float = 0.0,
        target_modules: str | list[str] = "all-linear",
        exclude_modules: str | list[str] | None = None,
        temperature: float = 1.0,
    ) -> None:
        """Load a model by path or name, in bfloat16 or float32, or wrap a loaded model.

        `lora_rank` > 0 adds an adapter and freezes everything else. `temperature` divides the logits.
        `use_flash_attention_2` is accepted for compatibility and ignored. So is `bf16` if the model is already loaded.

        Raises:
            ConfigError: there is no model at the path, the log-probs would be wrong, `lora_dropout` > 0, or the model
                has no modules that match `target_modules`.
        """
        super().__init__()
        if lora_dropout > 0:
            raise ConfigError(f"lora_dropout={lora_dropout:g} would make log-probs random; set lora_dropout=0")
        if isinstance(pretrain_or_model, str):
            dtype = torch.bfloat16 if bf16 else torch.float32
            self.model = load_model(pretrain_or_model, dtype=dtype, device=default_device(), key=SOURCE)
        else:
            self.model = pretrain_or_model
            check_head(self.model, SOURCE)
        self.temperature = temperature
        if lora_rank > 0:
            excluded = [exclude_modules] if isinstance(exclude_modules, str) else exclude_modules
            config = LoraConfig(
                rank=lora_rank, alpha=lora_alpha, target_modules=target_modules, exclude_modules=excluded
            )
            add_adapter(self.model, LoraSpec(config, "lora_rank", str(self.model.name_or_path)))

    def forward(
        self,
        sequences: torch.Tensor,
        num_actions: int,
        attention_mask: torch.Tensor | None = None,
        temperature: float | None = None,
        return_output: bool = False,
        compute_entropy: bool = False,
        entropy_requires_grad: bool = True,
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the log-probs (B, num_actions) of the last tokens of `sequences` (B, L), 0 on padding.

        `return_output` adds a dictionary to the result. With `compute_entropy`, it has `entropy` (B, num_actions).
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(sequences)
        with checkpointed_layers(self.model):
            scores = response_logprobs(
                self.model,
                sequences,
                attention_mask,
                attention_mask[:, -num_actions:],
                self.temperature if temperature is None else temperature,
                entropy_grad=compute_entropy and entropy_requires_grad,
            )
        output = {"entropy": scores.entropy} if compute_entropy else {}
        return (scores.logprobs, output) if return_output else scores.logprobs

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Recompute activations in the backward pass."""
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs or {"use_reentrant": False})

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations for the backward pass."""
        self.model.gradient_checkpointing_disable()
