"""Client errors are reported in OpenAI's format with status 4xx and never as server errors."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from agent_kit.endpoints import HELLO, MODEL, LiveEndpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from train_kit import golden

from skyrl_agent.endpoint.completions import ChatRequest
from skyrl_agent.endpoint.wire import RequestError

GOLDEN = Path(__file__).parents[1] / "golden"
CHAT = {"model": MODEL, "messages": HELLO, "max_tokens": 2}
TEXT = {"model": MODEL, "prompt": "State", "max_tokens": 2}


def post(live: LiveEndpoint, path: str, body: Any) -> httpx.Response:
    return live.http.post(f"{live.url}{path}", content=json.dumps(body), headers={"content-type": "application/json"})


@pytest.mark.catch_tokenizer
def test_a_wrong_request_is_refused(live: LiveEndpoint, pytestconfig: pytest.Config) -> None:
    """A case changes a valid request to the path before it."""
    printed = {}
    for case in golden.read("endpoint/refusals", GOLDEN):
        path, _, change = case.partition(" ")
        printed[case] = [refuse(live, path, json.loads(change))]
    golden.compare("endpoint/refusals", printed, pytestconfig, GOLDEN)


def refuse(live: LiveEndpoint, path: str, change: dict[str, Any]) -> str:
    """Return the field that the refusal of a request names, and the message."""
    answer = post(live, path, (CHAT if path == "/chat/completions" else TEXT) | change)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    return f"{error['param']}: {error['message']}"


def test_a_request_that_cannot_be_rendered_or_does_not_fit_is_refused(live: LiveEndpoint) -> None:
    change = {"chat_template_kwargs": {"tokenize": True}}
    assert refuse(live, "/chat/completions", change).startswith("messages: cannot encode messages")
    deep = [{"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "[" * 10_000}}]}]
    refusal = refuse(live, "/chat/completions", {"messages": deep})
    assert refusal.startswith("messages: the chat template does not write the tool calls of message 0")
    long = "prompt: .*maximum context length is 511 tokens before its reply, and your prompt resulted in 512"
    assert re.match(long, refuse(live, "/completions", {"prompt": [5] * 512}))


def test_the_openai_client_raises_its_specific_errors(live: LiveEndpoint) -> None:
    create = live.client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="there is no model 'other' here") as unknown:
        create(model="other", messages=HELLO)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match=r"511 tokens .* 6\d\d tokens") as too_long:
        create(model=MODEL, messages=[{"role": "user", "content": "1" * 600}])
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match=r"invalid URL \(POST /v1/embeddings\)"):
        live.client.embeddings.create(model=MODEL, input="a")
    elsewhere = live.client.with_options(base_url=live.url.replace("/v1", "/session/17_3/v1"))
    with pytest.raises(openai.NotFoundError, match="there is no open session '17_3'"):
        elsewhere.chat.completions.create(model=MODEL, messages=HELLO)
    with pytest.raises(openai.NotFoundError, match="there is no open session"):
        elsewhere.models.list()


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/", "/v1/chat", "/v2/chat/completions", "/docs", "/openapi.json"])
def test_other_paths_are_not_found(live: LiveEndpoint, path: str) -> None:
    answer = live.http.get(live.url.removesuffix("/v1") + path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"invalid URL (GET {path})"


def test_a_wrong_method_is_refused(live: LiveEndpoint) -> None:
    answer = live.http.get(f"{live.url}/completions")
    assert (answer.status_code, answer.json()["error"]["type"]) == (405, "invalid_request_error")


INVALID_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"model": "\\ud800"}',
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"NaN",
]


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "multipart/form-data", ""])
def test_invalid_bodies_are_refused(live: LiveEndpoint, path: str, content_type: str) -> None:
    for body in INVALID_BODIES:
        answer = live.http.post(f"{live.url}{path}", content=body, headers={"content-type": content_type})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] in (None, "model"), "only the body with a model has a field to name"


def test_a_deeply_nested_value_is_refused() -> None:
    deep: Any = 100
    for _ in range(5000):
        deep = {"5": deep}
    with pytest.raises(RequestError, match=r"logit_bias=.* is not supported"):
        ChatRequest.model_validate(CHAT | {"logit_bias": deep}).check_offered()


NUMBERS = st.one_of(
    st.integers(-3, 3), st.integers(), st.floats(), st.sampled_from([2**31, 2**63, 2**64, 1e-308, 1e308, -0.0])
)
TEXTS = st.one_of(st.text(max_size=8), st.sampled_from(["\ud800", "\x00", "<|im_end|>", "tiny", "user", "assistant"]))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": TEXTS, "content": st.one_of(TEXTS, JSON)}, optional={"tool_calls": JSON, "name": JSON}
    ),
    max_size=3,
)
LIMITS = {"max_tokens": 2, "n": 2}
FIELDS = [
    *("model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stop", "seed", "presence_penalty"),
    *("frequency_penalty", "logprobs", "top_logprobs", "stream", "stream_options", "user", "tools", "top_k", "min_p"),
    *("repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "return_token_ids", "session_id", "echo"),
    *("chat_template_kwargs", "tool_choice", "response_format", "logit_bias", "include_stop_str_in_output"),
]
CHANGES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4)


FUZZ = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])


@FUZZ
@given(messages=st.one_of(MESSAGES, JSON, st.just(HELLO)), change=CHANGES)
def test_no_chat_request_causes_a_server_error(live: LiveEndpoint, messages: Any, change: dict[str, Any]) -> None:
    assert_valid_response(post(live, "/chat/completions", CHAT | LIMITS | {"messages": messages} | change))


@FUZZ
@given(prompt=st.one_of(JSON, TEXTS, st.lists(st.integers(0, 600), max_size=3)), change=CHANGES)
def test_no_text_request_causes_a_server_error(live: LiveEndpoint, prompt: Any, change: dict[str, Any]) -> None:
    assert_valid_response(post(live, "/completions", TEXT | LIMITS | {"prompt": prompt} | change))


def assert_valid_response(answer: httpx.Response) -> None:
    """Assert that the response is a completion, whole or streamed, or a client error."""
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.text
    else:
        assert answer.json()["choices"]
