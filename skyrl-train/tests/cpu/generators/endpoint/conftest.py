"""The endpoint over real HTTP, in the event loop of the test or in a separate thread for blocking clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from generators.conftest import RecordedEngine
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAI
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.endpoint import Endpoint, ModelService, Session
from skyrl_train.inference_engines.base import SamplingParams

MODEL = "tiny"
HELLO = [{"role": "system", "content": "Go on."}, {"role": "user", "content": "State: ball=(3,0)"}]


def new_engine(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_cache_bytes: int = 1 << 24
) -> RecordedEngine:
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_cache_bytes": max_cache_bytes}
    return RecordedEngine(model, tokenizer, **limits)


def new_client(base_url: str) -> AsyncOpenAI:
    http = DefaultAsyncHttpxClient(verify=False)  # loading certificates takes 30 ms
    return AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0, http_client=http)


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise importing litellm sends a request
    import litellm

    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    return litellm


@dataclass
class EndpointStage:
    """A listening endpoint with its engine and clients."""

    endpoint: Endpoint
    engine: RecordedEngine
    chat: ChatEncoder
    clients: list[AsyncOpenAI] = field(default_factory=list)

    def session(self, seed: int = 0, **sampling: Any) -> Session:
        return self.endpoint.open_session(SamplingParams(**{"max_new_tokens": 4} | sampling), seed)

    def client(self, session: Session | None = None) -> AsyncOpenAI:
        self.clients.append(new_client(self.endpoint.url(session)))
        return self.clients[-1]

    async def until_idle(self) -> None:
        """Wait until the engine is idle."""
        async with asyncio.timeout(60):
            while self.engine._unfinished():
                await asyncio.sleep(0.001)

    async def until_n_requests(self, n: int = 1) -> None:
        """Wait until the engine has at least n unfinished requests."""
        async with asyncio.timeout(60):
            while len(self.engine._unfinished()) < n:
                await asyncio.sleep(0.001)


@pytest.fixture
async def stage(talker: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[EndpointStage]:
    engine = new_engine(talker, tiny_tokenizer)
    endpoint = Endpoint(ModelService(engine, tiny_tokenizer, model_name=MODEL))
    await endpoint.start()
    stage = EndpointStage(endpoint, engine, ChatEncoder(tiny_tokenizer))
    yield stage
    for client in stage.clients:
        await client.close()
    await endpoint.close()
    await engine.close()


@dataclass
class LiveEndpoint:
    """An endpoint that runs in a separate thread."""

    url: str
    engine: RecordedEngine
    chat: ChatEncoder
    client: OpenAI
    http: httpx.Client


@pytest.fixture(scope="module")
def live(talker: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> Iterator[LiveEndpoint]:
    started, state = threading.Event(), []

    async def serve() -> None:
        engine = new_engine(talker, tiny_tokenizer)
        endpoint = Endpoint(ModelService(engine, tiny_tokenizer, model_name=MODEL))
        await endpoint.start()
        stop = asyncio.Event()
        state.extend([endpoint.url(), engine, asyncio.get_running_loop(), stop])
        started.set()
        await stop.wait()
        await endpoint.close()
        await engine.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(timeout=30)
    url, engine, loop, stop = state
    with OpenAI(base_url=url, api_key="x", max_retries=0) as client, httpx.Client() as http:
        yield LiveEndpoint(url, engine, ChatEncoder(tiny_tokenizer), client, http)
    loop.call_soon_threadsafe(stop.set)
    thread.join(timeout=30)
    assert not thread.is_alive()
