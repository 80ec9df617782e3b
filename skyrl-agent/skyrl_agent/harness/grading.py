"""Grade a workspace after its agent has ended."""

from __future__ import annotations

import inspect
import json
import math
import shlex
from collections.abc import Mapping
from typing import Any

from skyrl_agent.agent_generator import AgentResult, NoReward
from skyrl_agent.harness.config import is_function
from skyrl_agent.harness.task import HarnessTask
from skyrl_agent.loading import load_function
from skyrl_agent.workspaces import Workspace, WorkspaceError, quote_path
from skyrl_gym.runtime.text import describe_error
from skyrl_train.types import PromptRow

REWARDS = "/logs/verifier"
MAX_REPORT_BYTES = 4000
READ_TIMEOUT_S = 60.0
READ_REWARDS = f"""cd {REWARDS} || exit
for name in reward.json reward.txt; do if [ -f $name ]; then echo $name; cat $name; exit; fi; done"""
CANNOT_RUN = 126  # exit statuses from here on: the program cannot be run, or a signal ended it


def grade(workspace: Workspace, task: HarnessTask, row: PromptRow) -> AgentResult:
    """Run the verifier in the workspace and return the reward.

    The verifier writes a number to /logs/verifier/reward.txt, or a number or named numbers to reward.json, with the
    total as `reward`. Without a file, a row's command gives 1 for status 0, and 0 otherwise.

    Raises:
        NoReward: the verifier crashed, took too long, or gave no reward.
        WorkspaceError: the workspace does not respond.
    """
    if is_function(task.verifier):
        return _call_verifier(workspace, task, row)
    has_reward_files = workspace.socket is not None
    # The agent may have left anything here: links to /dev/null or to rewards, in folders that cannot be changed.
    replaced = " ".join(map(quote_path, [*task.verifier_files, "/tests"] if task.tests else task.verifier_files))
    workspace.run(f"rm -rf -- {replaced}")
    if has_reward_files:
        workspace.run(f"mkdir -p /logs && chmod -R u+rwX /logs && rm -rf {REWARDS} && mkdir {REWARDS}")
    for path, text in task.verifier_files.items():
        workspace.write_bytes(path, text.encode())
    if task.tests is not None:
        workspace.upload(task.tests, "/tests")
    setup = "export HOME=$(mktemp -d); "  # the agent's may hold startup files
    setup += "".join(f"export {name}={shlex.quote(value)}; " for name, value in task.verifier_env.items())
    result = workspace.execute(setup + task.verifier, task.verifier_timeout, MAX_REPORT_BYTES)
    report = result.output.strip()[-1000:]
    if result.status is None:
        raise NoReward("verifier_timeout", f"the verifier took longer than {task.verifier_timeout:g} s: {report}")
    rewards = _read_rewards(workspace) if has_reward_files else None
    if rewards is not None:
        total = rewards.pop("reward")
        return AgentResult(total, components=rewards)
    if task.tests is not None or not 0 <= result.status < CANNOT_RUN:
        raise NoReward("verifier_error", f"the verifier ended with status {result.status} and no reward: {report}")
    return AgentResult(float(result.status == 0))


def _call_verifier(workspace: Workspace, task: HarnessTask, row: PromptRow) -> AgentResult:
    """Call the verifier function with the row and the workspace."""
    try:
        returned = load_function(task.verifier)(row=row, workspace=workspace)
        if inspect.isawaitable(returned):
            raise TypeError("it is a coroutine function; write a plain one")
    except WorkspaceError:
        raise
    except (Exception, SystemExit) as error:  # the boundary of user code
        raise NoReward("verifier_error", f"the verifier raised {describe_error(error)}") from error
    return returned if isinstance(returned, AgentResult) else AgentResult(returned)


def _read_rewards(workspace: Workspace) -> dict[str, float] | None:
    """Return the rewards in the verifier's file, with the total as `reward`, or None without a file."""
    found = workspace.execute(READ_REWARDS, READ_TIMEOUT_S, MAX_REPORT_BYTES)
    name, _, text = found.output.partition("\n")
    if found.status != 0 or not name:
        return None
    try:
        value: Any = json.loads(text) if name == "reward.json" else float(text)
    except ValueError as error:
        raise NoReward("verifier_error", f"{name} has {text[:200]!r}: {error}") from error
    values = dict(value) if isinstance(value, Mapping) else {"reward": value}
    if len(values) == 1:
        values = {"reward": next(iter(values.values()))}
    if "reward" not in values or not all(
        isinstance(one, int | float) and math.isfinite(one) for one in values.values()
    ):
        raise NoReward("verifier_error", f"{name} has {text[:200]!r}; write numbers, of which reward is the total")
    return {key: float(one) for key, one in values.items()}
