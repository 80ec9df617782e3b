"""Load a causal language model and its tokenizer from a Hugging Face folder or Hub name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from skyrl_train.errors import ConfigError
from skyrl_train.models.logprobs import scaled_logits

logger = logging.getLogger(__name__)

POLICY_PATH = "trainer.policy.model.path"
REF_PATH = "trainer.ref.model.path"


def default_device() -> torch.device:
    """The first GPU where there is one, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_tokenizer(path: str, key: str = POLICY_PATH, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer at `path`, padding on the left, with a pad token (the end-of-sequence token if it has none).

    `key` is the configuration key that `path` came from, for error messages; a tokenizer without a chat template gets
    `chat_template`.

    Raises:
        ConfigError: nothing usable at `path`, no end-of-sequence token, or no chat template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    except (OSError, ValueError) as error:
        raise ConfigError(cannot_load("tokenizer", key, path, error)) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {key}={path} has no eos_token; set one and save it")
    tokenizer.chat_template = tokenizer.chat_template or chat_template
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer of {key}={path} has no chat template; use an instruct model, "
            "or set tokenizer.chat_template and save it with save_pretrained"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_same_vocabulary(path: str, key: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if the model at `path` comes with a tokenizer that gives other ids to the policy's tokens."""
    try:
        other = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError):
        logger.info("%s=%s has no tokenizer of its own; it is taken to read the policy's tokens", key, path)
        return
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    if different := [token for token, token_id in ours.items() if theirs.get(token) != token_id]:
        raise ConfigError(
            f"{key}={path} reads other tokens than the policy: {different[0]!r} is {ours[different[0]]} for the policy "
            f"and {theirs.get(different[0])} for it; take a model with the policy's tokenizer"
        )


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    gradient_checkpointing: bool = False,
    key: str = POLICY_PATH,
) -> PreTrainedModel:
    """The causal language model at `path`, in evaluation mode: dropout would make log-probs random.

    `key` is the configuration key that `path` came from, for error messages.

    Raises:
        ConfigError: nothing usable at `path`, or an architecture whose log-probs would come out wrong.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(cannot_load("model", key, path, error)) from error
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        raise ConfigError(
            f"{key}={path}: PyTorch's attention leaves out the softcapping of a "
            f"{type(model).__name__} (attn_logit_softcapping in its config.json), so its log-probs would be wrong; use "
            "another model"
        )
    prepare(model, path, dtype=dtype, device=device, gradient_checkpointing=gradient_checkpointing)
    _check_head(model, f"{key}={path}")
    return model


def prepare(
    model: PreTrainedModel, path: str, *, dtype: torch.dtype, device: torch.device, gradient_checkpointing: bool
) -> None:
    """Put a model that was just read into the state it trains in."""
    model.eval().to(device)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    n_params = sum(parameter.numel() for parameter in model.parameters())
    logger.info("Loaded %s: %s parameters, %s on %s", path, f"{n_params:,}", dtype, device)


@contextmanager
def checkpointed_layers(model: PreTrainedModel) -> Iterator[None]:
    """Let layers recompute their activations, if gradient checkpointing is on.

    Transformers checkpoints a layer only while it is in training mode; everything inside it stays in evaluation
    mode, so that dropout never makes the trained log-probs differ from the engine's.
    """
    layers = [
        module
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
    ]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


@torch.no_grad()
def _check_head(model: PreTrainedModel, source: str) -> None:
    """Refuse a model that changes its logits in a way that `scaled_logits` does not know."""
    input_ids = torch.arange(1, 5, device=model.device)[None]  # (1, 4)
    expected = model(input_ids=input_ids, use_cache=False).logits
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    logits = scaled_logits(model, model.get_output_embeddings()(hidden).float())
    if not torch.allclose(logits, expected.float(), atol=1e-3, rtol=1e-3):
        raise ConfigError(
            f"{source}: a {type(model).__name__} changes its logits after the language-model "
            "head in a way that is not supported; use another architecture"
        )


def cannot_load(what: str, key: str, path: str, error: Exception) -> str:
    """The sentence for a path that holds nothing usable."""
    reason = str(error).strip().splitlines()[0]
    return (
        f"cannot load the {what} from {key}={path}: {reason}; give a folder that holds "
        "config.json, model.safetensors and tokenizer.json, or a name the Hugging Face Hub knows"
    )


def autocast(device: torch.device, bf16: bool) -> torch.autocast:
    """Compute in bfloat16 on a GPU when asked; a CPU computes in the dtype of the weights."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16 and device.type == "cuda")
