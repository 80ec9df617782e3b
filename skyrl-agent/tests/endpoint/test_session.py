"""Sessions: the trainer determines sampling parameters and seeds."""

import logging
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from skyrl_agent.endpoint.completions import ChatRequest
from skyrl_agent.endpoint.recorder import Prompt, Recording
from skyrl_agent.endpoint.replies import Reply
from skyrl_agent.endpoint.session import AgentSession, Sampled
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.inference_engines.base import EngineResult, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=10, temperature=0.7, top_p=0.9, stop=("x",), stop_token_ids=(3,))


@pytest.fixture
def session(tiny_tokenizer: PreTrainedTokenizerBase) -> AgentSession:
    return AgentSession("a", SAMPLING, 5, Recording(ChatEncoder(tiny_tokenizer)))


def chat_request(**fields: object) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "?"}], **fields})


def test_a_request_cannot_change_the_sampled_distribution(
    session: AgentSession, caplog: pytest.LogCaptureFixture
) -> None:
    others = {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.5, "min_tokens": 3, "ignore_eos": True}
    others |= {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0, "seed": 1}
    warned: set[str] = set()
    for _ in range(2):
        assert session.sampling_for(chat_request(**others), warned) == SAMPLING
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(messages) == len(others), "one warning per field, however often it is sent"
    assert (
        "Requests set temperature=0.0, which is ignored while they are recorded for training: temperature is 0.7"
        in messages[0]
    )


def test_values_equal_to_the_session_cause_no_warning(session: AgentSession, caplog: pytest.LogCaptureFixture) -> None:
    same = chat_request(temperature=0.7, top_p=0.9, top_k=0, presence_penalty=0, min_tokens=0, ignore_eos=False)
    assert session.sampling_for(same, set()) == SAMPLING
    assert caplog.records == []


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ({}, {}),
        ({"max_tokens": 4}, {"max_new_tokens": 4}),
        ({"max_tokens": 40}, {"max_new_tokens": 10}),
        ({"stop": ["y", "x"], "stop_token_ids": [4, 3]}, {"stop": ("x", "y"), "stop_token_ids": (3, 4)}),
        ({"logprobs": True, "top_logprobs": 2}, {"n_top_logprobs": 2}),
    ],
)
def test_a_request_can_shorten_replies_and_ask_for_logprobs(
    session: AgentSession, requested: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert session.sampling_for(chat_request(**requested), set()) == replace(SAMPLING, **expected)


def test_seeds_depend_on_session_and_prompt(session: AgentSession) -> None:
    prompt, other = Prompt([1, 2]), Prompt([1, 3])
    seeds = [session.engine_request(p, SAMPLING).seed for p in (prompt, other, prompt)]
    assert len(set(seeds)) == 3
    again = AgentSession("b", SAMPLING, 5, session.recording)
    assert [again.engine_request(p, SAMPLING).seed for p in (prompt, prompt, other)] == [seeds[0], seeds[2], seeds[1]]
    assert AgentSession("c", SAMPLING, 6, session.recording).engine_request(prompt, SAMPLING).seed not in seeds


def test_the_seed_of_an_abandoned_request_is_reused(session: AgentSession) -> None:
    abandoned, waiting = (session.engine_request(Prompt([1, 2]), SAMPLING) for _ in range(2))
    session.give_up(abandoned)
    again, another = (session.engine_request(Prompt([1, 2]), SAMPLING) for _ in range(2))
    assert again.seed == abandoned.seed
    assert len({abandoned.seed, waiting.seed, another.seed}) == 3


def test_each_row_has_its_own_cache(session: AgentSession) -> None:
    def ask(token_ids: list[int]) -> str | None:
        prompt = session.recording.token_prompt(token_ids)
        request = session.engine_request(prompt, SAMPLING)
        session.record(prompt, Sampled(request, EngineResult([9], [0.0], "length", ())), Reply(""))
        return request.session_id

    main, side = ask([1, 2]), ask([5])
    assert main != side
    assert [ask([1, 2, 9, 3]), ask([5, 9, 3]), ask([1, 2, 9, 3, 9, 3])] == [main, side, main]
    assert ask([1, 2, 9, 4]) not in (main, side)
    assert len(session.caches) == 3
