"""Load models and their tokenizers from a Hugging Face folder or Hub name."""

import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from jinja2 import TemplateError, TemplateSyntaxError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from skyrl_train.errors import ConfigError
from skyrl_train.media.processing import check_same_images, has_vision
from skyrl_train.models.attributes import with_attribute
from skyrl_train.models.deferred import create_without_weights, is_finite
from skyrl_train.models.fused import fuse_operations
from skyrl_train.models.last_layer import narrow_last_layer
from skyrl_train.models.logprobs import scaled_logits
from skyrl_train.models.vision_heads import register_head
from skyrl_train.models.weight_files import suggest_folder
from skyrl_train.types.specs import Role

logger = logging.getLogger(__name__)

HUB_TIMEOUT_S = 10.0
KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Variables with the sizes of two caches of oneDNN, which multiplies bfloat16 matrices on a CPU. It compiles a kernel
for each shape, and passes differ in their number of tokens, so its 1,024 kernels would grow to 1 GB."""
MAX_KERNELS = "128"
LENGTH_DEPENDENT_ROPE = ("longrope", "dynamic")
MEDIA_TOKEN = re.compile("image|video|audio|vision", re.IGNORECASE)

POLICY_PATH = "trainer.policy.model.path"
REF_PATH = "trainer.ref.model.path"
CRITIC_PATH = "trainer.critic.model.path"

AUTO_CLASSES: Mapping[Role, Any] = {
    "policy": AutoModelForCausalLM,
    "ref": AutoModelForCausalLM,
    "critic": AutoModelForTokenClassification,
    "reward": AutoModelForSequenceClassification,
}
"""Class of a text model in each role. Critics and reward models have a head with one output."""


def model_class(role: Role, config: PretrainedConfig) -> Any:
    """Return the class that loads a model in a role. ConfigError if a model that reads images cannot have its head."""
    if not has_vision(config):
        return AUTO_CLASSES[role]
    if role in ("critic", "reward"):
        register_head(role, config)
        return AUTO_CLASSES[role]
    return AutoModelForImageTextToText


def default_device() -> torch.device:
    """Return the first GPU, or the CPU if there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_tokenizer(
    path: str,
    key: str = POLICY_PATH,
    chat_template: str | None = None,
    template_key: str = "generator.chat_template",
    *,
    replaces_template: bool = False,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer at `path`, with padding on the left and a pad token (the EOS token if it has none).

    `chat_template` is used if the tokenizer has no template, or always with `replaces_template`. `key` and
    `template_key` are the configuration keys of `path` and `chat_template`, for error messages.

    Raises:
        ConfigError: no tokenizer at `path`, no EOS token, no chat template, or a syntax error in the template.
    """
    with _loading("tokenizer", key, path):
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise ConfigError(f"{key}={path} has no tokenizer.json; save the tokenizer there with save_pretrained")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {key}={path} has no eos_token; set one and save it")
    own_template = None if replaces_template and chat_template else tokenizer.chat_template
    tokenizer.chat_template = own_template or chat_template
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer of {key}={path} has no chat template; use an instruct model, or set {template_key}"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    _check_embeddings(tokenizer, key, path)
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except TemplateSyntaxError as error:
        source, fix = (
            (f"{key}={path}", f"correct it, or set {template_key}") if own_template else (template_key, "correct it")
        )
        raise ConfigError(
            f"the chat template of {source} is broken in line {error.lineno}: {error.message}; {fix}"
        ) from error
    except (TemplateError, TypeError, ValueError, LookupError) as error:
        logger.debug("The chat template rejects a user message alone, which the rows may not have: %r", error)
    return tokenizer


def _check_embeddings(tokenizer: PreTrainedTokenizerBase, key: str, path: str) -> None:
    """Raise ConfigError if the tokenizer has tokens without an embedding in the model.

    Placeholders of images, video and audio are exempt: the tokenizer of Gemma 3's text models has such a token.
    """
    try:
        size = AutoConfig.from_pretrained(path).get_text_config().vocab_size
    except (OSError, ValueError, AttributeError) as error:  # loading the model reports the fault
        logger.debug("%s=%s has no configuration with a vocabulary size: %r", key, path, error)
        return
    unknown = [token for token, token_id in tokenizer.get_vocab().items() if token_id >= size]
    if missing := sorted(token for token in unknown if not MEDIA_TOKEN.search(token)):
        raise ConfigError(
            f"{key}={path} has {size:,} embeddings, but {len(missing)} tokens of its tokenizer have larger ids, e.g. "
            f"{missing[0]!r}; enlarge the embeddings with resize_token_embeddings, or remove these tokens"
        )


def check_same_tokens(path: str, key: str, tokenizer: PreTrainedTokenizerBase, *, base_path: str | None = None) -> None:
    """Raise ConfigError if the model at `path`, the value of `key`, has other tokens than the policy.

    Both text and images are checked. `tokenizer` is the policy's. If `path` is an adapter, `base_path` is its base
    model.
    """
    _check_same_vocabulary(path, key, tokenizer)
    check_same_images(base_path or path, f"{key}={path}", tokenizer.name_or_path)


def _check_same_vocabulary(path: str, key: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if the tokenizer at `path` maps a token of the policy to a different id."""
    try:
        other = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError):
        logger.info("%s=%s has no tokenizer; assuming that it uses the policy's", key, path)
        return
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    if different := [token for token, token_id in ours.items() if theirs.get(token) != token_id]:
        raise ConfigError(
            f"{key}={path} has another tokenizer than the policy: {different[0]!r} has the id "
            f"{theirs.get(different[0])} instead of {ours[different[0]]}; use a model with the policy's tokenizer"
        )


