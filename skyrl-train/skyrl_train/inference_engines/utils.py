"""Sampling parameters under the module name that SkyRL's scripts import."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from skyrl_train.absent import refuse_name
from skyrl_train.config.generator import SamplingConfig
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.inference_engines.params import to_sampling, to_sampling_params

__all__ = ["get_sampling_params_for_backend"]


def get_sampling_params_for_backend(
    backend: str, sampling_params: SamplingConfig | Mapping[str, Any]
) -> dict[str, Any]:
    """Return sampling parameters as a dictionary with vLLM's names, which every backend takes.

    `sampling_params` is a section of the configuration, or a dictionary under the names of SkyRL.
    """
    if isinstance(sampling_params, SamplingConfig):
        return to_sampling_params(SamplingParams.from_config(sampling_params))
    return to_sampling_params(to_sampling(sampling_params, None))


if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, __name__)  # for names that SkyRL's scripts import
