"""Agents with tools, whose requests without tools are not trained on by default."""

from typing import Any

import pytest
from agent_kit.agents import TRAIN, AgentStage, catch_requests
from agent_kit.endpoints import new_client
from agent_kit.scripted import CharacterEngine, hermes_tokenizer, take_turns, trained_texts, write_call
from train_kit.messages import user

from skyrl_agent.agent_generator import AgentResult
from skyrl_report.diagnosis import diagnose
from skyrl_train.inference_engines.base import SamplingParams

TOOL = {"type": "function", "function": {"name": "read", "parameters": {}}}
REPLIES = [write_call("read", path="a.py"), "Again.\n" + write_call("read", path="b.py"), "It is right."]


async def coding_agent(*, base_url: str, model: str, **_: Any) -> float:
    """Read a file, ask for an answer without tools at the end, and for a title and a summary beside the task."""
    async with new_client(base_url) as client:
        messages: list[Any] = [user("Check.")]
        await client.chat.completions.create(model=model, messages=[user("Title?")])
        for _ in REPLIES:
            answer = await client.chat.completions.create(model=model, messages=messages, tools=[TOOL])
            reply = answer.choices[0].message
            results = [{"role": "tool", "content": "1", "tool_call_id": call.id} for call in reply.tool_calls or ()]
            messages += [reply, *results]
        await client.chat.completions.create(model=model, messages=[*messages, user("Answer.")])
        await client.chat.completions.create(model=model, messages=[user("A summary?")])
    return 1.0


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize("in_own_process", [False, True])
@pytest.mark.parametrize("trains_side_requests", [False, True])
async def test_side_requests_are_not_trained_on_by_default(in_own_process: bool, trains_side_requests: bool) -> None:
    tokenizer = hermes_tokenizer()
    stage = AgentStage(CharacterEngine(tokenizer, take_turns(REPLIES)), tokenizer)

    async def rewards_each_reply(**options: Any) -> AgentResult:
        reward = await coding_agent(**options)
        return AgentResult([0.0] * (5 if trains_side_requests else 3) + [reward])

    options = {"in_own_process": in_own_process, "trains_side_requests": trains_side_requests}
    generator = stage.generator(rewards_each_reply, **options)
    (t,) = await generator.rollout(catch_requests(1), SamplingParams(max_new_tokens=1000), TRAIN)
    metrics = generator.take_metrics()
    await stage.close()
    assert (t.is_valid, t.total_reward) == (True, 1.0)
    texts = [trained_texts(tokenizer, segment) for segment in t.segments]
    conversation, other = [f"{reply}<|im_end|>" for reply in REPLIES], ["A title<|im_end|>"]
    assert texts == ([other, conversation, other, other] if trains_side_requests else [[], conversation, [], other])
    assert [sum(segment.rewards) for segment in t.segments] == [0.0, 0.0, 0.0, 1.0]
    assert metrics == {
        "agent/no_tool_calls": 0.0,
        "agent/malformed_tool_calls": 0.0,
        "agent/side_requests": 0.0 if trains_side_requests else 2.0,
        "agent/repeated_replies": 0.0,
    }


async def test_rollouts_without_tool_calls_are_diagnosed() -> None:
    tokenizer = hermes_tokenizer()
    stage = AgentStage(CharacterEngine(tokenizer, take_turns(["<tool_call>{", "Nothing.", "Nothing."])), tokenizer)
    generator = stage.generator(coding_agent)
    for _ in range(2):
        await generator.rollout(catch_requests(1), SamplingParams(max_new_tokens=1000), TRAIN)
        metrics = generator.take_metrics()
        assert (metrics["agent/no_tool_calls"], metrics["agent/malformed_tool_calls"]) == (1.0, pytest.approx(1 / 3))
        assert generator.take_metrics() == {}
        (finding,) = diagnose([{"step": 1, **metrics}], {})
        assert (finding.rule, "no reply called one" in finding.text) == ("unused_tools", True)
    await stage.close()
