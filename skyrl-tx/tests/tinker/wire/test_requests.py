from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from tx.tinker.wire.requests import DEEPEST, Adam, CreateSessionRequest, SampleRequest


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ('"\\ud800"', "half of a surrogate pair"),
        ('{"a": ["\\udfff"]}', "half of a surrogate pair"),
        ('{"a\\u0000": 1}', "null character"),
        (nested(DEEPEST + 1), "nested more than 64 deep"),
    ],
)
def test_what_could_not_be_kept_is_refused(told: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CreateSessionRequest.model_validate({"user_metadata": {"key": json.loads(told)}})
    sample = {"prompt": {"chunks": []}, "sampling_params": {}, "target_prompt_logprobs": json.loads(told)}
    with pytest.raises(ValidationError, match=message):
        SampleRequest.model_validate(sample)


def test_what_is_kept_can_be_read_again() -> None:
    told = f'{{"user_metadata": {{"a": {nested(DEEPEST)}, "b": {{"c": [1, "ü", null, 0.5, true]}}}}}}'
    asked = CreateSessionRequest.model_validate_json(told)
    assert json.loads(asked.model_dump_json())["user_metadata"] == json.loads(told)["user_metadata"]


def test_a_beta_that_is_1_in_float32_is_refused() -> None:
    with pytest.raises(ValidationError, match="beta2"):
        Adam(beta2=0.99999999)
