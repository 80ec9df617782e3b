"""Episodes with Fleet's OpenEnv itself (make test-fleet).

Its tools run on an MCP server of this machine. Only the calls of the Fleet SDK to Fleet's cloud are replaced: starting
the software, running the verifier, and stopping the software.
"""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from envs.fleet_env.client import FleetEnvClient
from envs.fleet_env.mcp_tools import FleetMCPTools
from fleet._async import AsyncFleet
from fleet._async.tasks import Task
from mcp.server.fastmcp import FastMCP, Image
from PIL import Image as PillowImage

from integrations.fleet.env import FleetTaskEnv
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput
from skyrl_gym.images import find_images, join_texts
from skyrl_gym.runtime.validation import validate_prompt, validate_step_output

TASK = {
    "task_key": "notes_1",
    "env_key": "notes",
    "env_version": "v1",
    "prompt": "Write a note, and call submit_final_answer.",
    "verifier_code": "def verify(env, final_answer=None, conversation=None): return 1.0",
}


class Software:
    """The software of one episode, as the Fleet SDK returns it."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.instance_id = "one"
        self.options = options
        self.is_closed = False
        self.urls = SimpleNamespace(root=f"{url}/", manager=SimpleNamespace(api=f"{url}/manager"))

    async def close(self) -> None:
        self.is_closed = True


class Cloud:
    """Fleet's cloud: the software it started, and the verifier's arguments and answer."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.started: list[Software] = []
        self.verified: list[dict[str, Any]] = []
        self.answer = SimpleNamespace(success=True, result=1.0, error=None, stdout="", execution_id="x")

    async def make(self, env_key: str, **options: Any) -> Software:
        self.started.append(Software(self.url, options | {"env_key": env_key}))
        return self.started[-1]

    async def verify(self, software: Software, **arguments: Any) -> SimpleNamespace:
        assert not software.is_closed
        self.verified.append(arguments)
        return self.answer


@pytest.fixture
async def cloud(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cloud]:
    """A cloud whose software has the tools of a notebook."""
    server = FastMCP("notes", stateless_http=True)
    notes: list[str] = []

    @server.tool()
    def add_note(text: str) -> dict[str, Any]:
        """Add a note."""
        notes.append(text)
        return {"notes": notes}

    @server.tool(structured_output=False)
    def computer(action: str, coordinate: list[int] | None = None) -> list[Any]:
        """Use the screen, which becomes blue when it is clicked."""
        file = io.BytesIO()
        PillowImage.new("RGB", (64, 48), "blue" if action == "left_click" else "red").save(file, "PNG")
        return [f"Did {action} at {coordinate}.", Image(data=file.getvalue(), format="png")]

    app = server.streamable_http_app()

    async def serve_both_paths(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/api/v1/mcp":  # of computer use
            scope = {**scope, "path": "/mcp"}
        await app(scope, receive, send)

    web = uvicorn.Server(uvicorn.Config(serve_both_paths, port=0, log_level="error"))
    serving = asyncio.create_task(web.serve())
    while not web.started:
        await asyncio.sleep(0.01)
    port = web.servers[0].sockets[0].getsockname()[1]
    cloud = Cloud(f"http://127.0.0.1:{port}")
    monkeypatch.setenv("FLEET_API_KEY", "key")
    monkeypatch.setattr(AsyncFleet, "make", lambda self, **options: cloud.make(**options))
    monkeypatch.setattr(Task, "verify_detailed_async", lambda self, *args, **options: cloud.verify(*args, **options))
    monkeypatch.setattr("envs.fleet_env.task_env._VERIFY_BACKOFF_S", 0.0)
    create = FleetMCPTools.__init__
    monkeypatch.setattr(FleetMCPTools, "__init__", lambda *args, **options: create(*args, **options, initial_wait=0.0))
    yield cloud
    web.should_exit = True
    await serving


def make(
    tmp_path: Path, task: dict[str, Any] | None = None, *, reads_images: bool = False, **settings: Any
) -> FleetTaskEnv:
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps([task or TASK]))
    row = {"task_key": "notes_1", "max_turns": 4, "reads_images": reads_images}
    return FleetTaskEnv({"tasks_file": str(file), **settings}, row)


