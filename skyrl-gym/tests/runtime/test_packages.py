import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl_gym.core import Env
from skyrl_gym.runtime.packages import check_packages, find_fault

MODULE = """
import skyrl_gym

class Complete(skyrl_gym.Env):
    pass

class Incomplete(skyrl_gym.Env):
    @classmethod
    def check_packages(cls):
        import nowhere

def function(env_config, extras):
    return Complete()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_env.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_env"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("my_env:Complete", None),
        ("my_env:function", None),
        ("my_env:Incomplete", "ModuleNotFoundError: No module named 'nowhere'"),
        ("my_env:Missing", "entry point 'my_env:Missing': module my_env "),
        ("other_env:Complete", "No module named 'other_env'"),
    ],
)
def test_the_packages_of_an_interpreter(name: str, fault: str | None, module: str) -> None:
    found = find_fault(sys.executable, name)
    assert found is None if fault is None else fault in str(found)


@pytest.mark.parametrize(
    ("program", "fault"), [("exit 3", "it ended with exit status 3"), ("echo no skyrl_gym >&2; exit 1", "no skyrl_gym")]
)
def test_an_interpreter_that_fails(program: str, fault: str, tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o755)
    assert find_fault(str(script), "my_env:Complete") == fault
    assert find_fault(str(tmp_path / "none"), "my_env:Complete") == "it cannot be run: No such file or directory"


def test_packages_are_checked_only_once_a_class_names_them(module: str) -> None:
    class Named(Env[Any, Any]):
        pass

    check_packages(Named)
    check_packages(lambda **options: Named())


def test_the_command_finds_modules_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(MODULE)
    command = [sys.executable, "-m", "skyrl_gym.runtime.packages"]
    assert subprocess.run([*command, "my_env:Complete"], cwd=tmp_path, check=False).returncode == 0
    done = subprocess.run([*command, "my_env:Incomplete"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "nowhere" in done.stderr) == (1, True)
