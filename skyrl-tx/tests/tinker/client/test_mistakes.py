"""What a user does wrong, the real client raises at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types
from tx_client import PROMPT, datum
from tx_server import BASE_MODEL

CE = "cross_entropy"


def superfluous() -> types.Datum:
    return datum(advantages=np.ones(3))


MISTAKES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "name": (lambda s, t: s.create_lora_training_client("other/model", rank=4).result(), "'other/model' is not served"),
    "rank": (lambda s, t: s.create_lora_training_client(BASE_MODEL, rank=999).result(), "rank=999 is more than"),
    "loss": (lambda s, t: t.forward_backward([datum()], "stable_reinforce").result(), "loss_fn='stable_reinforce'"),
    "setting": (lambda s, t: t.forward_backward([datum()], "cross_entropy", {"beta": 1.0}).result(), "'beta'"),
    "lacks": (lambda s, t: t.forward_backward([datum()], "ppo").result(), "lacks 'logprobs'"),
    "superfluous": (
        lambda s, t: t.forward_backward([superfluous()], "cross_entropy").result(),
        "'advantages'",
    ),
    "length": (lambda s, t: t.forward_backward([datum(weights=np.ones(2))], CE).result(), r"shape \[2\]"),
    "too long": (
        lambda s, t: t.forward_backward([datum(65)], CE).result(),
        "65 tokens, and the model takes 64",
    ),
    "nan": (
        lambda s, t: t.forward_backward([datum(weights=np.float32([1, np.nan, 1]))], CE).result(),
        "is nan",
    ),
    "image": (
        lambda s, t: t.forward_backward(
            [
                types.Datum(
                    model_input=types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)]),
                    loss_fn_inputs={"target_tokens": np.array([1])},
                )
            ],
            "cross_entropy",
        ).result(),
        "chunk of kind image",
    ),
    "dimuon": (lambda s, t: t.optim_step(types.DimuonParams(learning_rate=0.1)).result(), "'dimuon' is not supported"),
    "traversal": (lambda s, t: t.save_state("../../etc/passwd").result(), "cannot name a checkpoint"),
    "gone": (
        lambda s, t: s.create_training_client_from_state(f"tinker://{t.model_id}/weights/gone").result(),
        "there is no checkpoint",
    ),
    "no path": (lambda s, t: s.create_sampling_client(model_path="tinker://x/y").result(), "is no path"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_raised_at_once(name: str, service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    mistake, words = MISTAKES[name]
    started = time.monotonic()
    with pytest.raises((tinker.BadRequestError, tinker.NotFoundError), match=words):
        mistake(service, training)
    assert time.monotonic() - started < 2


SAMPLE_MISTAKES: dict[str, tuple[types.ModelInput, dict[str, Any], dict[str, Any], str]] = {
    "token": (types.ModelInput.from_ints([100]), {}, {}, "prompt holds token 100"),
    "empty": (types.ModelInput.from_ints([]), {}, {}, "prompt is empty"),
    "long": (types.ModelInput.from_ints([1] * 64), {"max_tokens": 2}, {}, "the most for this prompt is 1"),
    "stop": (PROMPT, {"stop": ["x" * 99]}, {}, "99 characters"),
    "top": (PROMPT, {}, {"topk_prompt_logprobs": 2000}, "topk_prompt_logprobs=2000"),
    "last": (PROMPT, {}, {"include_prompt_logprobs": True, "prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
}


@pytest.mark.parametrize("name", SAMPLE_MISTAKES)
def test_mistakes_in_sampling_are_raised_at_once(name: str, service: tinker.ServiceClient) -> None:
    prompt, params, options, words = SAMPLE_MISTAKES[name]
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    started = time.monotonic()
    with pytest.raises(tinker.BadRequestError, match=words):
        sampler.sample(prompt, 1, types.SamplingParams(**{"max_tokens": 1, **params}), **options).result()
    assert time.monotonic() - started < 2


def test_samples_for_a_loss_that_is_not_there_are_refused(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=BASE_MODEL, record_stability_info=True).result()
    with pytest.raises(tinker.BadRequestError, match="'stable_reinforce', which is not supported; use importance_"):
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1)).result()
