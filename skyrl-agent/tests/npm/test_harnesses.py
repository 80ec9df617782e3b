"""Unmodified coding agents as harnesses: they fix a file in isolation, and their conversation is trained on."""

import os
import shutil
from pathlib import Path

import pytest
from agent_kit.harnesses import play
from agent_kit.scripted import take_turns, write_call

from skyrl_agent.harness.config import HarnessConfig

pytestmark = pytest.mark.nightly

PROGRAMS = Path(os.environ.get("TEST_AGENTS", Path(__file__).parents[3] / ".venv-agents"))
NODE = "node_modules/.bin"
FOLDERS = {"mini-swe-agent": "bin", "pi": NODE, "opencode": NODE, "codex": NODE, "claude-code": NODE}
COMMANDS = ("sed -i 's/a - b/a + b/' add.py", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


def write_script(name: str) -> list[str]:
    """Return the model's replies, with calls of the agent's shell."""
    if name == "codex":
        return [*(write_call("exec_command", cmd=command) for command in COMMANDS), "Done."]
    tool = "Bash" if name == "claude-code" else "bash"
    return [*(write_call(tool, command=command, description="Run") for command in COMMANDS), "Done."]


@pytest.mark.parametrize("name", FOLDERS)
async def test_an_agent_fixes_a_file_in_isolation(name: str) -> None:
    folder = PROGRAMS / FOLDERS[name]
    node = shutil.which("node") or "/usr/bin/node"
    cfg = HarnessConfig.model_validate(
        {"harness": name, "workspace": {"path": (str(folder), str(Path(node).parent))}, "agent_timeout": 200}
    )
    row = {
        "task": "Fix add.py.",
        "files": {"add.py": "def add(a, b):\n    return a - b\n"},
        "verifier": "python3 -c 'from add import add; assert add(2, 3) == 5'",
    }
    (t,), metrics = await play(cfg, [row], take_turns(write_script(name)))
    assert t.error is None
    assert t.total_reward == 1.0
    assert sum(t.loss_mask) > 0
    assert metrics["agent/no_tool_calls"] == 0.0
