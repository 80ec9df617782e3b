"""Environments of verifiers with the package's own programs, as subprocesses. `uv` is replaced: it would download."""

import asyncio
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gym_kit
import pytest
import yaml
from agent_kit.runs import write_run
from agent_kit.scripted import HEADER, CharacterEngine, hermes_tokenizer, write_call
from typer.testing import CliRunner

from skyrl_agent.cli import app
from skyrl_agent.harness.agent import HarnessGenerator
from skyrl_agent.harness.config import HarnessConfig
from skyrl_agent.harness.verifiers import VerifiersAgent
from skyrl_gym.adapters.verifiers import rows
from skyrl_train.config import load_config
from skyrl_train.errors import DataError
from skyrl_train.generators.base import BatchMetadata, rollout_requests
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.types import DrawnPrompt, PromptRow, Trajectory

PACKAGES = Path(gym_kit.__file__).parent / "verifiers_packages"
UV = """#!/bin/sh
if [ "$1 $2" = "python find" ]; then echo {python}; fi
"""
SUBPROCESS: dict[str, Any] = {"agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "bash", "edit": False}}}
CHAT: dict[str, Any] = {"agent": {"harness": {"id": "null"}}}


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the kit's packages importable, and put a `uv` on the path that finds this Python."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uv").write_text(UV.format(python=sys.executable))
    (tmp_path / "bin" / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))
    monkeypatch.syspath_prepend(PACKAGES)


async def play(
    env_id: str,
    env: dict[str, Any],
    script: Callable[[str], str],
    *,
    n_rows: int = 1,
    settings: dict[str, Any] | None = None,
    **harness: Any,
) -> tuple[list[Trajectory], CharacterEngine]:
    """Play the first tasks of an environment."""
    engine = CharacterEngine(hermes_tokenizer(), script)
    cfg = load_config({"trainer": {"max_prompt_length": 1}, "generator": {"n_rollout_retries": 0}})
    agent = VerifiersAgent(HarnessConfig(harness="verifiers", **harness), settings)
    generator = HarnessGenerator(agent, cfg.generator, engine, hermes_tokenizer(), in_own_process=False)
    found = list(rows(env_id, env=env, n_rows=n_rows, is_chat=False))
    prompts = [PromptRow(str(i), row.pop("prompt"), "harness", row) for i, row in enumerate(found)]
    try:
        requests = rollout_requests([DrawnPrompt(i, row, i) for i, row in enumerate(prompts)], 1, "x", "train")
        sampling = SamplingParams(max_new_tokens=1000)
        return await generator.rollout(requests, sampling, BatchMetadata(1, "train")), engine
    finally:
        await generator.close()


@pytest.mark.parametrize("max_turns", [1, 2])
async def test_a_program_works_in_its_folder_and_the_task_reads_it(max_turns: int) -> None:
    """The program is verifiers' own bash agent: it calls the tool, and each task has a folder."""

    def script(prompt: str) -> str:
        word = "right" if "task 0" in prompt else "wrong"
        return "Done." if prompt.count(HEADER) > 1 else write_call("bash", command=f"echo {word} > answer.txt")

    trajectories, engine = await play("desk-v1", SUBPROCESS, script, n_rows=2, max_turns=max_turns)
    assert len(engine.exchanges) == 2 * max_turns
    assert [t.error for t in trajectories] == [None, None]
    assert [t.total_reward for t in trajectories] == [1.0, 0.0]
    assert [len(t.segments) for t in trajectories] == [1, 1]
    assert all(t.env_metrics["filed"] == t.total_reward for t in trajectories)
    n_sampled = sum(len(result.token_ids) for _, result in engine.exchanges)
    assert sum(sum(segment.loss_mask) for t in trajectories for segment in t.segments) == n_sampled


async def test_tools_of_the_task() -> None:
    def script(prompt: str) -> str:
        return write_call("library_look_up", word="it") if prompt.count(HEADER) < 3 else "ANSWER: 42"

    (trajectory,), engine = await play("library-v1", CHAT, script)
    assert (trajectory.error, trajectory.total_reward, trajectory.env_metrics["lookups"]) == (None, 1.0, 2.0)
    assert len(engine.exchanges) == 3


async def test_only_the_chosen_agent_is_trained() -> None:
    def script(prompt: str) -> str:
        return "yes" if "Is it right?" in prompt else "right"

    agents = {"solver": CHAT["agent"], "checker": CHAT["agent"]}
    (trajectory,), engine = await play("pair-v1", agents, script, settings={"trained": "solver"})
    assert (trajectory.error, trajectory.total_reward) == (None, 1.0)
    assert trajectory.env_metrics["agents"] == 2
    (segment,) = trajectory.segments
    assert hermes_tokenizer().decode(segment.response_ids).startswith("right")
    assert len(engine.exchanges) == 2
    twice = {**agents, "n_attempts": 2}
    (trajectory,), _ = await play("pair-v1", twice, script, settings={"trained": "solver"})
    assert trajectory.stop_reason == "agent_error"
    assert "ran solver 2 times" in str(trajectory.error)


