import pytest

from skyrl_agent.integrations.tinker.engine import TinkerEngine
from skyrl_gym.images import EncodedImage
from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.media.spans import ImageSpan


async def test_settings_that_tinker_lacks_are_refused() -> None:
    engine = TinkerEngine(16)
    assert engine.info.context_length == 16
    for settings in ({"repetition_penalty": 1.1}, {"min_p": 0.1}, {"stop_token_ids": (1,)}, {"min_new_tokens": 1}):
        with pytest.raises(EngineError, match="Tinker samples without"):
            await engine.generate([EngineRequest([1], SamplingParams(4, **settings), seed=0)])
    images = (ImageSpan(0, 1, EncodedImage(b"", "", 1, 1)),)
    with pytest.raises(EngineError, match="a request has images, but the model reads only text"):
        await engine.generate([EngineRequest([1], SamplingParams(4), seed=0, images=images)])