def create_empty(path: str, role: Role, **options: Any) -> PreTrainedModel:
    """Return the model at `path` in a role, on the meta device. `options` go to `AutoConfig.from_pretrained`."""
    config: PretrainedConfig = AutoConfig.from_pretrained(path, **options)
    if role in ("critic", "reward"):
        config.num_labels = 1
    with torch.device("meta"):
        return model_class(role, config).from_config(config)


def load_model(
    path: str,
    role: Role = "policy",
    *,
    dtype: torch.dtype,
    device: torch.device,
    gradient_checkpointing: bool = False,
    key: str = POLICY_PATH,
    pad_token_id: int | None = None,
) -> PreTrainedModel:
    """Load the model at `path` for a role, in evaluation mode because dropout would make log-probs random.

    A critic is a token classification model, and a reward model a sequence classification model. Both have a head
    `score` with one output. A causal language model has none, so a critic gets one of zeros, and every value starts
    at 0. A reward model gets one only for training, i.e. with `pad_token_id`: the token that it ignores at the end of
    a row. Without `pad_token_id`, a model without a reward head is rejected.

    `key` is the configuration key of `path`, for error messages.

    Raises:
        ConfigError: no model at `path`, an architecture without this head, or one whose log-probs would be wrong.
    """
    source = f"{key}={path}"
    kind = {"critic": "critic", "reward": "reward model"}.get(role, "model")
    has_head = role in ("critic", "reward")
    adds_head = role == "critic" or pad_token_id is not None
    settings, head = {"num_labels": 1} if has_head else {}, "score." if adds_head else ""
    with _loading(kind, key, path):
        config = AutoConfig.from_pretrained(path)
    for variable in KERNEL_CACHES:  # read when the first kernel is compiled
        os.environ.setdefault(variable, MAX_KERNELS)
    auto_class = model_class(role, config)
    model: Any = create_without_weights(auto_class, source, path, dtype, optional=head, **settings)
    is_deferred = model is not None
    if model is None:
        transformers_logger = logging.getLogger("transformers")
        level = transformers_logger.level
        if has_head:
            transformers_logger.setLevel(logging.ERROR)  # missing weights are reported below
        try:
            with _loading(kind, key, path):
                model, report = auto_class.from_pretrained(path, dtype=dtype, output_loading_info=True, **settings)
        finally:
            transformers_logger.setLevel(level)
    if has_head and not isinstance(getattr(model, "score", None), torch.nn.Linear):
        raise ConfigError(f"{source}: a {type(model).__name__} has no head `score`; use another model")
    if not is_deferred:
        new = {name for name in report["missing_keys"] if head and name.startswith(head)}
        _check_complete(model, key, path, report["missing_keys"] - new)
        if new:
            for parameter in model.score.parameters():
                torch.nn.init.zeros_(parameter)
            logger.info("%s has no head for the %s; initializing it to zero", path, kind)
    _prepare(model, key, path, device, gradient_checkpointing, is_deferred=is_deferred)
    if not (has_head or is_deferred):
        check_head(model, source)
    if pad_token_id is not None:
        model.config.pad_token_id = model.config.get_text_config().pad_token_id = pad_token_id
    return model


