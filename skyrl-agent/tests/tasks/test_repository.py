import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import yaml
from agent_kit.containers import DockerStandIn
from agent_kit.engines import ScriptedEngine, tool_call
from agent_kit.processes import find_pids, unique_sleep, workspace_threads
from agent_kit.trajectories import new_runner, play_row
from train_kit.processes import wait_until

from skyrl_agent.tasks.repository import LocalRepositoryTask, RepositoryTask, parse_test_files
from skyrl_agent.workspaces import WorkspaceError
from skyrl_train.errors import DataError
from skyrl_train.types import Trajectory

TESTS = """from calc import add

def test_add():
    assert add(2, 3) == 5
"""
FIX = tool_call("str_replace_editor", command="str_replace", path="calc.py", old_str="a - b", new_str="a + b")
SUBMIT = tool_call("submit")
PATCH = """diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""


@pytest.fixture
def row(tmp_path: Path) -> dict[str, Any]:
    """A repository whose addition subtracts."""
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "calc.py").write_text("def add(a, b):\n    return a - b\n", encoding="utf-8")
    return {
        "instance_id": "calc-1",
        "problem_statement": "add(2, 3) returns -1.",
        "repo_path": str(repository),
        "test_command": (f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {sys.executable} -m pytest -q -p no:cacheprovider tests"),
        "test_files": {"tests/test_calc.py": TESTS},
        "expected_output": "1 passed",
    }


async def solve(
    row: dict[str, Any], replies: Any, n_samples: int = 1, **settings: Any
) -> tuple[list[Trajectory], ScriptedEngine]:
    engine = ScriptedEngine(replies)
    tools = dict.fromkeys(("enable_bash_tool", "enable_editor", "enable_think", "enable_finish"), True)
    runner = new_runner(
        engine,
        "skyrl_agent.tasks.repository.LocalRepositoryTask",
        tools,
        agent_cls="skyrl_agent.agents.codeact.CodeActAgent",
        **{"n_retries": 0, "max_response_length": 100_000, **settings},
    )
    return await play_row(runner, row, n_samples), engine


def bash(command: str) -> str:
    return tool_call("execute_bash", command=command)


async def test_a_fix_is_rewarded(row: dict[str, Any]) -> None:
    look = tool_call("str_replace_editor", command="view", path="calc.py")
    replies = [look, FIX, bash("git diff --stat; ls"), tool_call("think", thought="done"), SUBMIT]
    (trajectory,), engine = await solve(row, replies)
    assert (trajectory.error, trajectory.stop_reason, trajectory.total_reward) == (None, "FINISH_TOOL", 1.0)
    assert trajectory.env_metrics == {"patch_is_empty": 0.0, "patch_applies": 1.0}
    prompts = engine.prompts()
    assert "add(2, 3) returns -1." in prompts[0]
    assert "execute_bash: Run a command" in prompts[0]
    assert "     2\t    return a - b" in prompts[1]
    assert "1 file changed" in prompts[3]
    assert "tests" not in prompts[3].rpartition("EXECUTION RESULT")[2]  # hidden


@pytest.mark.parametrize(
    ("replies", "stop_reason", "empty", "applies"),
    [
        ([SUBMIT], "FINISH_TOOL", 1.0, 0.0),
        ([bash("echo '# no fix' >>calc.py"), SUBMIT], "FINISH_TOOL", 0.0, 1.0),
        ([bash("rm -rf .git"), SUBMIT], "FINISH_TOOL", 1.0, 0.0),
        ([bash("true")] * 4, "stuck_in_a_loop", 1.0, 0.0),
    ],
    ids=["empty", "wrong", "damaged", "loop"],
)
async def test_what_is_no_fix_is_not_rewarded(
    row: dict[str, Any], replies: list[str], stop_reason: str, empty: float, applies: float
) -> None:
    (trajectory,), _ = await solve(row, replies)
    assert (trajectory.is_valid, trajectory.stop_reason, trajectory.total_reward) == (True, stop_reason, 0.0)
    assert trajectory.env_metrics == {"patch_is_empty": empty, "patch_applies": applies}


ATTACKS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("attacks.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("attack", ATTACKS)
async def test_attacks_on_the_grader_are_not_rewarded(
    row: dict[str, Any], attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalRepositoryTask, "test_timeout_s", 3.0 if attack == "hangs" else 60.0)
    (trajectory,), engine = await solve(row, [bash(ATTACKS[attack]), SUBMIT])
    assert "exit status 0" in engine.prompts()[1]
    assert trajectory.error is None
    assert trajectory.total_reward == 0.0


async def test_a_setup_that_fails_makes_the_trajectory_invalid(row: dict[str, Any], tmp_path: Path) -> None:
    second_fails = f"[ ! -e {tmp_path}/twice ]; s=$?; touch {tmp_path}/twice; exit $s"  # the grader's
    setups = {"error_initialization": "echo no network; exit 7", "error_evaluation": second_fails}
    for stop_reason, setup in setups.items():
        (trajectory,), _ = await solve({**row, "setup": setup}, [FIX, SUBMIT])
        assert not trajectory.is_valid
        assert trajectory.stop_reason == stop_reason
        assert stop_reason == "error_evaluation" or "no network" in str(trajectory.error)


async def test_a_call_that_hangs_ends_with_cmd_timeout(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_agent.tools.workspace.TOOL_TIMEOUT_SHARE", 100.0)
    sleep = unique_sleep()
    (trajectory,), _ = await solve(row, [FIX, bash(sleep), SUBMIT], tool_timeout=5.0)
    assert trajectory.stop_reason == "cmd_timeout"
    assert trajectory.total_reward == 1.0  # the patch counts; the mask keeps it from training
    assert not any(trajectory.loss_mask)
    assert not find_pids(sleep)


async def cancel_at(command: str, work: Coroutine[Any, Any, object], n_processes: int = 1) -> None:
    """Cancel work once these processes run; none of them may remain."""
    task = asyncio.create_task(work)
    await asyncio.to_thread(wait_until, lambda: len(find_pids(command)) == n_processes)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not find_pids(command)


async def test_cancellation_ends_commands_and_removes_folders(row: dict[str, Any], tmp_path: Path) -> None:
    daemon, sleep = unique_sleep(), unique_sleep()
    script = bash(f"pwd >>{tmp_path}/folders; setsid {daemon} & {sleep}")
    await cancel_at(sleep, solve(row, [script] * 2, n_samples=2), 2)
    assert not find_pids(daemon)
    folders = set((tmp_path / "folders").read_text().split())
    assert len(folders) == 2
    assert not any(Path(folder).exists() for folder in folders)


async def test_cancellation_during_the_start_ends_it(row: dict[str, Any]) -> None:
    sleep = unique_sleep()
    await cancel_at(sleep, LocalRepositoryTask.initialize_runtime({**row, "setup": sleep}))
    await cancel_at(sleep, solve({**row, "setup": sleep}, [SUBMIT]))
    wait_until(lambda: not workspace_threads())


@pytest.mark.parametrize(
    ("patch", "reward"), [(PATCH, 1.0), (PATCH.replace("a - b", "a * b"), 0.0), ("", 0.0), (None, 0.0), (7, 0.0)]
)
async def test_patches_are_graded_in_containers(
    row: dict[str, Any], docker: DockerStandIn, patch: Any, reward: float
) -> None:
    class Task(RepositoryTask):
        cwd = "/testbed"
        environment = {"executable": docker.executable}  # noqa: RUF012

    instance = {**row, "image": docker.image}
    if not reward:  # not even with tests that always pass
        instance["test_command"] = "echo 1 passed"
    Task.check_instance(instance, "")
    assert (await Task.evaluate_result(patch, instance))["reward"] == reward
    assert docker.containers() == []
    if reward:
        Path(docker.executable).unlink()
        with pytest.raises(WorkspaceError, match="did not start"):
            await Task.evaluate_result(patch, instance)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"problem_statement": " "}, "no text in problem_statement"),
        ({"test_command": None}, "no text in test_command"),
        ({"repo_path": None}, "neither repo_path nor setup"),
        ({"test_files": "{"}, "test_files is not JSON"),
        ({"test_files": "[1]"}, "must be a mapping"),
        ({"test_files": {"../x": ""}}, "relative paths in the repository"),
        ({"test_files": {"/etc/x": ""}}, "relative paths in the repository"),
        ({"test_files": {".git/hooks/x": ""}}, "relative paths in the repository"),
        ({"test_files": {"x": 1}}, "relative paths in the repository"),
    ],
)
def test_rows_that_cannot_be_graded_are_refused(row: dict[str, Any], change: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        LocalRepositoryTask.check_instance({**row, **change}, "")


def test_containers_need_an_image_and_may_clone_the_repository(row: dict[str, Any]) -> None:
    LocalRepositoryTask.check_instance({**row, "repo_path": None, "setup": "git clone …"}, "")
    with pytest.raises(DataError, match="no text in image"):
        RepositoryTask.check_instance(row, "")
    with pytest.raises(DataError, match="the instance is a str; it must be a row"):
        RepositoryTask.check_instance("calc-1", "")


def test_test_files_may_be_json_and_may_have_the_paths_of_other_rows() -> None:
    assert parse_test_files({"test_files": '{"a": "x"}'}) == {"a": "x"}
    assert parse_test_files({"test_files": {"a": "x", "b": None}}) == {"a": "x"}
    assert parse_test_files({}) == {}
