"""Conversion between `SamplingParams` and dicts with SkyRL's and vLLM's names."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.errors import DataError
from skyrl_train.inference_engines.base import SamplingParams

ALIASES = {"max_tokens": "max_new_tokens", "max_generate_length": "max_new_tokens", "min_tokens": "min_new_tokens"}
"""SkyRL's and vLLM's names, mapped to ours."""

IGNORED = {
    "logprobs": (None, 0, 1),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (True,),
    "no_stop_trim": (True,),
}
"""Parameters that cannot be changed here, with the values that are accepted and ignored."""


def to_sampling_params(sampling: SamplingParams) -> dict[str, Any]:
    """Convert sampling parameters to a dict with vLLM's names, as SkyRL passes them to generators."""
    not_copied = {"max_new_tokens", "min_new_tokens", "n_top_logprobs"}  # renamed, or not SkyRL's
    return {
        **{name: value for name, value in asdict(sampling).items() if name not in not_copied},
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": 0,
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
    }


def to_sampling(params: Mapping[str, Any] | None, cfg: GeneratorConfig | None) -> SamplingParams:
    """Convert a dict with SkyRL's or vLLM's names. None means `cfg.sampling_params`.

    Raises:
        DataError: a parameter is unknown, or neither `params` nor `cfg` limits the number of tokens.
    """
    configured = None if cfg is None else SamplingParams.from_config(cfg.sampling_params)
    if params is None and configured is not None:
        return configured
    known = {field.name for field in fields(SamplingParams)}
    converted: dict[str, Any] = {} if configured is None else {"max_new_tokens": configured.max_new_tokens}
    for name, value in (params or {}).items():
        if name in IGNORED and value in IGNORED[name]:
            continue
        our_name = ALIASES.get(name, name)
        if our_name not in known:
            raise DataError(f"sampling_params has {name}={value!r}, which no engine here supports; remove it")
        if value is not None:
            converted[our_name] = value
    for name in converted.keys() & {"stop", "stop_token_ids"}:
        converted[name] = (converted[name],) if isinstance(converted[name], str) else tuple(converted[name])
    if "max_new_tokens" not in converted:
        raise DataError("sampling_params has no max_tokens, and the generator has no configuration to take it from")
    return SamplingParams(**converted)
