"""A critic: a language model's body with one linear output that estimates the rewards still to come."""

from __future__ import annotations

import logging
from typing import cast

import torch
from safetensors import SafetensorError
from transformers import AutoModelForTokenClassification, PreTrainedModel

from skyrl_train.errors import ConfigError
from skyrl_train.models.loading import cannot_load, prepare
from skyrl_train.models.logprobs import hidden_before, on_mask

logger = logging.getLogger(__name__)

CRITIC_PATH = "trainer.critic.model.path"


def load_value_model(
    path: str, *, dtype: torch.dtype, device: torch.device, gradient_checkpointing: bool = False
) -> PreTrainedModel:
    """The critic at `path`: transformers' token classification with one label, in evaluation mode.

    A causal language model has no value head: it gets one of zeros, so that every value starts at 0.

    Raises:
        ConfigError: nothing usable at `path`, or an architecture that has no token classification.
    """
    transformers_logger = logging.getLogger("transformers")
    level = transformers_logger.level
    transformers_logger.setLevel(logging.ERROR)  # what is new and what is left over is said below
    try:
        model, report = AutoModelForTokenClassification.from_pretrained(
            path, num_labels=1, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(cannot_load("critic", CRITIC_PATH, path, error)) from error
    finally:
        transformers_logger.setLevel(level)
    if not isinstance(getattr(model, "score", None), torch.nn.Linear):
        raise ConfigError(
            f"{CRITIC_PATH}={path}: a {type(model).__name__} has no value head `score`; use another model"
        )
    missing = {name for name in report["missing_keys"] if not name.startswith("score.")}
    if missing:
        raise ConfigError(
            f"{CRITIC_PATH}={path} lacks {len(missing)} weights of a {type(model).__name__}, {min(missing)} for one; "
            "give a folder that save_pretrained wrote"
        )
    if report["missing_keys"]:
        for parameter in model.score.parameters():
            torch.nn.init.zeros_(parameter)
        logger.info("%s has no value head: it starts at zero", path)
    prepare(model, path, dtype=dtype, device=device, gradient_checkpointing=gradient_checkpointing)
    return model


def response_values(
    model: PreTrainedModel, sequences: torch.Tensor, attention_mask: torch.Tensor, loss_mask: torch.Tensor
) -> torch.Tensor:
    """Values (B, R) of the states in which the tokens with `loss_mask` 1 were sampled, exactly 0 elsewhere.

    The value at a token is that of what stands before it: it knows nothing of the token itself.
    """
    hidden = hidden_before(model, sequences, attention_mask, loss_mask)  # (N, H)
    value_head = cast(torch.nn.Linear, model.score)
    with torch.autocast(hidden.device.type, enabled=False):  # a value needs more digits than bfloat16 has
        bias = None if value_head.bias is None else value_head.bias.float()
        values = torch.nn.functional.linear(hidden.float(), value_head.weight.float(), bias)  # (N, 1)
    return on_mask(values[:, 0], loss_mask)
