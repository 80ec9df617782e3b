import pytest

from skyrl_gym.tools import PythonCodeExecutorToolGroup


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(6 * 7)", "42"),
        ("", ""),
        ("import sys; print('out'); print('a warning', file=sys.stderr)", "out"),
        ("raise SystemExit(3)", "Error executing Python code: it ended with status 3"),
        ("while True: pass", "Error executing Python code: Execution timed out after 1 seconds."),
        ("x = bytearray(1 << 40)", "Error executing Python code: *MemoryError"),
        (
            "while True: print('x' * 100)",
            "Error executing Python code: it printed more than 20000 bytes, starting with: xxx*",
        ),
        ("1 / 0", "Error executing Python code: Traceback*ZeroDivisionError: division by zero"),
    ],
)
def test_output_or_failure_of_a_program(code: str, output: str) -> None:
    message = PythonCodeExecutorToolGroup(timeout=1).python(code)
    start, _, end = output.partition("*")
    assert message.startswith(start)
    assert message.endswith(end)
    if "*" not in output:
        assert message == output
