from pathlib import Path

import pytest

from skyrl_gym.adapters.reward_function import RewardFunctionEnv
from skyrl_gym.error import InvalidAnswer

FILE = """
calls = []
def length(data_source, solution_str, ground_truth, extra_info):
    calls.append((data_source, ground_truth, extra_info))
    return len(solution_str)
def scored(**row):
    return {"score": 0.5, "format": 1, "pred": "text"}
def broken(**row):
    raise RuntimeError("no")
def nothing(**row):
    return None
async def late(**row):
    return 1.0
number = 3
"""
ROW = {"data_source": "d", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": '{"k": 1}'}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "reward-manager.py"
    path.write_text(FILE)
    return str(path)


def make(path: str, name: str) -> RewardFunctionEnv:
    return RewardFunctionEnv({"path": path, "name": name}, ROW)


def test_the_function_gets_the_row_and_returns_a_score_or_a_dict(file: str) -> None:
    env = make(file, "length")
    assert env.step("four") == {"observations": [], "reward": 4.0, "done": True, "metadata": {}}
    assert env._function.__globals__["calls"] == [("d", "4", {"k": 1})]
    env = make(file, "scored")
    assert env.step("")["reward"] == 0.5
    assert env.get_metrics() == {"score": 0.5, "format": 1.0}


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize(
    ("name", "error"), [("broken", RuntimeError), ("nothing", InvalidAnswer), ("late", InvalidAnswer)]
)
def test_no_score_is_an_error(file: str, name: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        make(file, name).step("x")


def test_missing_files_and_functions_are_named(file: str) -> None:
    with pytest.raises(ValueError, match=r"has no attribute 'lenght'.* Did you mean 'length'"):
        make(file, "lenght")
    with pytest.raises(ValueError, match="is not a file"):
        make(file + ".txt", "length")
    with pytest.raises(ValueError, match="must be a function"):
        make(file, "number")
    with pytest.raises(ValueError, match=r"custom_reward_function\.path"):
        make("", "length")
