"""Sampling parameters under the names of SkyRL and vLLM."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from skyrl_train.compat.skyrl.sampling_params import to_sampling, to_sampling_params
from skyrl_train.config import load_config
from skyrl_train.errors import DataError
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.inference_engines.utils import get_sampling_params_for_backend


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(4, temperature=0.5, stop=("END",)),
        SamplingParams(9, min_new_tokens=2, top_k=5, stop_token_ids=(1, 2), ignore_eos=True, min_p=0.5),
    ],
)
def test_a_round_trip_through_the_names_of_skyrl_keeps_sampling_parameters(sampling: SamplingParams) -> None:
    assert to_sampling(to_sampling_params(sampling), None) == sampling


def test_sampling_parameters_have_the_names_of_skyrl() -> None:
    limits = {"max_tokens": 4, "min_tokens": 0, "ignore_eos": False, "stop": ["END"], "stop_token_ids": []}
    distribution = {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    output = {"logprobs": 0, "skip_special_tokens": True, "include_stop_str_in_output": True}
    sampling = SamplingParams(4, temperature=0.5, stop=("END",))
    assert to_sampling_params(sampling) == limits | distribution | penalties | output


CONFIGURED = load_config({"generator": {"sampling_params": {"max_generate_length": 7, "top_p": 0.5}}}).generator


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, SamplingParams(7, top_p=0.5)),
        ({"max_tokens": 3, "stop": "END"}, SamplingParams(3, stop=("END",))),
        ({"max_generate_length": 3, "stop": ["A", "B"], "logprobs": 1}, SamplingParams(3, stop=("A", "B"))),
        ({"max_new_tokens": 3, "min_tokens": 1, "stop": None, "no_stop_trim": True}, SamplingParams(3, 1)),
        ({"temperature": 0.0}, SamplingParams(7, temperature=0.0)),
    ],
)
def test_sampling_parameters_may_have_any_of_their_names(
    params: dict[str, Any] | None, expected: SamplingParams
) -> None:
    assert to_sampling(params, CONFIGURED) == expected


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 3, "temprature": 0.5}, "temprature=0.5, which no engine here supports"),
        ({"max_tokens": 3, "skip_special_tokens": False}, "skip_special_tokens=False"),
        ({"temperature": 0.5}, "no max_tokens"),
        (None, "no max_tokens"),
    ],
)
def test_unknown_sampling_parameters_are_rejected(params: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        to_sampling(params, None)


@pytest.mark.parametrize("backend", ["vllm", "sglang", "hf"])
def test_a_generator_gets_the_configured_parameters_as_a_dictionary(backend: str) -> None:
    params = get_sampling_params_for_backend(backend, CONFIGURED.sampling_params)
    assert params["max_tokens"] == 7
    assert to_sampling(params, None) == SamplingParams(7, top_p=0.5)
    own = OmegaConf.create({"max_generate_length": 7, "top_p": 0.5, "stop": None})
    assert get_sampling_params_for_backend(backend, own) == params
