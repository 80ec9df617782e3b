"""Unmodified coding agents work through the endpoint: they read a file, edit it and run its test.

A scripted engine writes the calls. The agents are in `.venv-agents` (`make test-agents`).
"""

import asyncio
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agent_kit.endpoints import MODEL, EndpointStage
from agent_kit.scripted import CharacterEngine, hermes_tokenizer, take_turns, write_call
from train_kit.messages import user

from skyrl_train.types import PromptRow

pytestmark = pytest.mark.nightly

PROGRAMS = Path(os.environ.get("TEST_AGENTS", Path(__file__).parents[3] / ".venv-agents"))
TASK = "Fix add.py so that test_add.py passes."
TIMEOUT_S = 200
ANSWER = "<think>\nIt printed passed.\n</think>\n\nThe test passes."


@dataclass(frozen=True)
class CodingAgent:
    """A program that solves the task with its own tools."""

    script: Callable[[Path], list[str]]  # replies of the model for a work folder
    command: Callable[[str, Path, Path], list[str]]  # for a URL, a work folder and a home; writes its configuration
    environment: Callable[[str, Path], dict[str, str]]
    n_titles: int = 0  # requests beside the conversation


def pi_script(work: Path) -> list[str]:
    edits = [{"oldText": "a - b", "newText": "a + b"}]
    return [
        "<think>\nRead it.\n</think>\n\n" + write_call("read", path="add.py", limit=100.0),
        "I fix it.\n" + write_call("edit", path="add.py", edits=edits),
        write_call("bash", command="python3 test_add.py", timeout=30),
        ANSWER,
    ]


def pi_command(url: str, work: Path, home: Path, api: str = "openai-completions") -> list[str]:
    cost = dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0)
    limits = {"contextWindow": 100_000, "maxTokens": 16_384}
    model = {"id": MODEL, "name": MODEL, "reasoning": False, "input": ["text"], "cost": cost, **limits}
    provider = {"baseUrl": url, "api": api, "apiKey": "x", "models": [model]}
    (home / "models.json").write_text(json.dumps({"providers": {"skyrl": provider}}))
    program = str(PROGRAMS / "node_modules/.bin/pi")
    return [program, "-p", "--no-session", "--provider", "skyrl", "--model", MODEL, TASK]


def opencode_script(work: Path) -> list[str]:
    path = str(work / "add.py")
    run = write_call("bash", command="python3 test_add.py", description="Run the test")
    return [
        "<think>\nRead it.\n</think>\n\n" + write_call("read", filePath=path),
        "I fix it.\n" + write_call("edit", filePath=path, oldString="a - b", newString="a + b"),
        run + "\n" + write_call("bash", command="ls", description="List the files"),
        ANSWER,
    ]


def opencode_command(url: str, work: Path, home: Path) -> list[str]:
    models = {MODEL: {"name": MODEL, "limit": {"context": 100_000, "output": 32_000}}}
    options = {"baseURL": url, "apiKey": "x"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "SkyRL", "options": options, "models": models}
    settings = {"model": f"skyrl/{MODEL}", "provider": {"skyrl": provider}}
    (work / "opencode.json").write_text(json.dumps(settings))
    return [str(PROGRAMS / "node_modules/.bin/opencode"), "run", TASK]


def codex_script(work: Path) -> list[str]:
    return [
        "<think>\nRead it.\n</think>\n\n" + write_call("exec_command", cmd="cat add.py"),
        "I fix it.\n" + write_call("exec_command", cmd="sed -i 's/a - b/a + b/' add.py"),
        write_call("exec_command", cmd="python3 test_add.py") + "\n" + write_call("exec_command", cmd="ls"),
        ANSWER,
    ]


def codex_command(url: str, work: Path, home: Path) -> list[str]:
    provider = {"name": "SkyRL", "base_url": url, "env_key": "KEY", "wire_api": "responses"}
    settings = [f"{name} = {json.dumps(value)}" for name, value in provider.items()]
    lines = [f'model = "{MODEL}"', 'model_provider = "skyrl"', "[model_providers.skyrl]", *settings]
    (home / "config.toml").write_text("\n".join(lines))
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [str(PROGRAMS / "node_modules/.bin/codex"), "exec", *options, TASK]


def claude_script(work: Path) -> list[str]:
    path = str(work / "add.py")
    return [
        "<think>\nRead it.\n</think>\n\n" + write_call("Read", file_path=path, limit=100.0),
        "I fix it.\n" + write_call("Edit", file_path=path, old_string="a - b", new_string="a + b"),
        write_call("Bash", command="python3 test_add.py") + "\n" + write_call("Bash", command="ls"),
        ANSWER,
    ]


def claude_command(url: str, work: Path, home: Path) -> list[str]:
    program = str(PROGRAMS / "node_modules/.bin/claude")
    return [program, "--bare", "-p", TASK, "--model", MODEL, "--dangerously-skip-permissions"]


def claude_environment(url: str, home: Path) -> dict[str, str]:
    offline = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "IS_SANDBOX": "1"}
    return {**offline, "ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": "x"}


