"""Environments served by the package openenv: `serve.py echo|tools PORT CAPACITY`."""

import sys
from typing import Any
from uuid import uuid4

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class EchoAction(Action):
    message: str


class EchoObservation(Observation):
    echoed_message: str


class EchoEnvironment(Environment):
    """Repeats messages, and rewards their length."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id=str(uuid4()))

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> EchoObservation:
        self._state = State(episode_id=episode_id or str(uuid4()))
        return EchoObservation(echoed_message="Echo environment ready.")

    def step(self, action: EchoAction, timeout_s: float | None = None, **_: Any) -> EchoObservation:
        self._state.step_count += 1
        return EchoObservation(echoed_message=action.message, reward=len(action.message) / 10)

    @property
    def state(self) -> State:
        return self._state


class ToolEnvironment(MCPEnvironment):
    """One tool, which repeats its message."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("tools")

        @server.tool
        def repeat(message: str) -> str:
            """Repeat a message."""
            return message

        super().__init__(server)
        self._state = State(episode_id=str(uuid4()))

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        self._state = State(episode_id=episode_id or str(uuid4()))
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError(f"{type(action).__name__} is not a tool call")

    @property
    def state(self) -> State:
        return self._state


APPS = {
    "echo": (EchoEnvironment, EchoAction, EchoObservation),
    "tools": (ToolEnvironment, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    name, port, capacity = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    app = create_app(*APPS[name], env_name=name, max_concurrent_envs=capacity)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
