"""The agent in a v1 environment of verifiers: a chat in this process, with the trainer as its model.

A rollout of verifiers calls its model over HTTP, through an interception server that records every message and applies
stop conditions, limits and rewrites. This module keeps the server. Behind it, a client waits for the trainer's reply.
In front of it, a harness like verifiers' own `null` runs the chat in this process.
"""

# mypy: disable-error-code="import-untyped"

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

from skyrl_gym.adapters.verifiers.turn import ParsedReply
from skyrl_gym.tools.calls import END_OF_THOUGHT, START_OF_THOUGHT

MODEL = "policy"
NEVER_S = 1e9
"""Time limit of a rollout, practically infinite: a rollout also waits for the trainer's other work."""


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """A reply in verifiers' format. `problem` tells the model why its calls cannot be parsed."""

    message: vf.AssistantMessage
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation waiting for the model's reply."""

    request: vf.Request
    answer: asyncio.Future[AgentAnswer]


class Exchange:
    """The connection between an environment that asks and the trainer that answers, one question at a time."""

    def __init__(self) -> None:
        self._questions: asyncio.Queue[Question] = asyncio.Queue()
        self._is_asking = False
        self.problem: str | None = None
        """Reason why the last reply's calls cannot be parsed."""

    async def ask(self, request: vf.Request) -> vf.AssistantMessage:
        """Wait for the reply to a conversation.

        Raises:
            RuntimeError: a question is already open. The trainer samples one conversation per rollout.
        """
        if self._is_asking:
            raise RuntimeError(
                "the environment calls the model twice at once; a rollout must have only one conversation"
            )
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
        """Wait for the next question."""
        return await self._questions.get()


class TrainerClient(vf.Client):
    """A verifiers client whose replies are sampled by the trainer."""

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
        """Return the trainer's reply to a request."""
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
    """The interception server of one rollout. It forwards to the trainer."""

    def __init__(self, exchange: Exchange, tools: Mapping[str, SharedToolServer]) -> None:
        secrets = tuple(tool.state_secret for tool in tools.values() if tool.state_secret)
        super().__init__(state_service_secrets=secrets)
        self._trainer = TrainerClient(exchange)

    def _client(self, config: BaseClientConfig) -> vf.Client:
        """Return the trainer for every session, because verifiers' default client takes 40 ms and uses the network."""
        return self._trainer


class ChatHarness(vf.Harness[NullHarnessConfig]):
    """A chat with the task's tools and no others."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    exchange: Exchange
    """Connection to the trainer. A class attribute, since verifiers creates harnesses from their configuration alone.
    """

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
        """Chat until the model calls no tool, or verifiers refuses to continue."""
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        messages = initial_messages(*self.resolve_prompt(data))
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
                    message = (await response.json())["choices"][0]["message"]
                new = await self._execute_calls(message, *dispatch)
                messages = [*messages, message, *new]
        return vf.ProgramResult(0, "", "")

    async def _execute_calls(self, message: dict[str, Any], dispatch: Any, servers: Any) -> list[dict[str, Any]]:
        """Execute a message's calls. Return tool messages with the results, or a user message if parsing failed."""
        if self.exchange.problem is not None:
            return [{"role": "user", "content": self.exchange.problem}]
        results = []
        for call in message.get("tool_calls") or []:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            unknown = f"There is no tool {name!r}. Tools: {', '.join(sorted(dispatch))}."
            content = await call_mcp(servers, dispatch, name, arguments) if name in dispatch else unknown
            result = {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
            results.append(bound_tool_message(result))
        return results


class TrainedAgent(vf.Agent):
    """The only agent of an environment. It has one conversation per episode and records it in `traces`."""

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
        """Run a task. `tools` defaults to the episode's."""
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
        """Open an interaction. `tools` defaults to the episode's."""
        tools = self._tools if tools is None else tools
        context = super().interaction(task, runtime=runtime, tools=tools, on_trace=self._watch(on_trace))
        async with context as interaction:
            yield interaction

    def _watch(self, on_trace: Callable[[vf.Trace], None] | None) -> Callable[[vf.Trace], None]:
        def watch(trace: vf.Trace) -> None:
            if self._traces:
                raise RuntimeError(
                    f"agent {self._name!r} started a second conversation; a rollout must be a single conversation"
                )
            trace.agent.name = self._name
            self._traces.append(trace)
            if on_trace is not None:
                on_trace(trace)

        return watch


def initial_messages(system: str | None, prompt: str | vf.Messages | None) -> list[dict[str, Any]]:
    """Return a task's first messages in the format of the OpenAI API."""
    messages: list[Any] = [] if system is None else [vf.SystemMessage(content=system)]
    messages += [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
    return [message_to_wire(message) for message in messages]


def to_answer(reply: ParsedReply, n_turns: int) -> AgentAnswer:
    """Convert a reply to verifiers' format: thoughts and calls are separate. Calls also stay in the text."""
    thoughts, text = split_thoughts(reply.text)
    calls = [
        vf.ToolCall(id=f"call_{n_turns}_{i}", name=call.name, arguments=json.dumps(call.arguments))
        for i, call in enumerate(reply.calls)
    ]
    message = vf.AssistantMessage(content=text or None, reasoning_content=thoughts or None, tool_calls=calls or None)
    return AgentAnswer(message, reply.problem)


def split_thoughts(text: str) -> tuple[str, str]:
    """Split a reply into its thoughts and the text after them, without the tags."""
    thoughts, found, answer = text.rpartition(END_OF_THOUGHT)
    if found:
        return thoughts.removeprefix(START_OF_THOUGHT).strip(), answer.strip()
    answer, found, thoughts = text.partition(START_OF_THOUGHT)
    return thoughts.strip(), answer.strip() if found else text