def mini_script(work: Path) -> list[str]:
    return [
        write_call("bash", command="cat add.py"),
        "I fix it.\n" + write_call("bash", command="sed -i 's/a - b/a + b/' add.py"),
        write_call("bash", command="python3 test_add.py") + "\n" + write_call("bash", command="ls"),
        "Done.\n" + write_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]


def mini_command(url: str, work: Path, home: Path) -> list[str]:
    arguments = ["-m", f"openai/{MODEL}", "-y", "--exit-immediately", "-t", TASK, "-o", str(home / "out.json")]
    return [str(PROGRAMS / "bin/mini"), *arguments]


def mini_environment(url: str, home: Path) -> dict[str, str]:
    settings = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    return {**settings, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "x", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


OFFLINE = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}


def pi_environment(url: str, home: Path) -> dict[str, str]:
    return {"PI_CODING_AGENT_DIR": str(home), "PI_OFFLINE": "1"}


def pi_with(api: str) -> CodingAgent:
    def command(url: str, work: Path, home: Path) -> list[str]:
        return pi_command(url.removesuffix("/v1") if api.startswith("anthropic") else url, work, home, api)

    return CodingAgent(pi_script, command, pi_environment)


AGENTS = {
    "pi": CodingAgent(pi_script, pi_command, pi_environment),
    "pi with responses": pi_with("openai-responses"),
    "pi with messages": pi_with("anthropic-messages"),
    "codex": CodingAgent(codex_script, codex_command, lambda url, home: {"CODEX_HOME": str(home), "KEY": "x"}),
    "claude-code": CodingAgent(claude_script, claude_command, claude_environment),
    "opencode": CodingAgent(opencode_script, opencode_command, lambda url, home: OFFLINE, n_titles=1),
    "mini-swe-agent": CodingAgent(mini_script, mini_command, mini_environment),
}


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_edits_a_file_and_its_conversation_is_one_row_of_sampled_tokens(
    name: str, tmp_path: Path
) -> None:
    agent, tokenizer = AGENTS[name], hermes_tokenizer()
    work, home = tmp_path / "work", tmp_path / "home"
    for folder in (work, home):
        folder.mkdir()
    (work / "add.py").write_text("def add(a, b):\n    return a - b\n")
    (work / "test_add.py").write_text("from add import add\n\nassert add(2, 3) == 5\nprint('passed')\n")
    replies = agent.script(work)
    async with EndpointStage(CharacterEngine(tokenizer, take_turns(replies)), tokenizer) as stage:
        session = await stage.session(max_new_tokens=4096)
        url = stage.endpoint.url(session)
        command = agent.command(url, work, home)
        own = {"HOME": str(home), "PWD": str(work), "NO_COLOR": "1", **agent.environment(url, home)}
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=work,
            env=os.environ | own,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        await stage.endpoint.end_session(session)
        recording, engine = session.recording, stage.engine
    assert process.returncode == 0, output.decode()
    assert (work / "add.py").read_text() == "def add(a, b):\n    return a + b\n"
    assert session.counts == {"with_tools": 4, "with_calls": 3 + (name == "mini-swe-agent"), "malformed": 0}
    assert recording.exclude_side_rows() == agent.n_titles
    recording.finish()
    *titles, row = recording.rows
    assert [sum(title.loss_mask) for title in titles] == [0] * agent.n_titles
    turns = recording.turns[agent.n_titles :]
    results = [result for request, result in engine.exchanges if tokenizer.decode(result.token_ids)[:7] != "A title"]
    sampled = [row.response_ids[turn.start : turn.end] for turn in turns]
    assert sampled == [engine.sample(reply) for reply in replies] == [result.token_ids for result in results]
    assert [row.logprobs[turn.start : turn.end] for turn in turns] == [result.logprobs for result in results]
    assert sum(row.loss_mask) == sum(map(len, sampled))
    text = str(tokenizer.decode(row.token_ids))
    assert all(f"<|im_start|>assistant\n{reply}<|im_end|>" in text for reply in replies)
    assert "passed" in text.partition(replies[-1])[0]


async def test_the_agent_of_the_page_fixes_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs/guides/endpoint.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import os\n.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    monkeypatch.setenv("PATH", f"{PROGRAMS / 'bin'}:{os.environ['PATH']}")
    files = {"add.py": "a - b", "test.py": "assert open('add.py').read() == 'a + b'"}
    row = PromptRow("0", [user(TASK)], None, {"files": files})
    script = take_turns(mini_script(Path()))
    async with EndpointStage(CharacterEngine(hermes_tokenizer(), script), hermes_tokenizer()) as stage:
        for expected in (1.0, 0.0):
            session = await stage.session(max_new_tokens=4096)
            options = {
                "base_url": stage.endpoint.url(session),
                "api_key": "x",
                "model": MODEL,
                "session_id": session.id,
            }
            assert await asyncio.to_thread(names["fix_bug"], row=row, **options) == expected
            await stage.endpoint.end_session(session)
            files["add.py"] = "b - a"  # the script does not fix this