def check_vocabulary_size(size: int, key: str, path: str, needed: int) -> None:
    """Raise ConfigError if a model has fewer embeddings (`size`) than the policy that samples its inputs (`needed`)."""
    if size < needed:
        raise ConfigError(
            f"{key}={path} has {size:,} embeddings, fewer than the {needed:,} of the policy; use a model "
            "with the policy's vocabulary, or enlarge its embeddings with resize_token_embeddings"
        )


def _check_complete(model: PreTrainedModel, key: str, path: str, missing: Collection[str]) -> None:
    """Raise ConfigError if weights are missing (transformers made them random), NaN or infinite."""
    if missing:
        raise ConfigError(
            f"{key}={path} lacks {len(missing)} weights of a {type(model).__name__}, e.g. {min(missing)}; "
            "use a folder that save_pretrained wrote"
        )
    for name, parameter in model.named_parameters():
        if not is_finite(parameter.detach()):
            raise ConfigError(
                f"{key}={path} has NaN or infinite weights in {name}; use another checkpoint of the model"
            )


@contextmanager
def _loading(kind: str, key: str, path: str) -> Iterator[None]:
    """Turn errors from transformers into a ConfigError with the key.

    A Hub name that is not in the cache is looked up once before transformers tries, because without a network,
    transformers asks for each file six times and takes a minute.
    """
    try:
        is_local = Path(path).exists() or constants.HF_HUB_OFFLINE
        if not is_local and try_to_load_from_cache(path, "config.json") is None:
            try:
                HfApi(constants.ENDPOINT).model_info(path, timeout=HUB_TIMEOUT_S)
            except HfHubHTTPError as error:  # transformers says whether the model is missing, private or gated
                logger.debug("The Hub answered for %s: %s", path, error)
            except Exception as error:
                raise OSError(f"{constants.ENDPOINT} cannot be reached: {error}") from error
        yield
    except Exception as error:  # a malformed file makes transformers raise anything
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            f"cannot load the {kind} from {key}={path}: {reason}; use a folder that contains config.json, "
            f"model.safetensors and tokenizer.json, or a name the Hugging Face Hub knows.{suggest_folder(path)}"
        ) from error


