"""A server of OpenEnv's `/ws` protocol in a separate thread, which misbehaves on demand (see `_step`)."""

import asyncio
import json
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from gym_kit.mcp_server import RED_PIXEL
from skyrl_gym.adapters.openenv import schema


class Action(BaseModel):
    model_config = ConfigDict(extra="forbid")
    metadata: dict[str, Any] = {}


class EchoAction(Action):
    message: str


class CallToolAction(Action):
    type: Literal["call_tool"] = "call_tool"
    tool_name: str
    arguments: dict[str, Any] = {}


class ListToolsAction(Action):
    type: Literal["list_tools"] = "list_tools"


class Crash(Exception):
    """The environment raises."""


class Echo:
    """Repeats messages."""

    action: type[Action] = EchoAction

    def __init__(self) -> None:
        self.n_steps = 0

    def reset(self, greeting: str = "Echo is ready.", seed: int | None = None, done: bool = False) -> dict[str, Any]:
        if greeting == "crash":
            raise Crash("cannot be reset")
        self.n_steps = 0
        return {"observation": {"echoed_message": greeting, "seed": seed}, "reward": None, "done": done}

    def step(self, action: Any) -> dict[str, Any]:
        if action.message == "crash":
            raise Crash("division by zero")
        self.n_steps += 1
        reward = {"nan": float("nan"), "text": "much", "silent": None}.get(action.message, len(action.message) / 10)
        seen = {"echoed_message": action.message, "n_steps": self.n_steps}
        return {"observation": seen, "reward": reward, "done": action.message == "stop"}

    def state(self) -> dict[str, Any]:
        return {"episode_id": None, "step_count": self.n_steps}


class Fields(Echo):
    def step(self, action: Any) -> dict[str, Any]:
        return {"observation": {"got": action.model_dump(exclude={"metadata"})}, "reward": 1.0, "done": False}

    @classmethod
    def of(cls, **fields: Any) -> "type[Fields]":
        """Return an environment whose actions have these fields."""
        return type("FieldsEnv", (cls,), {"action": create_model("FieldsAction", __base__=Action, **fields)})


Columns = Fields.of(column=(int, ...))
Moves = Fields.of(move=(Literal["left", "right"], ...))
Pairs = Fields.of(x=(float, ...), label=(str, ...), note=(str, ""))


class Pictures(Echo):
    """Shows two pixels, like BrowserGym's `screenshot`."""

    def step(self, action: Any) -> dict[str, Any]:
        result = super().step(action)
        result["observation"]["screenshot"] = [[[255, 0, 0], [0, 0, 255]]]
        return result


class Tools(Echo):
    """Has tools, like environments built on MCP."""

    action = CallToolAction

    def step(self, action: Any) -> dict[str, Any]:
        if isinstance(action, ListToolsAction):
            return {"observation": {"tools": TOOLS}, "reward": None, "done": False}
        message = action.arguments.get("message")
        seen: dict[str, Any] = {"tool_name": action.tool_name, "result": None, "error": None}
        if action.tool_name == "add":
            seen["result"] = _result(str(action.arguments["a"] + action.arguments["b"]))
        elif action.tool_name == "draw":
            image = {"type": "image", "data": RED_PIXEL, "mimeType": "image/png"}
            seen["result"] = _result("Look:", is_error=message == "oops")
            seen["result"]["content"].append(image)
        elif action.tool_name == "echo_message":
            seen["result"] = _result(message, is_error=message == "oops")
        else:
            seen["error"] = {"error_type": "tool_not_found", "message": f"no {action.tool_name}"}
        return {"observation": seen, "reward": 0.5 if message == "pay" else None, "done": message == "stop"}


class Broken(Echo):
    """Raises in the constructor."""

    def __init__(self) -> None:
        raise Crash("no memory")


TOOLS = [
    {"name": name, "description": description, "input_schema": {"type": "object", "properties": properties, **more}}
    for name, description, properties, more in (
        ("echo_message", "Say something.", {"message": {"type": "string"}}, {"required": ["message"]}),
        ("draw", "Draw a pixel.", {"message": {"type": "string"}}, {}),
        ("add", "Add two numbers.", {"a": {"type": "integer"}, "b": {"type": "integer"}}, {}),
    )
]


def _result(text: str, *, is_error: bool = False) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "data": text, "is_error": is_error}


