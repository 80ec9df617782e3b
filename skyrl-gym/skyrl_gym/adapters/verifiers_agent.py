"""The agent that plays a v1 environment of verifiers here: a chat in this process, whose model is the trainer.

A rollout of verifiers asks its model by HTTP, at an interception server that records every message, and applies stop
conditions, limits and rewrites. All of that stays; behind the server is a client that waits for the trainer's reply,
and before it a harness like verifiers' own `null`, which needs no program of its own.
"""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.configs.client import BaseClientConfig
from verifiers.v1.dialects import Dialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.graph import PendingTurn
from verifiers.v1.harnesses.null.harness import NullHarnessConfig
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.mcp import SharedToolServer

from skyrl_gym.adapters.verifiers_turn import Reply
from skyrl_gym.tools.calls import END_OF_THOUGHT, START_OF_THOUGHT

MODEL = "policy"
NEVER_S = 1e9
"""The time that the model may take. Verifiers counts the trainer's other work as the model's."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply as verifiers keeps it. `problem` is what was wrong with the calls in it, for the model."""

    message: vf.AssistantMessage
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation that waits for the model's reply."""

    request: vf.Request
    answer: asyncio.Future[Answer]


class Exchange:
    """The line between an environment, which asks, and the trainer, which answers. One question at a time."""

    def __init__(self) -> None:
        self._questions: asyncio.Queue[Question] = asyncio.Queue()
        self._is_asking = False
        self.problem: str | None = None
        """What was wrong with the calls in the last reply."""

    async def ask(self, request: vf.Request) -> vf.AssistantMessage:
        """The reply to a conversation.

        Raises:
            RuntimeError: another question is open; the trainer samples one conversation in a rollout.
        """
        if self._is_asking:
            raise RuntimeError("the environment asks the model twice at once; a rollout here is one conversation")
        self._is_asking = True
        try:
            question = Question(request, asyncio.get_running_loop().create_future())
            self._questions.put_nowait(question)
            answer = await question.answer
        finally:
            self._is_asking = False
        self.problem = answer.problem
        return answer.message

    async def question(self) -> Question:
        """What is asked next."""
        return await self._questions.get()


class TrainerClient(vf.Client):
    """A model of verifiers that is sampled by somebody else."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def get_response(
        self,
        dialect: Dialect[Any],
        body: dict[str, Any],
        sampling: vf.SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> vf.Response:
        """See `Client.get_response`."""
        message = await self._exchange.ask(dialect.parse_request(body))
        choice = {
            "index": 0,
            "finish_reason": "tool_calls" if message.tool_calls else "stop",
            "message": message_to_wire(message),
        }
        now = int(time.time())
        raw = {"id": f"reply-{now}", "object": "chat.completion", "created": now, "model": MODEL, "choices": [choice]}
        response: vf.Response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


class TrainerInterception(InterceptionServer):
    """An interception server of one rollout, with the trainer behind it."""

    def __init__(self, exchange: Exchange, tools: Mapping[str, SharedToolServer]) -> None:
        secrets = tuple(tool.state_secret for tool in tools.values() if tool.state_secret)
        super().__init__(state_service_secrets=secrets)
        self._trainer = TrainerClient(exchange)

    def _client(self, config: BaseClientConfig) -> vf.Client:
        """The model behind every session. Verifiers' own costs 40 ms a rollout, and goes to the network."""
        return self._trainer


