"""The program that writes the random attempts of `--tiny`."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / "train" / "tools" / "write_attempts.py"


@pytest.mark.parametrize(
    ("env", "config", "message"),
    [("openspiel", '{"game_types": ["hexx"]}', "did you mean 'hex'?"), ("openspie", "{}", "Did you mean 'openspiel'?")],
)
def test_a_wrong_task_is_an_error_of_one_line(env: str, config: str, message: str, tmp_path: Path) -> None:
    output = tmp_path / "attempts.jsonl"
    program = [sys.executable, str(PROGRAM), "--env", env, "--adapter-config", config, "--output", str(output)]
    result = subprocess.run(program, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert message in result.stderr
    assert not output.exists()
