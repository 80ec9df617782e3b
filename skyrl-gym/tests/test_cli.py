from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROW = {"prompt": [{"role": "user", "content": "6 * 7?"}], "reward_spec": {"ground_truth": "42"}}
MINE = """
from skyrl_gym.envs.base_text_env import BaseTextEnv

class MyEnv(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()
        self.answer = extras["reward_spec"]["ground_truth"]

    def step(self, action):
        return {"observations": [], "reward": float(action.split()[0] == self.answer), "done": True, "metadata": {}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "rows.json").write_text(json.dumps([ROW]))
    (tmp_path / "wrong.json").write_text("{}")
    (tmp_path / "number.jsonl").write_text("1\n")
    (tmp_path / "my_module.py").write_text(MINE)
    return tmp_path


def run(folder: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("skyrl-gym")), *arguments]
    environment = os.environ | {"PYTHONUTF8": "1"}
    return subprocess.run(
        command, cwd=folder, input=stdin, capture_output=True, text=True, timeout=60, check=False, env=environment
    )


def test_a_check_names_what_is_broken(folder: Path) -> None:
    result = run(folder, "check", "my_module:MyEnv", "--data", "rows.jsonl")
    assert result.returncode == 1
    assert (
        "✗ takes any reply\n    step() raised IndexError: list index out of range (my_module.py, line 10)"
        in result.stdout
    )
    assert result.stdout.endswith("to consider\n")


def test_a_check_of_ours(folder: Path) -> None:
    result = run(folder, "check", "gsm8k", "--data", "rows.json", "--set", "grader=flexible")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith("gsm8k: 11 kept, 0 broken, 0 to consider\n")


def test_playing(folder: Path) -> None:
    result = run(folder, "play", "my_module:MyEnv", "--data", "rows.jsonl", stdin="42\n.\n")
    assert result.returncode == 0
    assert "The episode is over: 1.0 in 1 turns" in result.stdout


def test_the_list(folder: Path) -> None:
    assert "gsm8k              skyrl_gym.envs.gsm8k.env:GSM8kEnv\n" in run(folder, "list").stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("check", "gsm9k"), "Did you mean 'gsm8k'"),
        (("check", "my_module:MyEnw"), "Did you mean 'MyEnv'"),
        (("check", "nowhere:Env"), "No module named 'nowhere'"),
        (("check", "gsm8k", "--data", "nothing.jsonl"), "nothing.jsonl"),
        (("check", "gsm8k", "--data", "rows.parquet"), "a file of .json or .jsonl is read here"),
        (("check", "gsm8k", "--data", "rows.jsonl", "--row", "3"), "--row 3: rows.jsonl has rows 0 to 0"),
        (("check", "gsm8k", "--data", "wrong.json"), "a .json file holds a list of rows"),
        (("check", "gsm8k", "--data", "number.jsonl"), "row 0 of number.jsonl is '1'; a row is an object"),
        (("play", "gsm8k"), "reward_spec field is required"),
        (("check", "gsm8k", "--set", "grader"), "--set grader: write key=value"),
        ((), "usage: skyrl-gym"),
    ],
)
def test_a_wrong_command_is_explained(folder: Path, arguments: tuple[str, ...], told: str) -> None:
    result = run(folder, *arguments)
    assert result.returncode == 2
    assert told in result.stderr
    assert "Traceback" not in result.stderr
