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

from examples.catch.catch_dataset import CatchDataset
from skyrl_train.config import load_config
from skyrl_train.generators.base import BatchMetadata, RolloutRequest, rollout_requests
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.endpoint import AgentGenerator, Endpoint, ModelService, Session
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.types import DrawnPrompt, PromptRow, Trajectory

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

    async def session(self, seed: int = 0, **sampling: Any) -> Session:
        return await self.endpoint.open_session(SamplingParams(**{"max_new_tokens": 4} | sampling), seed)

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


SAMPLING = SamplingParams(max_new_tokens=3, temperature=0.7)


def catch_requests(n_games: int, n_samples: int = 1) -> list[RolloutRequest]:
    rows = []
    for i, row in enumerate(CatchDataset(train_size=n_games).train_rows()):
        extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class")}
        rows.append(PromptRow(str(i), row["prompt"], "catch", extras))
    return rollout_requests([DrawnPrompt(i, row, i) for i, row in enumerate(rows)], n_samples, "catch")


class AgentStage:
    """Generators that share an engine, closed at the end."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.engine = new_engine(model, tokenizer)
        self.generators: list[AgentGenerator] = []

    def generator(self, agent: Any, **options: Any) -> AgentGenerator:
        own = {name: options.pop(name) for name in ("max_concurrent_agents", "in_own_process") if name in options}
        cfg = load_config({"trainer": {"max_prompt_length": 1}, "generator": {"n_rollout_retries": 0} | options})
        own = {"in_own_process": False, **own}
        self.generators.append(AgentGenerator(agent, cfg.generator, self.engine, self.tokenizer, **own))
        return self.generators[-1]

    async def play(
        self, agent: Any, requests: list[RolloutRequest], sampling: SamplingParams = SAMPLING, **options: Any
    ) -> list[Trajectory]:
        generator = self.generator(agent, **options)
        return await generator.rollout(requests, sampling, BatchMetadata(1, "train"))

    async def close(self) -> None:
        for generator in self.generators:
            await generator.close()
        await self.engine.close()


@pytest.fixture
async def agent_stage(talker: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[AgentStage]:
    agent_stage = AgentStage(talker, tiny_tokenizer)
    yield agent_stage
    await agent_stage.close()
