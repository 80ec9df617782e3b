"""Images in requests: the engine reads them, and rows for training have them."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_kit.endpoints import MODEL, new_client
from train_kit.engines import LIMITS
from train_kit.messages import assistant, user
from train_kit.models import load_on_cpu
from train_kit.vision_models import draw
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_agent.endpoint import Endpoint, ModelService
from skyrl_agent.endpoint.recorder import Prompt, Recording
from skyrl_agent.endpoint.replies import Reply
from skyrl_agent.endpoint.session import AgentSession
from skyrl_gym.images import read_image
from skyrl_train.dataset.batch import pad_right, pad_tokens
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.inference_engines.base import EngineResult, SamplingParams
from skyrl_train.inference_engines.hf.general import GeneralEngine
from skyrl_train.models.logprobs import response_logprobs
from skyrl_train.types import Segment, StopReason

RED, GREEN, BLUE = (read_image(draw(color)) for color in ("red", "green", "blue"))
WHERE = {"type": "text", "text": "Where?"}
SAMPLING = SamplingParams(max_new_tokens=5)


def image(source: Any) -> dict[str, Any]:
    return {"type": "image", "image": source}


OPENAI_CHAT = {"type": "image_url", "image_url": {"url": RED.data_url, "detail": "low"}}
OPENAI_RESPONSES = {"type": "input_image", "image_url": GREEN.data_url}
ANTHROPIC = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(BLUE.content).decode()},
}


@pytest.fixture(scope="module")
def model(vision_model_path: Path) -> PreTrainedModel:
    return load_on_cpu(vision_model_path)


@pytest.fixture
def chat(vision_tokenizer: PreTrainedTokenizerBase) -> ChatEncoder:
    return ChatEncoder(vision_tokenizer)


@pytest.fixture
async def engine(model: PreTrainedModel, vision_tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[GeneralEngine]:
    engine = GeneralEngine(model, vision_tokenizer, **LIMITS)
    yield engine
    await engine.close()


@pytest.fixture
async def endpoint(engine: GeneralEngine, vision_tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[Endpoint]:
    endpoint = Endpoint(ModelService(engine, vision_tokenizer, model_name=MODEL))
    await endpoint.start()
    yield endpoint
    await endpoint.close()


def trainer_logprobs(model: PreTrainedModel, row: Segment) -> list[float]:
    """Return the trainer's log-probs of the sampled tokens of a row, 0 elsewhere."""
    sequences, mask = pad_tokens([(row.token_ids, row.n_prompt)], 0)
    with torch.no_grad():
        scores = response_logprobs(model, sequences, mask, pad_right([row.loss_mask]), 1.0, images=[row.images])
    return scores.logprobs[0].tolist()


async def test_images_of_all_forms_are_read_by_the_engine_and_recorded(
    endpoint: Endpoint, model: PreTrainedModel
) -> None:
    session = await endpoint.open_session(SAMPLING, seed=0)
    messages: list[Any] = [user([OPENAI_CHAT, WHERE])]
    async with new_client(endpoint.url(session)) as client:
        for parts in ([OPENAI_RESPONSES, ANTHROPIC, WHERE], [WHERE]):
            reply = await client.chat.completions.create(model=MODEL, messages=messages)
            messages += [assistant(reply.choices[0].message.content), user(parts)]
    await endpoint.end_session(session)
    session.recording.finish()
    (row,) = session.recording.rows
    assert [span.image for span in row.images] == [RED, GREEN, BLUE]
    placeholders = {row.token_ids[i] for span in row.images for i in range(span.start, span.end)}
    assert len(placeholders) == 1
    assert placeholders.isdisjoint(set(row.token_ids[: row.images[0].start]))
    assert row.logprobs == pytest.approx(trainer_logprobs(model, row), abs=1e-4)
    row.images = []
    assert row.logprobs != pytest.approx(trainer_logprobs(model, row), abs=1e-2), "the test is void"


async def test_images_of_requests_without_a_session_are_read(
    endpoint: Endpoint, model: PreTrainedModel, chat: ChatEncoder
) -> None:
    options: Any = {"extra_body": {"return_token_ids": True, "ignore_eos": True}, "logprobs": True, "max_tokens": 4}
    messages: Any = [user([OPENAI_CHAT, WHERE])]
    async with new_client(endpoint.url()) as client:
        reply = await client.chat.completions.create(model=MODEL, messages=messages, seed=1, n=2, **options)
    prompt = [user([image(RED), WHERE])]
    for choice in reply.choices:
        token_ids = chat.prompt_ids(prompt)
        assert reply.prompt_token_ids == token_ids
        row = Segment.start(token_ids, chat.find_spans(token_ids, prompt))
        row.append_sampled(choice.token_ids, [entry.logprob for entry in choice.logprobs.content], None)
        assert row.logprobs == pytest.approx(trainer_logprobs(model, row), abs=1e-4)


def answer(recording: Recording, prompt: Prompt, text: str) -> None:
    token_ids = recording._chat.encode(f"{text}<|im_end|>")
    recording.record(prompt, EngineResult(token_ids, [-0.5] * len(token_ids), StopReason.STOP, ()), Reply(text))


def test_a_history_with_another_image_starts_a_new_row(chat: ChatEncoder) -> None:
    recording = Recording(chat)
    answer(recording, recording.chat_prompt([user([image(RED), WHERE])], chat), "Here")
    rest = [assistant("Here"), user([image(GREEN)])]
    same = recording.chat_prompt([user([image(RED), WHERE]), *rest], chat)
    other = recording.chat_prompt([user([image(BLUE), WHERE]), *rest], chat)
    assert (same.origin is None, other.origin is None) == (False, True)
    assert same.token_ids == other.token_ids
    assert [span.image for span in same.images] == [RED, GREEN]
    assert [span.image for span in other.images] == [BLUE, GREEN]
    assert [(span.start, span.end) for span in same.images] == [(span.start, span.end) for span in other.images]
    for prompt in (same, other):
        answer(recording, prompt, "There")
    assert [[span.image for span in row.images] for row in recording.rows] == [[RED, GREEN], [BLUE, GREEN]]


def test_a_branch_and_token_prompts_keep_the_images_up_to_their_reply(chat: ChatEncoder) -> None:
    recording = Recording(chat)
    history: list[Any] = [user([image(RED)])]
    for source in (GREEN, BLUE):
        answer(recording, recording.chat_prompt(history, chat), "Here")
        history += [assistant("Here"), user([image(source)])]
    row = recording.rows[0]
    branch = recording.chat_prompt([*history[:2], user("Who?")], chat)
    assert branch.images == tuple(row.images[:1])
    continued = recording.token_prompt([*row.token_ids, 5])
    assert continued.images == tuple(row.images)
    assert recording.token_prompt([5, *row.token_ids]).images == ()


def test_seeds_depend_on_the_images(chat: ChatEncoder) -> None:
    prompts = [Recording(chat).chat_prompt([user([image(source)])], chat) for source in (RED, GREEN)]
    sessions = [AgentSession(name, SAMPLING, 5, Recording(chat)) for name in "ab"]
    first, second = [sessions[0].engine_request(prompt, SAMPLING) for prompt in prompts]
    assert prompts[0].token_ids == prompts[1].token_ids
    assert [sessions[1].engine_request(prompt, SAMPLING).seed for prompt in prompts[::-1]] == [second.seed, first.seed]
    assert first.seed != second.seed
    assert first.images == prompts[0].images
