"""What engines take."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl_train.config import load_config
from skyrl_train.inference_engines.base import SamplingParams


@pytest.mark.parametrize(("stop", "expected"), [(None, ()), ("END", ("END",)), (["a", "b"], ("a", "b"))])
def test_sampling_parameters_are_passed_on(stop: Any, expected: tuple[str, ...]) -> None:
    section = {"max_generate_length": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "stop": stop}
    cfg = load_config({"generator": {"sampling_params": section}})
    assert SamplingParams.from_config(cfg.generator.sampling_params) == SamplingParams(5, 0.5, 0.9, 3, 0.1, expected)
