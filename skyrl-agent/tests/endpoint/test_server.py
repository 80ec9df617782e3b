"""Sessions over HTTP: recording, cancellation, shutdown, and no leaks."""

import asyncio
from typing import Any

import httpx
import openai
import psutil
import pytest
from agent_kit.endpoints import HELLO, LONG, MODEL, EndpointStage, chat
from train_kit.messages import assistant, user
from train_kit.processes import no_leaks
from train_kit.weight_sync import sync_weights
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_agent.endpoint import AgentSession, Endpoint
from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.inference_engines.scheduled import SamplingLimits
from skyrl_train.models.memory import cache_bytes_per_token


async def test_requests_of_a_session_are_recorded(stage: EndpointStage) -> None:
    session = await stage.session()
    client = stage.client(session)
    history: list[Any] = list(HELLO)
    for k in range(3):
        message = (await chat(client, history)).choices[0].message
        history += [message.model_dump() | {"reasoning_content": ""}, user(f"And then? {k}")]
    session.recording.finish()
    (row,) = session.recording.rows
    request, result = stage.engine.exchanges[-1]
    assert row.token_ids == request.prompt_ids + result.token_ids
    assert sum(row.loss_mask) == sum(len(result.token_ids) for _, result in stage.engine.exchanges)
    assert result.n_reused > 0


async def test_a_session_is_named_by_url_header_or_body(stage: EndpointStage) -> None:
    session, client = await stage.session(), stage.client()
    await chat(stage.client(session))
    await chat(client, extra_headers={"X-Session-Id": session.id})
    await chat(client, extra_body={"session_id": session.id})
    assert len(session.recording.turns) == 3
    await chat(client)
    await chat(client, extra_body={"session_id": "not opened here"})
    await chat(client, extra_body={"session_id": 7})
    assert len(session.recording.turns) == 3
    assert [r.session_id for r, _ in stage.engine.exchanges[-3:]] == [None, "client/not opened here", "client/7"]


async def test_prompts_of_one_request_can_belong_to_different_sessions(stage: EndpointStage) -> None:
    first, second = await stage.session(max_new_tokens=2), await stage.session(max_new_tokens=3)
    sessions = [first.id, second.id]
    prompts = ["State", "Action"]
    answer = await stage.client().completions.create(
        model=MODEL, prompt=prompts, extra_body={"session_id": sessions, "return_token_ids": True}
    )
    for session, choice in zip((first, second), answer.choices, strict=True):
        (row,) = session.recording.rows
        assert row.token_ids == choice.prompt_token_ids + choice.token_ids
        assert len(choice.token_ids) <= session.sampling.max_new_tokens


async def test_a_refused_request_does_not_change_later_seeds(stage: EndpointStage) -> None:
    refused_client, other_client = [stage.client(await stage.session(seed=1)) for _ in range(2)]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await refused_client.completions.create(model=MODEL, prompt=["State", "1" * 600])
    for client in (refused_client, other_client):
        await client.completions.create(model=MODEL, prompt="State")
    (first, _), (second, _) = stage.engine.exchanges
    assert first.seed == second.seed


async def test_parallel_requests_have_separate_rows(stage: EndpointStage) -> None:
    session = await stage.session(max_new_tokens=8)
    client = stage.client(session)
    answers = [*await asyncio.gather(*(chat(client) for _ in range(3))), await chat(client, n=2)]
    texts = [choice.message.content for answer in answers for choice in answer.choices]
    assert len(set(texts)) > 1
    session.recording.finish()
    assert len(session.recording.rows) == 5
    assert {row.n_prompt for row in session.recording.rows} == {len(stage.chat.prompt_ids(HELLO))}
    assert len({request.seed for request, _ in stage.engine.exchanges}) == 5


async def test_a_stream_is_recorded_when_it_is_complete(stage: EndpointStage) -> None:
    session = await stage.session(max_new_tokens=8)
    client = stage.client(session)
    text = ""
    async for chunk in await chat(client, stream=True):
        text += chunk.choices[0].delta.content or ""
    await chat(client, [*HELLO, assistant(text), user("And then?")])
    assert len(session.recording.rows) == 1
    assert len(session.recording.turns) == 2


async def test_a_disconnected_client_cancels_the_generation(stage: EndpointStage) -> None:
    session = await stage.session(max_new_tokens=400)
    await stage.engine.pause()
    request_task = asyncio.create_task(chat(stage.client(session), **LONG))
    await stage.until_n_requests(1)
    request_task.cancel()
    await stage.until_n_requests(0)
    await stage.engine.resume()
    assert (await chat(stage.client(session))).choices
    assert len(session.recording.turns) == len(stage.engine.exchanges) == 1


async def test_closing_a_stream_cancels_the_generation(stage: EndpointStage) -> None:
    session = await stage.session(max_new_tokens=400, ignore_eos=True)
    stream = await chat(stage.client(session), stream=True)
    for _ in range(5):
        await anext(stream.__aiter__())
    await stream.close()
    await stage.until_n_requests(0)
    assert (stage.engine.exchanges, session.recording.turns) == ([], [])


