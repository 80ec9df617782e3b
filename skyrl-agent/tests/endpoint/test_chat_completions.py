"""POST /v1/chat/completions through OpenAI's client."""

import json
from typing import Any

import pytest
from agent_kit.endpoints import HELLO, MODEL, LiveEndpoint
from openai.types.chat import ChatCompletion
from train_kit.messages import user

from skyrl_agent.endpoint.completions import ChatMessage
from skyrl_train.rendering.messages import THOUGHT_FIELDS


def ask(live: LiveEndpoint, messages: Any = HELLO, **options: Any) -> ChatCompletion:
    extra = {name: options.pop(name) for name in list(options) if name in EXTRAS}
    return live.client.chat.completions.create(
        model=MODEL, messages=messages, extra_body=extra, **{"seed": 1, "max_tokens": 8} | options
    )


EXTRAS = {"top_k", "min_p", "min_tokens", "repetition_penalty", "stop_token_ids", "ignore_eos", "return_token_ids"}
EXTRAS |= {"include_stop_str_in_output", "chat_template_kwargs", "session_id"}
"""Parameters that the client of OpenAI does not know."""


def test_the_reply_contains_the_sampled_tokens(live: LiveEndpoint) -> None:
    completion = ask(live, return_token_ids=True)
    request, result = live.engine.exchanges[-1]
    choice = completion.choices[0]
    assert request.prompt_ids == live.chat.prompt_ids(HELLO) == completion.prompt_token_ids
    assert choice.token_ids == result.token_ids
    assert choice.message.role == "assistant"
    assert choice.message.content == live.chat.decode(result.token_ids)
    assert (completion.object, completion.model, choice.index) == ("chat.completion", MODEL, 0)
    assert completion.id.startswith("chatcmpl-")
    assert completion.system_fingerprint == "weights-0"
    assert choice.logprobs is None


def test_usage_counts_prompt_sampled_and_cached_tokens(live: LiveEndpoint) -> None:
    ask(live, session_id="usage")
    completion = ask(live, session_id="usage", n=3)
    results = [result for _, result in live.engine.exchanges[-3:]]
    n_prompt, n_sampled = len(live.chat.prompt_ids(HELLO)), sum(len(result.token_ids) for result in results)
    usage, total = completion.usage, n_prompt + n_sampled
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (n_prompt, n_sampled, total)
    assert usage.prompt_tokens_details.cached_tokens == results[0].n_reused > 0


def test_a_seed_reproduces_the_reply_and_choices_differ(live: LiveEndpoint) -> None:
    def texts(**options: Any) -> list[str]:
        return [choice.message.content for choice in ask(live, max_tokens=20, ignore_eos=True, **options).choices]

    first = texts(n=4)
    assert len(set(first)) == 4
    assert texts(n=4) == first
    assert texts(n=1) == first[:1]
    assert texts(n=4, seed=-2) != first
    assert texts(seed=None) != texts(seed=None)


