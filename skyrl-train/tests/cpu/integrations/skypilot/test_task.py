import subprocess
from pathlib import Path

import pytest

from integrations.skypilot.task import check_task
from skyrl_train.entrypoints.doctor import CheckResult


def examine(task: Path) -> dict[str, CheckResult]:
    return {result.name: result for result in check_task(task)}


def test_the_ref_of_a_task_must_be_the_pushed_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_API_KEY", "key")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    remote, local = tmp_path / "remote.git", tmp_path / "local"

    def git(*arguments: str, cwd: Path = local) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *arguments], cwd=cwd, check=True, capture_output=True)

    git("init", "--bare", str(remote), cwd=tmp_path)
    git("init", "-b", "main", str(local), cwd=tmp_path)
    task = local / "task.yaml"
    variables = "envs:\n  FLEET_API_KEY:\n  WANDB_API_KEY: null\n  ENV_KEYS: ''\n  MODALITY: tool_use\n"
    task.write_text(f"workdir:\n  url: {remote}\n  ref: main\n{variables}")
    git("add", ".")
    git("commit", "-m", "one")
    assert examine(task)["workdir.ref"].text == f"{remote} has no branch or tag main"
    git("push", str(remote), "main")
    assert examine(task)["workdir.ref"].status == "ok"
    git("commit", "--allow-empty", "-m", "two")
    stale = examine(task)["workdir.ref"]
    assert (stale.status, f"git push {remote} main" in stale.fix, "--git-url" in stale.fix) == ("failed", True, True)
    assert examine(task)["task"].text == f"{task}: WANDB_API_KEY must have a value"
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert "task" not in examine(task)


TRAIN = Path(__file__).parents[4]
TASK_FILES = [*sorted(TRAIN.glob("tasks/*.yaml")), TRAIN / "examples/cluster/skypilot.yaml"]


@pytest.mark.parametrize("path", TASK_FILES, ids=lambda path: path.stem)
def test_a_task_file_of_this_repository_needs_nothing_but_keys(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLEET_API_KEY", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "key")
    assert [result for result in check_task(path) if result.name == "task"] == []