@dataclass
class ProtocolServer:
    """A server with at most `capacity` sessions at once, no queue, and counters of its events.

    close_s: time to close an environment.
    headers: of the last handshake.
    """

    environment: type[Echo] = Echo
    capacity: int = 8
    tool: str = "echo_message"
    has_schema: bool = True
    close_s: float = 0.0
    port: int = 0
    n_open: int = 0
    max_open: int = 0
    n_made: int = 0
    n_refused: int = 0
    n_schema_requests: int = 0
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "ProtocolServer":
        schema._schemas.clear()  # another server may have had the same port
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._is_ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Break every connection and stop listening."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._is_killed.set)
            self._thread.join(60)
            assert not self._thread.is_alive()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_killed = asyncio.Event()
        options = {"process_request": self._http, "compression": None, "close_timeout": 1}
        server = await serve(self._session, "127.0.0.1", self.port, **options)
        self.port = server.sockets[0].getsockname()[1]
        self._is_ready.set()
        await self._is_killed.wait()
        await _break_off(server)

    def _http(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/ws":
            self.headers = dict(request.headers.raw_items())
            return None
        if request.path != "/schema" or not self.has_schema:
            return connection.respond(404, "not found\n")
        self.n_schema_requests += 1
        actions = self.environment.action.model_json_schema()
        return connection.respond(200, json.dumps({"action": actions, "observation": {}}))

    async def _session(self, connection: ServerConnection) -> None:
        if self.n_open >= self.capacity:
            self.n_refused += 1
            await _error(connection, "CAPACITY_REACHED", f"all {self.capacity} sessions are taken")
            return
        try:
            env = self.environment()
        except Crash as problem:
            await _error(connection, "FACTORY_ERROR", str(problem))
            return
        self.n_open += 1
        self.n_made += 1
        self.max_open = max(self.max_open, self.n_open)
        try:
            async for text in connection:
                if not await self._answer(connection, env, text):
                    break
        except ConnectionClosed:
            pass
        finally:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_killed.wait(), self.close_s)
            self.n_open -= 1

    async def _answer(self, connection: ServerConnection, env: Echo, text: str | bytes) -> bool:
        """Answer one message; return True if the session continues."""
        try:
            message = json.loads(text)
        except ValueError as problem:
            await _error(connection, "INVALID_JSON", str(problem))
            return True
        content = message.get("data", {})
        try:
            match message.get("type"):
                case "close":
                    return False
                case "reset":  # drops unknown arguments
                    known = {name: value for name, value in content.items() if name in ("greeting", "seed", "done")}
                    await _send(connection, "observation", env.reset(**known))
                case "step":
                    return await _step(connection, env, content)
                case "state":
                    await _send(connection, "state", env.state())
                case other:
                    await _error(connection, "UNKNOWN_TYPE", f"Unknown message type: {other}")
        except ValidationError as problem:
            await _error(connection, "VALIDATION_ERROR", "Invalid message", json.loads(problem.json()))
        except Crash as problem:
            await _error(connection, "EXECUTION_ERROR", str(problem))
        return True


async def _step(connection: ServerConnection, env: Echo, content: dict[str, Any]) -> bool:
    """Play an action, or misbehave; return True if the session continues."""
    match content.get("message"):
        case "drop":
            connection.transport.abort()
            return False
        case "hang":
            await connection.wait_closed()
            return False
        case "garbage":
            await connection.send("{")
        case "other type":
            await _send(connection, "state", {})
        case "no observation":
            await _send(connection, "observation", {"reward": 1.0})
        case "long":
            await _send(connection, "observation", {"observation": {"echoed_message": "x" * 100_000}})
        case _:
            model = ListToolsAction if content.get("type") == "list_tools" else env.action
            await _send(connection, "observation", env.step(model.model_validate(content)))
    return True


async def _send(connection: ServerConnection, kind: str, content: dict[str, Any]) -> None:
    await connection.send(json.dumps({"type": kind, "data": content}))


async def _error(connection: ServerConnection, code: str, message: str, errors: list[Any] | None = None) -> None:
    more = {"errors": errors} if errors else {}
    await _send(connection, "error", {"message": message, "code": code, **more})


async def _break_off(server: Server) -> None:
    for connection in list(server.connections):
        connection.transport.abort()
    server.close()
    await server.wait_closed()