class ChatHarness(vf.Harness[NullHarnessConfig]):
    """A chat with the tools of the task, and no others; see `Harness`."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    exchange: Exchange
    """Where the trainer is. (Verifiers makes harnesses from their configuration alone.)"""

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Talk until the model calls no tool, or verifiers refuses to go on."""
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        messages = opening(*self.resolve_prompt(data))
        headers = {"Authorization": f"Bearer {secret}"}
        async with AsyncExitStack() as stack:
            tools, *dispatch = await connect_mcp({"mcpServers": servers}, stack)
            http = await stack.enter_async_context(
                aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None))
            )
            new = messages
            while new:
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                async with http.post(f"{endpoint}/chat/completions", json=body) as response:
                    if response.status != 200:
                        return vf.ProgramResult(1, "", await response.text())
                    said = (await response.json())["choices"][0]["message"]
                new = await self._results(said, *dispatch)
                messages = [*messages, said, *new]
        return vf.ProgramResult(0, "", "")

    async def _results(self, said: dict[str, Any], dispatch: Any, servers: Any) -> list[dict[str, Any]]:
        """What the tools answer, or what was wrong with the calls; nothing where there are none."""
        if self.exchange.problem is not None:
            return [{"role": "user", "content": self.exchange.problem}]
        results = []
        for call in said.get("tool_calls") or []:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            is_known = name in dispatch
            content = await call_mcp(servers, dispatch, name, arguments) if is_known else f"There is no tool {name!r}."
            message = {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
            results.append(bound_tool_message(message))
        return results


class TrainedAgent(vf.Agent):
    """The only agent of an environment, in its only conversation of an episode, whose record goes to `traces`."""

    def __init__(
        self,
        config: vf.AgentConfig,
        name: str,
        exchange: Exchange,
        interception: InterceptionServer,
        tools: Mapping[str, SharedToolServer],
        traces: list[vf.Trace],
    ) -> None:
        super().__init__(config, interception=interception)
        self.harness = ChatHarness(self.config.harness)
        self.harness.exchange = exchange
        self._name = name
        self._tools = tools
        self._traces = traces

    async def run(
        self,
        task: vf.Task,
        *,
        runtime: vf.Runtime | None = None,
        tools: Mapping[str, SharedToolServer] | None = None,
        on_trace: Callable[[vf.Trace], None] | None = None,
        collect_artifacts: bool = False,
    ) -> vf.Trace:
        """See `Agent.run`."""
        return await super().run(
            task,
            runtime=runtime,
            tools=self._tools if tools is None else tools,
            on_trace=self._watch(on_trace),
            collect_artifacts=collect_artifacts,
        )

    @asynccontextmanager
    async def interaction(
        self,
        task: vf.Task,
        *,
        runtime: vf.Runtime | None = None,
        tools: Mapping[str, SharedToolServer] | None = None,
        on_trace: Callable[[vf.Trace], None] | None = None,
    ) -> AsyncIterator[Any]:
        """See `Agent.interaction`."""
        tools = self._tools if tools is None else tools
        opened = super().interaction(task, runtime=runtime, tools=tools, on_trace=self._watch(on_trace))
        async with opened as interaction:
            yield interaction

    def _watch(self, on_trace: Callable[[vf.Trace], None] | None) -> Callable[[vf.Trace], None]:
        def watch(trace: vf.Trace) -> None:
            if self._traces:
                raise RuntimeError(f"{self._name!r} begins a second conversation; a rollout here is one conversation")
            trace.agent.name = self._name
            self._traces.append(trace)
            if on_trace is not None:
                on_trace(trace)

        return watch


def opening(system: str | None, prompt: str | vf.Messages | None) -> list[dict[str, Any]]:
    """The first messages of a task, as OpenAI's interface has them."""
    messages: list[Any] = [] if system is None else [vf.SystemMessage(content=system)]
    messages += [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
    return [message_to_wire(message) for message in messages]


def answer_of(reply: Reply, n_turns: int) -> Answer:
    """A reply as verifiers keeps it: thoughts apart, calls apart and also in the text."""
    thoughts, said = split_thoughts(reply.text)
    calls = [
        vf.ToolCall(id=f"call_{n_turns}_{i}", name=call.name, arguments=json.dumps(call.arguments))
        for i, call in enumerate(reply.calls)
    ]
    message = vf.AssistantMessage(content=said or None, reasoning_content=thoughts or None, tool_calls=calls or None)
    return Answer(message, reply.problem)


def split_thoughts(text: str) -> tuple[str, str]:
    """The thoughts in a reply, and what is said after them; both without the tags."""
    thoughts, found, said = text.rpartition(END_OF_THOUGHT)
    if found:
        return thoughts.removeprefix(START_OF_THOUGHT).strip(), said.strip()
    said, found, thoughts = text.partition(START_OF_THOUGHT)
    return thoughts.strip(), said.strip() if found else text
