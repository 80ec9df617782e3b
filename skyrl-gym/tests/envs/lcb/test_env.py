from __future__ import annotations

import json
from typing import Any

import pytest

from skyrl_gym.envs.lcb.env import LCBEnv

SUMS = [{"input": f"{n}\n{n + 1}\n", "output": f"{2 * n + 1}\n", "testtype": "stdin"} for n in range(3)]
CALLS = [
    {"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional", "metadata": {"func_name": "add"}},
    {"input": "[]\n1", "output": "[]", "testtype": "functional", "metadata": '{"func_name": "add"}'},
]
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
        ("if __name__ == '__main__':\n    " + RIGHT, None),
        ("import threading\ndef main(): " + RIGHT + "\nthreading.Thread(target=main).start()", None),
        (RIGHT + "\nexit()", None),
        ("print(1)", "wrong"),
        ("print(int(input()) + int(input())); 1 / 0", "error"),
        ("", "wrong"),
        ("def", "error"),
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
    ("code", "reward"),
    [
        ("def add(a, n): return [x + n for x in a]", 1.0),
        ("class Solution:\n    def add(self, a: List[int], n: int) -> List[int]: return [x + n for x in a]", 1.0),
        ("from __future__ import annotations\ndef add(a, n): return tuple(x + n for x in a)", 1.0),
        ("def add(a, n): return a", 0.0),
        ("def add(a): return a", 0.0),
        ("def add(a, n): return object()", 0.0),
        ("add = 3", 0.0),
        ("x = 1", 0.0),
        ("def add(a, n): print('[4, 5]')", 0.0),
    ],
)
def test_functional_programs(code: str, reward: float) -> None:
    assert play(fenced(code), CALLS)[0] == reward


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
    [
        ("print(pow(3, 60), pow(5, 117, 19))", f"{3**60} {pow(5, 117, 19)}"),
        ("x = [[1]]; y = deepcopy(x); y[0][0] = 2; print(x, copy.copy(x))", "[[1]] [[1]]"),
        ("print(gcd(12, 18), math.gcd(12, 18), isqrt(17), inf > 1, ceil(1.2))", "6 6 4 True 2"),
        ("print(Counter('aab').most_common(1), heapq.nsmallest(1, [3, 1]), re.sub('a', 'b', 'a'))", "[('a', 2)] [1] b"),
        (
            "print(datetime.datetime(2020, 1, 2).day, ascii_lowercase[:3], string.digits, mean([1, 3]))",
            "2 abc 0123456789 2",
        ),
        ("def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(20000))", "20000"),
        ("print(4); exit('done')", "4"),
        ("print('7' * (1 << 20) + '8')", "7" * (1 << 20) + "8"),
        ("print('y\\n' * (1 << 20))", "y\n" * (1 << 20)),
    ],
    ids=lambda value: value[:30],
)
def test_right_programs(code: str, expected: str) -> None:
    assert play(fenced(code), [{"input": "", "output": expected, "testtype": "stdin"}])[:2] == (1.0, None)


def test_failing_program_is_wrong_whatever_it_printed() -> None:
    tests = [{"input": "", "output": "4", "testtype": "stdin"}]
    assert play(fenced("print(4); raise ValueError('sys.exit')"), tests)[:2] == (0.0, "error")
    assert play(fenced("print(5); sys.exit(0)"), tests)[:2] == (0.0, "wrong")


def test_long_results_of_functions() -> None:
    test = {"input": "300000", "output": json.dumps([9] * 300_000), "testtype": "functional"}
    tests = [test | {"metadata": {"func_name": "nines"}}]
    assert play(fenced("def nines(n): return [9] * n"), tests)[0] == 1.0
    assert play(fenced("def nines(n): return [9] * 9 * n"), tests)[:2] == (0.0, "output")


def test_metrics() -> None:
    half = "n = int(input())\nprint(n + int(input()) if n < 2 else 0)"
    assert play(fenced(half))[2] == {"passed_tests": 2 / 3, "has_code": True, "met_limit": False}
    assert play("no program")[2] == {"passed_tests": 0.0, "has_code": False, "met_limit": False}
    assert play(fenced("while True: pass"), timeout=0.2)[2]["met_limit"]


def test_total_time_is_limited() -> None:
    slow = f"import time\nwhile time.process_time() < 0.1: pass\n{RIGHT}"
    assert play(fenced(slow), total_timeout=0.15)[:2] == (0.0, "time")
    assert play(fenced(slow), total_timeout=60)[:2] == (1.0, None)