async def test_ending_a_session_cancels_its_requests(stage: EndpointStage) -> None:
    session, other = await stage.session(max_new_tokens=400), await stage.session()
    client = stage.client(session)
    await chat(client, max_tokens=1)
    await stage.engine.pause()
    request_task = asyncio.create_task(chat(client, [HELLO[1]]))
    other_task = asyncio.create_task(chat(stage.client(other)))
    await stage.until_n_requests(2)
    await stage.endpoint.end_session(session)
    with pytest.raises(openai.NotFoundError, match=f"there is no open session '{session.id}'"):
        await request_task
    with pytest.raises(openai.NotFoundError):
        await chat(client)
    await stage.engine.resume()
    assert (await other_task).choices
    assert set(stage.engine.ended) == session.caches
    assert len(session.recording.turns) == 1


async def test_requests_without_a_session_wait_during_training(stage: EndpointStage, talker: PreTrainedModel) -> None:
    session = await stage.session()
    await stage.engine.pause()
    request_task = asyncio.create_task(chat(stage.client(), **LONG))
    streaming = await chat(stage.client(), stream=True, **LONG)
    await stage.until_n_requests(2)
    await stage.endpoint.hold_others()
    await stage.engine.resume()
    with pytest.raises(openai.InternalServerError, match="the model is being trained; retry") as refused:
        await request_task
    assert refused.value.status_code == 503
    with pytest.raises(openai.APIError, match="the model is being trained; retry"):
        async for _ in streaming:
            pass
    await sync_weights(stage.engine, talker.named_parameters, 1)
    waiting_task = asyncio.create_task(chat(stage.client()))
    assert (await chat(stage.client(session))).choices, "requests of a session belong to a rollout and do not wait"
    await asyncio.sleep(0.1)
    assert (waiting_task.done(), stage.engine._unfinished()) == (False, [])
    await stage.endpoint.serve_others()
    assert (await waiting_task).system_fingerprint == "weights-1"


async def test_close_fails_waiting_requests_and_releases_everything(
    talker: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    async with no_leaks(), EndpointStage(talker, tiny_tokenizer) as stage:
        client, other = stage.client(await stage.session()), stage.client()
        await chat(client)
        await stage.engine.pause()
        answers = [asyncio.create_task(chat(c, **LONG)) for c in (client, other)]
        await stage.until_n_requests(2)
        await stage.endpoint.close()
        for answer in answers:
            with pytest.raises(openai.InternalServerError, match="the endpoint is shutting down") as refused:
                await answer
            assert refused.value.status_code == 503
        with pytest.raises(openai.APIConnectionError):
            await chat(other)
        assert not [c for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
        await stage.engine.resume()


async def test_an_occupied_port_is_reported(stage: EndpointStage) -> None:
    port = int(stage.endpoint.url().split(":")[2].split("/")[0])
    with pytest.raises(ConfigError, match=f"the endpoint cannot listen on 127.0.0.1:{port}"):
        await Endpoint(stage.endpoint._service).start(port=port)


async def test_sessions_use_the_public_url_if_set(stage: EndpointStage) -> None:
    endpoint = Endpoint(stage.endpoint._service)
    await endpoint.start(public_url="http://trainer.example:8000/")
    session = await endpoint.open_session(SamplingParams(max_new_tokens=4), 0, "17/3 é")
    assert endpoint.url(session) == f"http://trainer.example:8000/session/{session.id}/v1"
    assert session.id.startswith("17-3-")
    await endpoint.close()


async def test_a_reply_ends_with_the_memory_of_the_engine(
    talker: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    max_cache_bytes = 192 * cache_bytes_per_token(talker)
    async with EndpointStage(talker, tiny_tokenizer, max_cache_bytes=max_cache_bytes) as stage:
        for options in ({}, {"max_tokens": 10_000}):
            answer = await chat(stage.client(), **options, extra_body={"ignore_eos": True})
            assert (answer.usage.total_tokens, answer.choices[0].finish_reason) == (192, "length")
        with pytest.raises(openai.BadRequestError, match="maximum context length is 191 tokens"):
            await chat(stage.client(), [user("State: ball=(3,0)" * 40)])


async def test_a_failing_engine_is_a_server_error(stage: EndpointStage, monkeypatch: pytest.MonkeyPatch) -> None:
    session: AgentSession = await stage.session()

    def broken(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(stage.engine, "_forward", broken)
    with pytest.raises(openai.InternalServerError, match=r"the engine failed: .*out of luck"):
        await chat(stage.client(session))
    assert session.engine_failure is not None
    stream = await chat(stage.client(session), stream=True)
    with pytest.raises(openai.APIError, match="the engine failed"):
        async for _ in stream:
            pass
    assert session.recording.turns == []


async def test_sampling_without_log_probs_is_the_clients_mistake(
    stage: EndpointStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, limits = stage.engine._new_sequence, SamplingLimits("this backend", "use another")

    def create_checked(request: Any, max_tokens: int) -> Any:
        limits.check(request.sampling)
        return create(request, max_tokens)

    monkeypatch.setattr(stage.engine, "_new_sequence", create_checked)
    with pytest.raises(openai.BadRequestError, match=r"top_p=0\.5: this backend does not report"):
        await chat(stage.client(), top_p=0.5)
    assert (await chat(stage.client())).choices


async def test_many_simultaneous_connections(stage: EndpointStage) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 2}
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None)) as client:
        url = f"{stage.endpoint.url()}/chat/completions"
        answers = await asyncio.gather(*(client.post(url, json=body) for _ in range(100)))
    assert {answer.status_code for answer in answers} == {200}