def _prepare(
    model: PreTrainedModel, key: str, path: str, device: torch.device, checkpointing: bool, *, is_deferred: bool
) -> None:
    """Prepare a loaded model for training and scoring on `device`. Deferred weights are moved later."""
    # `check_head` and `find_sharing_fault` compute only short rows, so features that depend on the length are rejected
    # by name. Longrope (Phi-3.5) and dynamic NTK choose the frequencies of all rows by the longest row.
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # some have one per layer type
        if (rope_type := part.get("rope_type")) in LENGTH_DEPENDENT_ROPE:
            raise ConfigError(
                f"{key}={path}: a {type(model).__name__} has position embeddings of rope_type {rope_type}, which "
                "depend on the longest row of a batch; use another model"
            )
    module: torch.nn.Module = model.eval()
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # PyTorch's attention would ignore it
    if model.base_model is model:  # Llama 4's text model has the prefix of the model with images
        children = [name for name, child in model.named_children() if isinstance(child, PreTrainedModel)]
        model.base_model_prefix = next(iter(children), model.base_model_prefix)
    if not is_deferred:
        module.to(device)
        for parameter in model.parameters():
            if parameter.dim() == 1:  # files do not align vectors, and alignment changes the rounding of products
                parameter.data = parameter.data.clone()
    fuse_operations(model)
    if device.type == "cpu":
        narrow_last_layer(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    role = {POLICY_PATH: "policy", REF_PATH: "reference", CRITIC_PATH: "critic"}.get(key, "model")
    n_parameters = f"{model.num_parameters():,}"
    place = "read tensor by tensor" if is_deferred else f"on {device}"
    logger.info("Loaded the %s from %s: %s parameters, %s %s", role, path, n_parameters, model.dtype, place)


def checkpointed_layers(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Make layers recompute their activations if gradient checkpointing is on.

    Transformers checkpoints a layer only in training mode, so the layer alone is put in training mode. The modules in
    it stay in evaluation mode, because dropout would make the trained log-probs differ from the engine's.
    """
    layers = [
        module
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
    ]
    return with_attribute(layers, "training", True)


@torch.no_grad()
def check_head(model: PreTrainedModel, source: str) -> None:
    """Raise ConfigError if the model changes its logits after the head in a way that `scaled_logits` does not cover."""
    input_ids = torch.arange(1, 5, device=model.device)[None]  # (1, 4)
    expected = model(input_ids=input_ids, use_cache=False).logits
    output = model.base_model(input_ids=input_ids, use_cache=False)
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None:
        raise ConfigError(f"{source}: the base of a {type(model).__name__} returns no hidden states; use another model")
    logits = scaled_logits(model, model.get_output_embeddings()(hidden).float())
    if not torch.allclose(logits, expected.float(), atol=1e-3, rtol=1e-3):
        raise ConfigError(
            f"{source}: a {type(model).__name__} changes its logits after the language-model "
            "head in a way that is not supported; use another architecture"
        )


def set_train_dtype(model: PreTrainedModel, dtype: torch.dtype, *, is_empty: bool) -> dict[str, torch.dtype]:
    """Convert parameters to the dtype of training in place, and return the previous dtypes of converted ones by name.

    A step of AdamW changes a weight by about the learning rate. A bfloat16 weight has 8 significant bits, so near 0.02
    its neighbors are 1e-4 apart. A step of 1e-6 would round to nothing, unless the optimizer rounds stochastically.

    Value heads stay float32, because bfloat16 is too coarse for values, as do weights that transformers never rounds.
    With `is_empty`, values are not copied, because they are written later.
    """
    loaded_dtype, dtypes = model.dtype, {}
    is_wide = ["score.", *(getattr(model, "_keep_in_fp32_modules_strict", None) or ())]
    for name, parameter in model.named_parameters():
        new_dtype = torch.float32 if any(part in name for part in is_wide) else dtype
        if parameter.dtype != new_dtype and min(parameter.dtype.itemsize, new_dtype.itemsize) < 4:  # float64 stays
            dtypes[name] = parameter.dtype
            values = parameter.detach()
            parameter.data = torch.empty_like(values, dtype=new_dtype) if is_empty else values.to(new_dtype)
    model.config.dtype = loaded_dtype  # a checkpoint's config.json describes exports, not the trained weights
    return dtypes


def autocast(device: torch.device, bf16: bool) -> torch.autocast:
    """Return a context that computes in bfloat16 on a GPU if `bf16` is set. A CPU uses the dtype of the weights."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16 and device.type == "cuda")
