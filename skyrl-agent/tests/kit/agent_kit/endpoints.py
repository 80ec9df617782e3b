"""The HTTP endpoint under test, and its clients."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAI
from train_kit.engines import RecordedEngine
from train_kit.messages import system, user
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_kit.scripted import CharacterEngine
from skyrl_agent.endpoint import AgentSession, Endpoint, ModelService
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.inference_engines.base import SamplingParams

MODEL = "tiny"
HELLO = [system("Go on."), user("State: ball=(3,0)")]
LONG: dict[str, Any] = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
"""Options of a request that is still running during the test."""


def new_client(base_url: str) -> AsyncOpenAI:
    http = DefaultAsyncHttpxClient(verify=False)  # loading certificates takes 30 ms
    return AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0, http_client=http)


async def chat(client: AsyncOpenAI, messages: Any = HELLO, **options: Any) -> Any:
    return await client.chat.completions.create(model=MODEL, messages=messages, **options)


def new_engine(model: PreTrainedModel | CharacterEngine, tokenizer: PreTrainedTokenizerBase, **limits: Any) -> Any:
    """Return an engine of the model, or the engine itself."""
    return model if isinstance(model, CharacterEngine) else RecordedEngine(model, tokenizer, **limits)


class EndpointStage:
    """An endpoint in the event loop of the test, with its engine and clients."""

    def __init__(
        self, model: PreTrainedModel | CharacterEngine, tokenizer: PreTrainedTokenizerBase, **limits: Any
    ) -> None:
        self.engine = new_engine(model, tokenizer, **limits)
        self.chat = ChatEncoder(tokenizer)
        self.endpoint = Endpoint(ModelService(self.engine, tokenizer, model_name=MODEL))
        self._clients: list[AsyncOpenAI] = []

    async def session(self, seed: int = 0, **sampling: Any) -> AgentSession:
        return await self.endpoint.open_session(SamplingParams(**{"max_new_tokens": 4} | sampling), seed)

    def client(self, session: AgentSession | None = None) -> AsyncOpenAI:
        self._clients.append(new_client(self.endpoint.url(session)))
        return self._clients[-1]

    async def until_n_requests(self, n: int) -> None:
        """Wait until the engine has n unfinished requests."""
        async with asyncio.timeout(60):
            while len(self.engine._unfinished()) != n:
                await asyncio.sleep(0.001)

    async def __aenter__(self) -> "EndpointStage":
        await self.endpoint.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            await client.close()
        await self.endpoint.close()
        await self.engine.close()


@dataclass
class LiveEndpoint:
    """An endpoint that runs in a separate thread, for blocking clients."""

    url: str
    engine: RecordedEngine
    chat: ChatEncoder
    client: OpenAI
    http: httpx.Client


@contextmanager
def serving(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[LiveEndpoint]:
    """Serve the model from a thread."""
    started, state = threading.Event(), []

    async def serve() -> None:
        async with EndpointStage(model, tokenizer) as stage:
            stop = asyncio.Event()
            state.extend([stage, asyncio.get_running_loop(), stop])
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(timeout=30)
    stage, loop, stop = state
    url = stage.endpoint.url()
    with OpenAI(base_url=url, api_key="x", max_retries=0) as client, httpx.Client() as http:
        yield LiveEndpoint(url, stage.engine, stage.chat, client, http)
    loop.call_soon_threadsafe(stop.set)
    thread.join(timeout=30)
    assert not thread.is_alive()
