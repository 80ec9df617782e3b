from skyrl_gym.envs.sql.grading import has_order, verify_format_and_extract

EXPLORE = "<think>Let me see.</think><sql>SELECT count(*) AS n FROM goods</sql>"
THOUGHT = "<think>Now I know.</think>"


def test_conversation_with_one_solution_is_valid() -> None:
    solution = f"{THOUGHT}\n<solution> SELECT 1 </solution>"
    text = f"{EXPLORE}<observation>4</observation>\n{solution}"
    assert verify_format_and_extract(text) == (True, ["Let me see.", "Now I know."], "SELECT 1", None)
    assert verify_format_and_extract(solution) == (True, ["Now I know."], "SELECT 1", None)
    assert verify_format_and_extract("") == (False, None, None, None)


def test_brackets_are_no_order() -> None:
    assert not has_order("(" * 100_000)
