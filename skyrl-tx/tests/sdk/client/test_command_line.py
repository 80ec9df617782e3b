import json
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import tinker
from differences import KEY
from passes import Server

Command = Callable[..., dict]


@pytest.fixture
def command(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process and returns its output."""
    (installed,) = entry_points(group="console_scripts", name="tinker")
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", KEY)

    def run(*arguments: str) -> dict:
        monkeypatch.setattr(sys, "argv", ["tinker", "--format", "json", *arguments])
        with pytest.raises(SystemExit) as ended:
            installed.load()()
        printed = capsys.readouterr()
        assert ended.value.code in (0, None), printed
        return json.loads(printed.out) if printed.out.startswith("{") else {}

    return run


@pytest.fixture
def path(training: tinker.TrainingClient) -> str:
    return training.save_state("shown").result().path


def test_lists(server: Server, training: tinker.TrainingClient, path: str, command: Command) -> None:
    """`tinker run` and `tinker checkpoint` list and describe."""
    runs = command("run", "list", "--limit=1000")["runs"]
    assert training.model_id in [one["training_run_id"] for one in runs]
    assert command("run", "info", training.model_id)["base_model"] == server.base_model
    (listed,) = command("checkpoint", "list", "--run-id", training.model_id)["checkpoints"]
    assert listed["tinker_path"] == path
    assert command("checkpoint", "info", path)["checkpoint_id"] == "weights/shown"


@pytest.mark.xfail(tinker.__version__ == "0.16.1", reason="its list() is the command `list`", strict=True)
def test_deleting(training: tinker.TrainingClient, path: str, command: Command) -> None:
    """`tinker checkpoint` deletes."""
    command("checkpoint", "delete", "-y", path)
    assert command("checkpoint", "list", "--run-id", training.model_id)["checkpoints"] == []


def test_download(path: str, tmp_path: Path, command: Command) -> None:
    """`tinker checkpoint download` downloads a PEFT adapter."""
    command("checkpoint", "download", path, "--output", str(tmp_path))
    (folder,) = tmp_path.iterdir()
    assert (folder / "adapter_model.safetensors").stat().st_size > 1000
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
