"""The engine contract of backends that report only log-probs of the distribution that they sample from."""

from typing import ClassVar

import pytest

from skyrl_train.errors import EngineError, SamplingError
from train_kit.engine_contract import ENDINGS, EngineContract
from train_kit.engines import EngineKit, assert_agrees


class OwnLogprobsContract(EngineContract):
    """The engine contract, without sampling from another distribution than the policy's, which is rejected."""

    backend: ClassVar[str] = "SGLang"
    """Name of the backend in error messages."""

    endings = [ending for ending in ENDINGS if "min_new_tokens" not in ending[0]]  # noqa: RUF012
    samplings_of_nan = ({}, {"temperature": 0.0})

    async def test_penalties_and_truncation_change_sampling_and_not_the_log_probs(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new()
        shapes = {"top_p": 0.6, "top_k": 5, "min_p": 0.4, "min_new_tokens": 12, "repetition_penalty": 1.5}
        for name, value in (shapes | {"presence_penalty": 1.5, "frequency_penalty": 1.5}).items():
            with pytest.raises(SamplingError, match=f"{name}={value}: {self.backend} does not report"):
                await engine.generate([engine_kit.request(20, 16, **{name: value})])

    async def test_top_log_probs_on_request(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new()
        request = engine_kit.request(20, 6, temperature=1.0, n_top_logprobs=3)
        (result,) = await engine.generate([request])
        assert_agrees(engine_kit, request, result)
        logits = engine_kit.logits(request, result).log_softmax(-1)
        assert result.top_logprobs is not None
        for row, top in zip(logits, result.top_logprobs, strict=True):
            values, token_ids = row.topk(3)
            assert top == pytest.approx(
                dict(zip(token_ids.tolist(), values.tolist(), strict=True)), abs=engine_kit.tolerance
            )

    async def test_no_response_ends_before_min_new_tokens(self, engine_kit: EngineKit) -> None:
        with pytest.raises(EngineError, match=f"min_new_tokens=60: {self.backend} does not report"):
            await engine_kit.new().generate([engine_kit.request(9, 60, min_new_tokens=60)])
