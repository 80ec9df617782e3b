"""Trajectories of a harness with a scripted model."""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from openai import OpenAI
from train_kit.messages import user

from agent_kit.scripted import HEADER, CharacterEngine, hermes_tokenizer, write_call
from skyrl_agent.harness.agent import HarnessAgent, HarnessGenerator
from skyrl_agent.harness.config import HarnessConfig
from skyrl_agent.leases import MARK, lease_folder
from skyrl_agent.workspaces import Workspace
from skyrl_train.config import load_config
from skyrl_train.generators.base import BatchMetadata, rollout_requests
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.types import DrawnPrompt, PromptRow, Trajectory
from skyrl_train.types.tokens import Phase

PREFIX = f"test{os.getpid()}-"
"""Start of the names of this process's workspaces, see `conftest.py`."""
FAKE_AGENT = Path(__file__).with_name("fake_agent.py")
RIGHT = "echo right > answer.txt"
GRADER = 'test "$(cat answer.txt)" = right'


def fake_harness(**settings: Any) -> HarnessConfig:
    """Return a harness of the fake agent in an isolated workspace."""
    workspace = {"kind": "isolated", "readable": (str(FAKE_AGENT.parent),), **settings.pop("workspace", {})}
    command = ("/usr/bin/python3", "-IS", str(FAKE_AGENT), "{task}")
    return HarnessConfig.model_validate({"harness": command, "workspace": workspace, "verifier": GRADER, **settings})


def reply(prompt: str) -> str:
    """Run the command that the task names, or write the right answer. Then end."""
    if prompt.count(HEADER) > 1 and "again" not in prompt:
        return "Done."
    command = re.search(r"run=\[(.*?)\]", prompt)
    return write_call("bash", command=command[1] if command else RIGHT)


async def play(
    cfg: HarnessConfig,
    rows: Sequence[Mapping[str, Any]],
    script: Callable[[str], str] = reply,
    engine: Any = None,
    n_retries: int = 0,
    phase: Phase = "train",
) -> tuple[list[Trajectory], dict[str, float]]:
    """Play a trajectory for each row {task, …}. Return them with the metrics of both phases."""
    tokenizer = hermes_tokenizer()
    engine = engine or CharacterEngine(tokenizer, script)
    settings = load_config({"trainer": {"max_prompt_length": 1}, "generator": {"n_rollout_retries": n_retries}})
    generator = HarnessGenerator(HarnessAgent(cfg), settings.generator, engine, tokenizer, in_own_process=False)
    prompts = [
        PromptRow(str(i), [user(row.get("task", ""))], None, {k: v for k, v in row.items() if k != "task"})
        for i, row in enumerate(rows)
    ]
    try:
        trajectories = await generator.rollout(
            rollout_requests([DrawnPrompt(i, row, i) for i, row in enumerate(prompts)], 1, "harness", phase),
            SamplingParams(max_new_tokens=1000),
            BatchMetadata(1, phase),
        )
        evaluation = {f"eval/{name}": value for name, value in generator.take_metrics("eval").items()}
        return trajectories, generator.take_metrics() | evaluation
    finally:
        await generator.close()
        await engine.close()


def solve(*, base_url: str, api_key: str, model: str, row: PromptRow, workspace: Workspace) -> None:
    """Answer in Python, with the row and the workspace."""
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        client.chat.completions.create(model=model, messages=row.prompt)  # type: ignore[arg-type]
    workspace.write_bytes("answer.txt", b"right")
    if row.prompt[0]["content"] == "fails":
        sys.exit(0)


def verify(*, row: PromptRow, workspace: Workspace) -> float:
    return float(workspace.read_bytes("answer.txt") == b"right")


def leftovers() -> list[str]:
    """Return this test's leases and folders, and the processes of workspaces that this process has started."""
    found = [path.name for path in lease_folder().iterdir()]
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{MARK}={PREFIX}".encode() in path.read_bytes():
                found.append(path.parent.name)
    return found
