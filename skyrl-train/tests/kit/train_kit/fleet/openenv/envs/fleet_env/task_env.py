"""`FleetTaskEnv` with the interface of Fleet's OpenEnv: the same calls, results and refusals, on a notebook in memory.

Tasks of computer use have only the tool `computer`, whose screen of 64 x 48 pixels becomes blue when it is clicked.

A grade is 0.5 or 1.0 in turn and never 0, so that a reward of 0 reveals a lost grade. The variable
FLEET_STAND_IN_FAULTS is the probability of a provisioning failure, of an unknown grade, and of a verifier that raises.
"""

import os
import random
from types import SimpleNamespace
from typing import Any, ClassVar

from PIL import Image

from skyrl_gym.images import read_image

SCREENS = {color: read_image(Image.new("RGB", (64, 48), color)).data_url for color in ("red", "blue")}
TOOLS = ("list_notes", "add_note", "submit_final_answer", "computer")


def describe_tools() -> list[dict[str, Any]]:
    """Return the tools in OpenAI's format."""
    parameters = {"type": "object", "properties": {"n_copies": {"type": "integer"}}}
    return [
        {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}
        for name in TOOLS
    ]


class Software:
    """The handle of a task's software. OpenEnv calls `close` without awaiting it."""

    def __init__(self) -> None:
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


class FleetTaskEnv:
    """A task about notes."""

    created: ClassVar[list["FleetTaskEnv"]] = []
    """Every instance of this process."""
    faults: ClassVar[random.Random] = random.Random(0)

    def __init__(
        self,
        task_config: dict[str, Any],
        api_key: str | None = None,
        ttl_seconds: int | None = None,
        max_steps: int = 50,
        request_timeout_s: float = 60.0,
        reset_timeout_s: float = 10.0,
        partial_reward: bool = False,
    ) -> None:
        for name in ("task_key", "env_key", "prompt"):
            if not task_config.get(name):
                raise ValueError(f"task_config has no {name}")
        if not api_key:
            raise ValueError("Fleet API key required")
        self.task_config = task_config
        self.max_steps = max_steps
        self.notes: list[str] = []
        self.clicks: list[Any] = []
        self.n_steps = 0
        self.is_done = False
        self.is_closed = False
        self.n_verified = 0
        self.final_reward: float | None = None
        self.conversation_messages: list[dict[str, Any]] | None = None
        self.software = Software()
        self._orch: SimpleNamespace | None = None
        self.grade = 0.5 if len(self.created) % 2 else 1.0
        self.created.append(self)

    async def reset_async(self) -> dict[str, Any]:
        if self._fails():
            raise RuntimeError("Fleet env failed to start: health check timed out")
        self._orch = SimpleNamespace(_fleet_env=self.software)
        modality = self.task_config.get("task_modality", "tool_use")
        observation = {
            "prompt": self.task_config["prompt"],
            "observation": {},
            "step": 0,
            "task_key": self.task_config["task_key"],
            "modality": modality,
            "tools": describe_tools(),
        }
        if modality == "tool_use":
            return observation
        tools = [tool for tool in describe_tools() if tool["function"]["name"] == "computer"]
        return observation | {"tools": tools, "initial_screenshot": self._screenshot()}

    async def step_async(self, action: dict[str, Any]) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        if self.is_closed or self.is_done:
            raise RuntimeError("Episode is done. Call reset() to start a new one.")
        if unknown := action.keys() - {"tool", "params", "done"}:
            raise ValueError(f"unknown keys of an action: {unknown}")
        self.n_steps += 1
        info: dict[str, Any] = {"step": self.n_steps}
        if tool := action.get("tool"):
            try:
                info["tool_result"] = self._call(tool, action.get("params") or {})
            except (KeyError, TypeError) as error:
                info["tool_error"] = f"{type(error).__name__}: {error}"
        is_last = self.n_steps >= self.max_steps
        self.is_done = bool(action.get("done")) or is_last or tool == "submit_final_answer"
        reward: Any = 0.0
        if self.is_done:
            info["done_reason"] = "max_steps" if is_last else "agent_done"
            reward = await self._verify()
            info["reward_computed"] = reward is not None
        return {"step": self.n_steps}, reward, self.is_done, info

    async def close_async(self) -> None:
        if not self.is_closed and not self.is_done:
            self.final_reward = await self._verify()
        self.is_closed, self._orch = True, None

    def close(self) -> None:
        self.is_closed = True

    def _call(self, tool: str, params: dict[str, Any]) -> Any:
        if tool not in TOOLS:
            raise KeyError(f"no tool {tool}")
        if tool == "add_note":
            self.notes += [params["text"]] * params.get("n_copies", 1)
        if tool == "computer":
            if params["action"] == "left_click":
                self.clicks.append(params["coordinate"])
            return [{"type": "text", "text": f"Did {params['action']}."}, *self._screenshot()]
        return {"notes": self.notes}

    def _screenshot(self) -> list[dict[str, Any]]:
        url = SCREENS["blue" if self.clicks else "red"]
        return [{"type": "image_url", "image_url": {"url": url}}]

    async def _verify(self) -> float | None:
        self.n_verified += 1
        if self._fails():
            if self.faults.random() < 0.5:
                raise RuntimeError("verifier: connection reset")
            return None
        self.final_reward = self.grade
        return self.final_reward

    def _fails(self) -> bool:
        return self.faults.random() < float(os.environ.get("FLEET_STAND_IN_FAULTS", "0"))
