from typing import Any

import pytest

from skyrl_train.config import load_config
from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import SamplingParams


@pytest.mark.parametrize(("stop", "expected"), [(None, ()), ("END", ("END",)), (["a", "b"], ("a", "b"))])
def test_sampling_parameters_are_passed_on(stop: Any, expected: tuple[str, ...]) -> None:
    same = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
    }
    section = same | {"max_generate_length": 5, "min_tokens": 2, "stop": stop, "stop_token_ids": [7]}
    cfg = load_config({"generator": {"sampling_params": section}})
    assert SamplingParams.from_config(cfg.generator.sampling_params) == SamplingParams(
        max_new_tokens=5, min_new_tokens=2, stop=expected, stop_token_ids=(7,), **same
    )


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"min_new_tokens": -1},
        {"temperature": -1.0},
        {"temperature": 1e-40},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"n_top_logprobs": -1},
    ],
)
def test_values_out_of_range_are_rejected(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(EngineError, match=f"{name}={options[name]} must be "):
        SamplingParams(**{"max_new_tokens": 1} | options)