@pytest.mark.parametrize(
    ("env_id", "args", "env", "harness", "reason", "message"),
    [
        ("arithmetic-v1", {"task": {"fault": "raise"}}, CHAT, {}, "agent_error", "the judge is asleep"),
        ("arithmetic-v1", {"task": {"fault": "nan"}}, CHAT, {}, "reward_unknown", "is nan"),
        ("desk-v1", {}, SUBPROCESS, {"agent_timeout": 1.0}, "agent_timeout", "desk"),
    ],
)
async def test_a_failed_episode_is_invalid(
    env_id: str, args: Any, env: Any, harness: dict[str, Any], reason: str, message: str
) -> None:
    def script(prompt: str) -> str:
        return write_call("bash", command="sleep 30") if "answer.txt" in prompt else "4"

    (trajectory,), _ = await play(env_id, env, script, settings={"args": args}, **harness)
    assert trajectory.stop_reason == reason
    assert re.search(message, str(trajectory.error))


@pytest.mark.parametrize(
    ("env_id", "env", "trained", "message"),
    [
        ("desk-v1", {}, "", "agent.runtime is unset, and bash executes the model's commands"),
        (
            "desk-v1",
            {"agent": {"runtime": {"type": "docker"}, "model": "gpt"}},
            "",
            "it has no model, client or retries",
        ),
        ("pair-v1", {}, "", "trained=<unset>: pair_v1 has the agents solver, checker"),
        (
            "desk-v1",
            {**SUBPROCESS, "interception": {"type": "elastic"}},
            "",
            "interception.type=elastic: set it to server",
        ),
        ("desk-v1", {**SUBPROCESS, "retries": {"max_retries": 1}}, "", "set generator.n_rollout_retries"),
    ],
)
async def test_settings_that_cannot_be_honoured(env_id: str, env: Any, trained: str, message: str) -> None:
    agent = VerifiersAgent(HarnessConfig(harness="verifiers"), {"env": env, "trained": trained})
    row = next(iter(rows(env_id, is_chat=False)))
    with pytest.raises(DataError, match=re.escape(message)):
        agent.check_row(PromptRow("0", row.pop("prompt"), "harness", row))
    await agent.close()


def test_the_command_trains(tmp_path: Path) -> None:
    harness = tmp_path / "verifiers.yaml"
    harness.write_text(yaml.safe_dump({"harness": "verifiers", "max_turns": 2}))
    overrides = [
        *write_run(tmp_path),
        "data.train_data=verifiers:arithmetic-v1",
        "data.val_data=[]",
        "environment.skyrl_gym.verifiers.env.agent.harness.id='null'",
        "environment.skyrl_gym.verifiers.args.n_tasks=1",
        "trainer.train_batch_size=1",
        "trainer.policy_mini_batch_size=1",
        "trainer.epochs=2",
        "generator.n_samples_per_prompt=2",
        "generator.sampling_params.max_generate_length=8",
    ]
    result = CliRunner().invoke(app, ["train", str(harness), *overrides])
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "outputs/agents/run/metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "policy/grad_norm" in row]
    assert [row["generate/n_invalid"] for row in steps] == [0.0, 0.0]
    assert all("environment/verifiers/correct" in row for row in steps)


def test_settings_of_other_harnesses_are_refused(tmp_path: Path) -> None:
    harness = tmp_path / "verifiers.yaml"
    harness.write_text(yaml.safe_dump({"harness": "verifiers", "workspace": {"kind": "docker"}}))
    result = CliRunner().invoke(app, ["train", str(harness), *write_run(tmp_path)])
    assert "workspace: environments of verifiers have their own programs" in result.output
    result = CliRunner().invoke(app, ["train", "pi", *write_run(tmp_path), "data.train_data=verifiers:arithmetic-v1"])
    assert "which need skyrl-agent train verifiers" in result.output


async def test_cancelled_episodes_leave_nothing() -> None:
    started = asyncio.Event()

    def script(prompt: str) -> str:
        started.set()
        return write_call("bash", command="sleep 1000")

    playing = asyncio.create_task(play("desk-v1", SUBPROCESS, script))
    await started.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    left = [pid for pid in os.listdir("/proc") if pid.isdigit() and b"sleep\x001000" in _command_line(pid)]
    assert left == []


def _command_line(pid: str) -> bytes:
    try:
        return Path("/proc", pid, "cmdline").read_bytes()
    except OSError:  # it has ended
        return b""
