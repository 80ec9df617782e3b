import json
from typing import Any

import pytest

from skyrl_gym.envs.lcb.env import LCBEnv

SUMS = [{"input": f"{n}\n{n + 1}\n", "output": f"{2 * n + 1}\n", "testtype": "stdin"} for n in range(3)]
RIGHT = "print(int(input()) + int(input()))"


def play(reply: str, tests: Any = SUMS, **settings: Any) -> tuple[float | None, str | None, dict[str, Any]]:
    """Return reward, failure and metrics."""
    with LCBEnv(env_config=settings, extras={"reward_spec": {"ground_truth": json.dumps(tests)}}) as env:
        output = env.step(reply)
        assert output["done"]
        assert output["observations"] == []
        return output["reward"], output["metadata"]["failure"], env.get_metrics()


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        (RIGHT, None),
        ("print(1)", "wrong"),
        ("print(int(input()) + int(input())); 1 / 0", "error"),
        ("while True: pass", "time"),
        ("import time; time.sleep(60)", "time"),
        ("x = bytearray(1 << 33)", "error"),
        ("while True: print(1)", "output"),
        ("import os; os._exit(0)", "wrong"),
    ],
)
def test_stdin_programs(code: str, failure: str | None) -> None:
    timeout = {"time": 0.3}.get(str(failure), 5.0)
    assert play(fenced(code), timeout=timeout)[:2] == (float(failure is None), failure)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout": 0}, "timeout=0 must be a positive number"),
        ({"timeout": float("inf")}, "timeout=inf must be a positive number"),
        ({"total_timeout": float("nan")}, "total_timeout=nan must be a positive number"),
        ({"timeout": "6"}, "timeout='6' should be a valid number"),
        ({"memory_mb": -1}, "memory_mb=-1 must be a positive number"),
        ({"isolation": "vm"}, "isolation='vm' should be 'best', 'namespaces' or 'limits'"),
    ],
)
def test_settings_are_validated_in_the_constructor(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"environment\.skyrl_gym\.lcb\.{message}"):
        play("", **settings)


@pytest.mark.parametrize(
    ("code", "expected"),
    [("print('7' * (1 << 20) + '8')", "7" * (1 << 20) + "8"), ("print('y\\n' * (1 << 20))", "y\n" * (1 << 20))],
    ids=["line", "lines"],
)
def test_long_output(code: str, expected: str) -> None:
    assert play(fenced(code), [{"input": "", "output": expected, "testtype": "stdin"}])[:2] == (1.0, None)


def test_long_results_of_functions() -> None:
    test = {"input": "300000", "output": json.dumps([9] * 300_000), "testtype": "functional"}
    tests = [test | {"metadata": {"func_name": "nines"}}]
    assert play(fenced("def nines(n): return [9] * n"), tests)[0] == 1.0
    assert play(fenced("def nines(n): return [9] * 9 * n"), tests)[:2] == (0.0, "output")


def test_metrics() -> None:
    half = "n = int(input())\nprint(n + int(input()) if n < 2 else 0)"
    wrong = {"passed_tests": 2 / 3, "has_code": True, "met_limit": False, "failure": "wrong output"}
    assert play(fenced(half))[2] == wrong
    missing = play("no program")[2]
    assert (missing["passed_tests"], missing["has_code"], missing["met_limit"]) == (0.0, False, False)
    assert play(fenced("while True: pass"), timeout=0.2)[2]["met_limit"]


def test_total_time_is_limited() -> None:
    slow = f"import time\nwhile time.process_time() < 0.1: pass\n{RIGHT}"
    assert play(fenced(slow), total_timeout=0.15)[:2] == (0.0, "time")
    assert play(fenced(slow), total_timeout=60)[:2] == (1.0, None)
