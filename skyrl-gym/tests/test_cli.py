import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from gym_kit.messages import user

from skyrl_gym.cli import main
from skyrl_gym.envs import BUILT_IN, register

WRONG: dict[str, str] = yaml.safe_load(Path(__file__).with_name("commands.yaml").read_text(encoding="utf-8"))
ROW = {"prompt": user("6 * 7?"), "reward_spec": {"ground_truth": "42"}}
MY_MODULE = """
from skyrl_gym.envs.base_text_env import BaseTextEnv

class MyEnv(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()
        self.answer = extras["reward_spec"]["ground_truth"]

    def step(self, action):
        return {"observations": [], "reward": float(action.split()[0] == self.answer), "done": True, "metadata": {}}
"""


HANGING_MODULE = """
import pathlib, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from skyrl_gym.envs.base_text_env import BaseTextEnv

class ProgramEnv(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()

    def step(self, action):
        program = subprocess.Popen(["sleep", "600"])
        pathlib.Path("pid").write_text(str(program.pid))
        program.wait()
        pathlib.Path("returned").touch()

class PoolEnv(ProgramEnv):
    def step(self, action):
        with ThreadPoolExecutor() as pool:
            return pool.submit(super().step, action).result(timeout=0.1)

class BusyEnv(ProgramEnv):
    def step(self, action):
        while True:
            pass
"""


DRAWING_MODULE = """
from PIL import Image
from skyrl_gym.envs.base_text_env import BaseTextEnv

class DrawingEnv(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()
        self.max_turns = extras["max_turns"]

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (8, 4))}]}], {}

    def step(self, action):
        self.turns += 1
        done = self.turns >= self.max_turns
        parts = [{"type": "text", "text": "Look:"}, {"type": "image", "image": Image.new("RGB", (6, 6))}]
        observations = [] if done else [{"role": "user", "content": parts}]
        return {"observations": observations, "reward": 0.0, "done": done, "metadata": {}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "my_module.py").write_text(MY_MODULE)
    (tmp_path / "hanging.py").write_text(HANGING_MODULE)
    pq.write_table(pa.Table.from_pylist([ROW | {"max_turns": None}]), tmp_path / "rows.parquet")
    return tmp_path


def run(folder: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("skyrl-gym")), *arguments]
    environment = os.environ | {"PYTHONUTF8": "1"}
    return subprocess.run(
        command, cwd=folder, input=stdin, capture_output=True, text=True, timeout=60, check=False, env=environment
    )


def test_check_reports_violations(folder: Path) -> None:
    result = run(folder, "check", "my_module:MyEnv", "--data", "rows.jsonl")
    assert result.returncode == 1
    message = "step() raised IndexError: list index out of range (my_module.py, line 10)"
    assert f"✗ accepts any reply\n    {message}" in result.stdout
    assert "✗ ends by its last turn\n    as above\n" in result.stdout  # a repeated detail is abbreviated
    assert result.stdout.endswith("suggestions\n")
    without_row = run(folder, "check", "my_module:MyEnv").stdout
    assert "KeyError: 'reward_spec' (my_module.py, line 7)\n    The environment got an empty row; pass" in without_row


def test_check_counts_images(folder: Path) -> None:
    (folder / "drawing.py").write_text(DRAWING_MODULE)
    (folder / "two_turns.jsonl").write_text(json.dumps(ROW | {"max_turns": 2}) + "\n")
    result = run(folder, "check", "drawing:DrawingEnv", "--data", "two_turns.jsonl")
    assert (result.returncode, result.stderr) == (0, "")
    assert "\nImages: 8 of 8 x 4 pixels, 8 of 6 x 6 pixels\n" in result.stdout  # one of each in an episode per reply
    assert result.stdout.endswith("drawing:DrawingEnv: 11 passed, 0 failed, 0 suggestions\n")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("ProgramEnv", "in step: program.wait()"),
        ("PoolEnv", "in step: with ThreadPoolExecutor() as pool:"),
        ("BusyEnv", "in step: "),
    ],
)
def test_check_of_a_hanging_environment_ends_with_its_processes(folder: Path, name: str, line: str) -> None:
    result = run(folder, "check", f"hanging:{name}", "--timeout", "0.5")
    assert result.returncode == 1
    message = "step() did not return within 0.5 s, for the reply: empty text. It hangs in"
    assert f"✗ accepts any reply\n    {message}\n      hanging.py, line " in result.stdout
    assert line in result.stdout
    assert result.stdout.endswith(f"hanging:{name}: 1 passed, 1 failed, 0 suggestions, 9 not checked\n")
    assert "Traceback" not in result.stderr
    if (folder / "pid").exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int((folder / "pid").read_text()), 0)


def test_check_play_and_list(folder: Path) -> None:
    result = run(folder, "check", "gsm8k", "--data", "rows.parquet", "--set", "grader=flexible", "--timeout", "30")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith("gsm8k: 11 passed, 0 failed, 0 suggestions\n")
    result = run(folder, "play", "my_module:MyEnv", "--data", "rows.jsonl", stdin="42\n.\n")
    assert result.returncode == 0
    assert "Episode finished: reward 1.0 in 1 turns" in result.stdout
    assert "gsm8k              skyrl_gym.envs.gsm8k.env:GSM8kEnv\n" in run(folder, "list").stdout


@pytest.mark.parametrize(("arguments", "message"), WRONG.items())
def test_wrong_command_is_explained(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    register("gsm8k", BUILT_IN["gsm8k"])
    try:
        status: object = main(arguments.split())
    except SystemExit as exit:  # of argparse
        status = exit.code
    sys.modules.pop("my_module", None)
    assert status == 2
    assert message in capsys.readouterr().err
