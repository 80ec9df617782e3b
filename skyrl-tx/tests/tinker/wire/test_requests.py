import json

import pytest
from pydantic import ValidationError

from tx.tinker.wire.requests import MAX_DEPTH, AdamSettings, AsampleRequest, CreateSessionRequest


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"\\ud800"', "unpaired surrogate"),
        ('{"a": ["\\udfff"]}', "unpaired surrogate"),
        ('{"a\\u0000": 1}', "null character"),
        (nested(MAX_DEPTH + 1), "nested more than 64 deep"),
    ],
)
def test_values_that_cannot_be_stored_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CreateSessionRequest.model_validate({"user_metadata": {"key": json.loads(text)}})
    sample = {"prompt": {"chunks": []}, "sampling_params": {}, "target_prompt_logprobs": json.loads(text)}
    with pytest.raises(ValidationError, match=message):
        AsampleRequest.model_validate(sample)


def test_stored_values_can_be_read_back() -> None:
    text = f'{{"user_metadata": {{"a": {nested(MAX_DEPTH)}, "b": {{"c": [1, "ü", null, 0.5, true]}}}}}}'
    body = CreateSessionRequest.model_validate_json(text)
    assert json.loads(body.model_dump_json())["user_metadata"] == json.loads(text)["user_metadata"]


def test_a_beta_that_is_1_in_float32_is_refused() -> None:
    with pytest.raises(ValidationError, match="beta2"):
        AdamSettings(beta2=0.99999999)
