"""POST /v1/completions through OpenAI's client."""

from typing import Any

import pytest
from agent_kit.endpoints import MODEL, EndpointStage, LiveEndpoint
from openai.types import Completion
from train_kit.templates import FAMILIES
from transformers import PreTrainedModel

TEXTS = ["State: ball=(3,0)", "Action", "State: ball=(5,1), paddle"]


def complete(live: LiveEndpoint, prompt: Any, **options: Any) -> Completion:
    extra = {name: options.pop(name) for name in ("return_token_ids", "ignore_eos") if name in options}
    return live.client.completions.create(model=MODEL, prompt=prompt, extra_body=extra, **{"seed": 1} | options)


def test_a_text_prompt_and_its_tokens_are_equivalent(live: LiveEndpoint) -> None:
    text = complete(live, TEXTS[0], return_token_ids=True)
    tokens = complete(live, live.chat.encode(TEXTS[0]), return_token_ids=True)
    assert text.choices[0].prompt_token_ids == tokens.choices[0].prompt_token_ids == live.chat.encode(TEXTS[0])
    assert text.choices[0].token_ids == tokens.choices[0].token_ids
    assert text.choices[0].text == live.chat.decode(text.choices[0].token_ids)
    assert (text.object, text.choices[0].finish_reason in ("stop", "length")) == ("text_completion", True)


def test_the_default_limit_is_sixteen_tokens(live: LiveEndpoint) -> None:
    assert complete(live, TEXTS[0], ignore_eos=True).usage.completion_tokens == 16


@pytest.mark.parametrize("as_tokens", [False, True])
def test_prompts_are_answered_in_order(live: LiveEndpoint, as_tokens: bool) -> None:
    prompts = [live.chat.encode(text) for text in TEXTS] if as_tokens else TEXTS
    batched = complete(live, prompts, n=2, return_token_ids=True)
    assert [choice.index for choice in batched.choices] == list(range(6))
    for k, prompt in enumerate(prompts):
        single = complete(live, prompt, n=2, return_token_ids=True)
        assert [c.token_ids for c in batched.choices[2 * k : 2 * k + 2]] == [c.token_ids for c in single.choices]
    assert batched.usage.prompt_tokens == sum(len(live.chat.encode(text)) for text in TEXTS)


def test_logprobs_are_those_of_the_engine(live: LiveEndpoint) -> None:
    choice = complete(live, TEXTS[0], logprobs=2, ignore_eos=True).choices[0]
    _, result = live.engine.exchanges[-1]
    logprobs = choice.logprobs
    assert logprobs.token_logprobs == pytest.approx(result.logprobs)
    assert logprobs.tokens == [live.chat.decode_all([i]) for i in result.token_ids]
    assert [sorted(top.values()) for top in logprobs.top_logprobs] == [
        pytest.approx(sorted(top.values())) for top in result.top_logprobs
    ]
    assert logprobs.text_offset[:2] == [0, len(logprobs.tokens[0])]
    assert complete(live, TEXTS[0], logprobs=0).choices[0].logprobs.top_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_keeps_the_space_before_it(talker: PreTrainedModel, stream: bool) -> None:
    """SentencePiece's decoder drops the space of the first token of a text."""
    async with EndpointStage(talker, FAMILIES["zephyr"].tokenizer()) as stage:
        client, prompt_ids = stage.client(), stage.chat.encode("It")
        for seed in range(100):
            answer = await client.completions.create(
                model=MODEL, prompt="It", seed=seed, logprobs=0, max_tokens=1, stream=stream, stream_options={}
            )
            chunks = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
            ((_, result),) = stage.engine.exchanges[-1:]
            if (text := stage.chat.decode([*prompt_ids, *result.token_ids])[2:]).startswith(" "):
                assert "".join(chunk.text for chunk in chunks) == text
                assert [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.tokens] == [text]
                return
        pytest.fail("no seed samples a token with a space")