async def play(env: FleetTaskEnv, *replies: str) -> BaseTextEnvStepOutput:
    """Play an episode of replies and return its last output."""
    await env.init_async([])
    output = [await env.step_async(reply) for reply in replies][-1]
    await env.close_async()
    return output


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_an_episode(cloud: Cloud, tmp_path: Path) -> None:
    env = make(tmp_path, ttl_seconds=77)
    prompt, _ = await env.init_async([])
    assert "add_note" in prompt[0]["content"]
    assert "submit_final_answer" in prompt[0]["content"]
    assert '"computer"' not in prompt[0]["content"]
    step = await env.step_async(call("add_note", text="milk"))
    assert "milk" in step["observations"][0]["content"]
    assert "Error" in (await env.step_async(call("fly")))["observations"][0]["content"]
    last = await env.step_async(call("submit_final_answer", answer="4"))
    assert (last["done"], last["reward"]) == (True, 1.0)
    await env.close_async()
    (software,) = cloud.started
    assert (software.is_closed, software.options["ttl_seconds"]) == (True, 77)
    assert software.options["env_key"] == "notes:v1"
    (arguments,) = cloud.verified
    assert arguments["final_answer"] == "4"
    assert len(json.loads(arguments["conversation"])) == 7
    assert env.get_metrics()["is_verified"] == 1


async def test_computer_use(cloud: Cloud, tmp_path: Path) -> None:
    task = TASK | {"task_modality": "computer_use", "verifier_code": "def verify(env, conversation=None): return 1.0"}
    env = make(tmp_path, task, reads_images=True, coordinates="thousandths")
    prompt = validate_prompt(await env.init_async([]))
    assert "The screenshot has 64 x 48 pixels." in prompt[0]["content"]
    assert '"add_note"' not in prompt[0]["content"]
    (screen,) = find_images(prompt)
    assert screen.open().getpixel((0, 0)) == (255, 0, 0)
    step = validate_step_output(await env.step_async(call("computer", action="left_click", coordinate=[500, 250])))
    (screen,) = find_images(step["observations"])
    assert screen.open().getpixel((0, 0)) == (0, 0, 255)
    assert "Did left_click at [32, 12]." in join_texts(step["observations"][0]["content"])
    assert (await env.step_async("<done>"))["reward"] == 1.0
    await env.close_async()
    (arguments,) = cloud.verified
    assert "base64" not in arguments["conversation"]
    with pytest.raises(ValueError, match="whose screenshots a text model cannot see"):
        make(tmp_path, task)


async def test_done_and_the_last_turn_are_graded(cloud: Cloud, tmp_path: Path) -> None:
    cloud.answer.result = 0.0
    assert (await play(make(tmp_path), "<done>"))["reward"] == 0.0
    cloud.answer.result = 0.5
    assert (await play(make(tmp_path), "a", "b", "c", "d"))["reward"] == 0.5
    assert all(software.is_closed for software in cloud.started)


def fail(cloud: Cloud) -> None:
    cloud.answer.success, cloud.answer.result, cloud.answer.error = False, None, {"message": "502"}


def raise_error(cloud: Cloud) -> None:
    cloud.answer = None  # type: ignore[assignment]


def break_judge(cloud: Cloud) -> None:
    cloud.answer.result, cloud.answer.stdout = 0.0, "JUDGE ERROR: rate limit"


@pytest.mark.parametrize("fault", [fail, raise_error, break_judge])
@pytest.mark.parametrize("reply", ["<done>", call("submit_final_answer", answer="4")])
async def test_a_verifier_that_fails_is_no_reward(
    fault: Callable[[Cloud], None], reply: str, cloud: Cloud, tmp_path: Path
) -> None:
    fault(cloud)
    output = await play(make(tmp_path), reply)
    assert (output["done"], output["reward"]) == (True, None)
    assert cloud.started[0].is_closed


async def test_a_lost_handle_is_no_reward(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenEnv returns 0.0, and says that it computed the reward."""
    create = FleetEnvClient.__init__

    def lose(self: Any, *args: Any, **options: Any) -> None:
        create(self, *args, **options)
        self._fleet_env = None

    monkeypatch.setattr(FleetEnvClient, "__init__", lose)
    for reply in ("<done>", call("submit_final_answer", answer="4")):
        output = await play(make(tmp_path), reply)
        assert (output["done"], output["reward"], cloud.verified) == (True, None, [])
