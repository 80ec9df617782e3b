from __future__ import annotations

from skyrl_gym.envs.sql.grading import verify_format_and_extract

THOUGHT = "<think>Now I know.</think>"


def test_conversation_with_one_solution_is_valid() -> None:
    is_valid, thoughts, solution, _ = verify_format_and_extract(f"{THOUGHT}<solution> SELECT 1 </solution>")
    assert (is_valid, thoughts, solution) == (True, ["Now I know."], "SELECT 1")


def test_second_opening_tag_is_invalid() -> None:
    assert not verify_format_and_extract(f"{THOUGHT}<solution>SELECT 1<solution>SELECT 2</solution>")[0]
    assert not verify_format_and_extract(f"{THOUGHT}<solution>SELECT 1</solution><solution>")[0]
