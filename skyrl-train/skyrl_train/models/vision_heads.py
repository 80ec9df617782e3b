"""Classes of vision-language critics and reward models.

Transformers has vision-language models with a value or reward head only for a few families, e.g.
`Gemma3ForSequenceClassification`. Derive the missing classes the same way and register them.
"""

from collections.abc import Mapping
from typing import Any, Literal

from transformers import (
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from skyrl_train.errors import ConfigError

HEADS: Mapping[str, tuple[Any, type, str]] = {
    "critic": (AutoModelForTokenClassification, GenericForTokenClassification, "ForTokenClassification"),
    "reward": (AutoModelForSequenceClassification, GenericForSequenceClassification, "ForSequenceClassification"),
}


def register_head(role: Literal["critic", "reward"], config: PretrainedConfig) -> None:
    """Let transformers' automatic classes create a vision-language critic or reward model.

    Raise ConfigError if none can be derived, because the family has no `<Name>ForConditionalGeneration`.
    """
    auto_class, generic, suffix = HEADS[role]
    if type(config) in auto_class._model_mapping:
        return
    generative: Any = AutoModelForImageTextToText._model_mapping.get(type(config), None)
    bases = [] if generative is None else [base for base in generative.__bases__ if issubclass(base, PreTrainedModel)]
    if not (bases and generative.__name__.endswith("ForConditionalGeneration")):
        raise ConfigError(
            f"a {config.model_type} reads images, and cannot be a {role} here; use Qwen2.5-VL, Qwen3-VL, Qwen3.5, "
            "Gemma 3, Gemma 4, Idefics 3 or SmolVLM"
        )
    name = generative.__name__.removesuffix("ForConditionalGeneration") + suffix
    # Files of some families have other tensor names than the model. Transformers finds the conversion by the class's
    # name, else by the type of the model. It ignores the type for classes outside of its own modules.
    if (conversion := get_checkpoint_conversion_mapping(generative.__name__)) is not None:
        register_checkpoint_conversion_mapping(name, conversion, overwrite=True)
    derived = type(name, (generic, bases[0]), {"__module__": generative.__module__, "config_class": type(config)})
    auto_class.register(type(config), derived, exist_ok=True)  # else ignored for a configuration of transformers