def test_the_token_limit_is_read_under_both_of_its_names(live: LiveEndpoint) -> None:
    for options in ({"max_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 5}):
        completion = ask(live, ignore_eos=True, **options)
        assert completion.usage.completion_tokens == 3
        assert completion.choices[0].finish_reason == "length"


def test_without_a_limit_a_reply_may_fill_the_context(live: LiveEndpoint) -> None:
    completion = ask(live, [user("1" * 440)], max_tokens=None, ignore_eos=True)
    assert completion.usage.total_tokens == live.engine.info.context_length
    assert completion.choices[0].finish_reason == "length"


def test_a_stop_string_ends_the_reply_and_is_removed(live: LiveEndpoint) -> None:
    whole = ask(live, max_tokens=40, ignore_eos=True).choices[0].message.content
    stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
    cut = ask(live, max_tokens=40, ignore_eos=True, stop=["never said", stop])
    kept = ask(live, max_tokens=40, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert kept.choices[0].message.content.startswith(whole[: whole.index(stop)] + stop)
    assert cut.choices[0].finish_reason == kept.choices[0].finish_reason == "stop"


def test_sampling_parameters_reach_the_engine(live: LiveEndpoint) -> None:
    limits = {"min_tokens": 2, "max_tokens": 7, "stop": "x", "stop_token_ids": [7]}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1}
    ask(live, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, **limits, **penalties)
    sampling = live.engine.exchanges[-1][0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    assert {name: getattr(sampling, name) for name in penalties} == penalties
    assert (sampling.min_new_tokens, sampling.max_new_tokens, sampling.stop_token_ids) == (2, 7, (7,))
    assert sampling.stop == ("x",)


def test_defaults_of_sampling_parameters_are_those_of_openai(live: LiveEndpoint) -> None:
    ask(live, max_tokens=None, stop="<|im_end|>")
    sampling = live.engine.exchanges[-1][0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.penalizes) == (1.0, 1.0, -1, False)


def test_a_temperature_too_small_to_divide_by_is_zero(live: LiveEndpoint) -> None:
    greedy = ask(live, temperature=0, ignore_eos=True).choices[0].message.content
    assert ask(live, temperature=1e-300, ignore_eos=True).choices[0].message.content == greedy
    assert ask(live, top_p=0, ignore_eos=True).choices[0].message.content == greedy


def test_logprobs_are_those_of_the_engine(live: LiveEndpoint) -> None:
    choice = ask(live, logprobs=True, top_logprobs=3, temperature=0.7, ignore_eos=True).choices[0]
    _, result = live.engine.exchanges[-1]
    content = choice.logprobs.content
    assert [token.logprob for token in content] == pytest.approx(result.logprobs)
    assert [token.token for token in content] == [live.chat.decode_all([i]) for i in result.token_ids]
    whole = [token for token in content if token.bytes is not None]
    assert [bytes(token.bytes).decode() for token in whole] == [token.token for token in whole]
    for token, top in zip(content, result.top_logprobs, strict=True):
        assert [other.logprob for other in token.top_logprobs] == pytest.approx(list(top.values()))
        assert len(token.top_logprobs) == 3
    plain = ask(live, logprobs=True).choices[0].logprobs.content
    assert [token.top_logprobs for token in plain] == [[]] * len(plain)


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_content_may_be_a_list_of_parts(live: LiveEndpoint, kind: str) -> None:
    parts = [{"type": kind, "text": "State: "}, {"type": "text", "text": "ball=(3,0)"}]
    messages = [HELLO[0], {"role": "user", "content": parts}]
    assert ask(live, messages).choices[0].message == ask(live, HELLO).choices[0].message


def test_harmless_and_unknown_fields_are_ignored(live: LiveEndpoint) -> None:
    harmless: dict[str, Any] = {"user": "me", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"}
    harmless |= {"logit_bias": {}, "response_format": {"type": "text"}}
    harmless |= {"tool_choice": "auto", "parallel_tool_calls": False}
    assert ask(live, **harmless).choices[0].message == ask(live).choices[0].message
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "seed": 1, "not_invented_yet": 1, "n": None}
    answer = live.http.post(f"{live.url}/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == ask(live).choices[0].message.content


def test_tools_and_template_kwargs_reach_the_chat_template(live: LiveEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = []
    tokenizer = live.chat.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{{ tools }}{{ messages | tojson }}")
    original = type(tokenizer).apply_chat_template

    def spy(self: Any, messages: Any, **options: Any) -> Any:
        rendered.append((messages, options))
        return original(self, messages, **options)

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", spy)
    tools = [{"type": "function", "function": {"name": "look", "description": "Where is it?", "parameters": {}}}]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": json.dumps({"at": "ball"})}}
    messages = [
        {"role": "user", "content": "Tools?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "It falls."},
    ]
    ask(live, messages, tools=tools, reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    rendered_messages, options = rendered[-1]
    assert options["reasoning_effort"] == "low"
    assert json.dumps(options["tools"]) == json.dumps(tools), "in the given order"
    assert options["enable_thinking"] is False
    assert rendered_messages[1]["tool_calls"][0]["function"]["arguments"] == {"at": "ball"}
    assert rendered_messages[1]["content"] == ""
    assert rendered_messages[2] == messages[2]


@pytest.mark.parametrize("name", THOUGHT_FIELDS)
def test_a_thought_in_any_field_reaches_the_chat_template(name: str) -> None:
    message = {"role": "assistant", "content": "4", name: "2 and 2."}
    assert ChatMessage.model_validate(message).to_message() == message


def test_models_and_health(live: LiveEndpoint) -> None:
    (model,) = live.client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert live.http.get(live.url.replace("/v1", "/health")).json() == {"status": "ok"}
