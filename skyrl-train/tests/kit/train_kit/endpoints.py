"""The HTTP endpoint under test, its clients, and agents that use it."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAI
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from examples.catch.catch_dataset import CatchDataset
from examples.catch.env import CatchEnv
from skyrl_train.config import load_config
from skyrl_train.endpoint import AgentGenerator, AgentResult, AgentSession, Endpoint, ModelService
from skyrl_train.generators.base import BatchMetadata, RolloutRequest, rollout_requests
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.types import DrawnPrompt, PromptRow, Trajectory
from train_kit.agents import ScriptedEngine
from train_kit.engines import RecordedEngine
from train_kit.messages import system, user

MODEL = "tiny"
HELLO = [system("Go on."), user("State: ball=(3,0)")]
SAMPLING = SamplingParams(max_new_tokens=3, temperature=0.7)
LONG: dict[str, Any] = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
"""Options of a request that is still running during the test."""


def new_client(base_url: str) -> AsyncOpenAI:
    http = DefaultAsyncHttpxClient(verify=False)  # loading certificates takes 30 ms
    return AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0, http_client=http)


async def chat(client: AsyncOpenAI, messages: Any = HELLO, **options: Any) -> Any:
    return await client.chat.completions.create(model=MODEL, messages=messages, **options)


async def ask_once(*, base_url: str, api_key: str, model: str, row: PromptRow, session_id: str) -> float:
    """Answer a prompt with one reply of the model: the simplest agent. Its reward is 1."""
    async with new_client(base_url) as client:
        await client.chat.completions.create(model=model, messages=row.prompt)
    return 1.0


def ask_once_blocking(**options: Any) -> float:
    """Answer a prompt as `ask_once` does, in a thread."""
    with OpenAI(base_url=options["base_url"], api_key=options["api_key"]) as client:
        client.chat.completions.create(model=options["model"], messages=options["row"].prompt)
    return 1.0


def litellm_player(litellm: Any) -> Any:
    """Return an agent that plays Catch through LiteLLM."""

    async def play(*, base_url: str, api_key: str, model: str, row: PromptRow, session_id: str) -> AgentResult:
        game = CatchEnv(env_config={}, extras=row.env_extras)
        messages, rewards = list(row.prompt), []
        while not game.state.is_over:
            answer = await litellm.acompletion(f"openai/{model}", messages, api_base=base_url, api_key=api_key)
            message = answer.choices[0].message
            turn = game.step(message.content)
            rewards.append(turn["reward"])
            messages += [message.model_dump(), *turn["observations"]]
        return AgentResult(rewards, metrics=game.get_metrics())

    return play


def assert_equal_trajectories(trajectories: Sequence[Trajectory], expected: Sequence[Trajectory]) -> None:
    """Compare tokens, rewards and metrics; the last digits of log-probs depend on the batches of the engine."""
    for t, other in zip(trajectories, expected, strict=True):
        assert (t.prompt_ids, t.response_ids, t.loss_mask) == (other.prompt_ids, other.response_ids, other.loss_mask)
        assert (t.rewards, t.stop_reason, t.env_metrics) == (other.rewards, other.stop_reason, other.env_metrics)
        assert t.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def catch_requests(n_games: int, n_samples: int = 1) -> list[RolloutRequest]:
    """Return rollout requests of games of Catch."""
    rows = []
    for i, row in enumerate(CatchDataset(train_size=n_games).train_rows()):
        extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class")}
        rows.append(PromptRow(str(i), row["prompt"], "catch", extras))
    return rollout_requests([DrawnPrompt(i, row, i) for i, row in enumerate(rows)], n_samples, "catch")


def new_engine(model: PreTrainedModel | ScriptedEngine, tokenizer: PreTrainedTokenizerBase, **limits: Any) -> Any:
    """Return an engine of the model, or the engine itself."""
    return model if isinstance(model, ScriptedEngine) else RecordedEngine(model, tokenizer, **limits)


class EndpointStage:
    """An endpoint in the event loop of the test, with its engine and clients."""

    def __init__(
        self, model: PreTrainedModel | ScriptedEngine, tokenizer: PreTrainedTokenizerBase, **limits: Any
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


@dataclass
class AgentStage:
    """Generators that run agents and share an engine; `close` closes them."""

    model: PreTrainedModel | ScriptedEngine
    tokenizer: PreTrainedTokenizerBase
    generators: list[AgentGenerator] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = new_engine(self.model, self.tokenizer)

    def generator(
        self,
        agent: Any,
        *,
        in_own_process: bool = False,
        max_concurrent_agents: int = 128,
        trains_side_requests: bool = False,
        **generator: Any,
    ) -> AgentGenerator:
        """Create a generator; other arguments are keys of the configuration."""
        cfg = load_config({"trainer": {"max_prompt_length": 1}, "generator": {"n_rollout_retries": 0} | generator})
        own: dict[str, Any] = {"in_own_process": in_own_process, "max_concurrent_agents": max_concurrent_agents}
        own["trains_side_requests"] = trains_side_requests
        self.generators.append(AgentGenerator(agent, cfg.generator, self.engine, self.tokenizer, **own))
        return self.generators[-1]

    async def play(
        self, agent: Any, requests: list[RolloutRequest], sampling: SamplingParams = SAMPLING, **options: Any
    ) -> list[Trajectory]:
        return await self.generator(agent, **options).rollout(requests, sampling, BatchMetadata(1, "train"))

    async def close(self) -> None:
        for generator in self.generators:
            await generator.close()
        await self.engine.close()
