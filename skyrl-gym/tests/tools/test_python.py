from pathlib import Path

import pytest
import yaml

from skyrl_gym.tools import PythonCodeExecutorToolGroup

PROGRAMS = yaml.safe_load(Path(__file__).with_name("python.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("code", "output"), PROGRAMS)
def test_output_or_failure_of_a_program(code: str, output: str) -> None:
    message = PythonCodeExecutorToolGroup(timeout=1).python(code)
    start, _, end = output.partition("*")
    assert message.startswith(start)
    assert message.endswith(end)
    if "*" not in output:
        assert message == output
