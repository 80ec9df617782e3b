from typing import Any

import pytest
from gym_kit.messages import message_text
from gym_kit.texts import long_text

from skyrl_gym.envs.searchcode.env import SearchCodeEnv
from skyrl_gym.error import ToolFailure
from skyrl_gym.tools import search

ROW: dict[str, Any] = {"reward_spec": {"ground_truth": "42"}, "max_turns": 3}


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the search engine by one that returns the answer in the right format, or is down."""

    def answer(**request: Any) -> tuple[dict[str, Any] | None, search.SearchProblem | None]:
        if request["query"] == "down":
            return None, search.SearchProblem("down")
        return {"result": [[{"contents": "#### 42"}]]}, None

    monkeypatch.setattr(search, "call_search_api", answer)


def new_env(**env_config: Any) -> SearchCodeEnv:
    return SearchCodeEnv(env_config=env_config, extras=ROW)


def test_tools_and_a_solution() -> None:
    with new_env() as env:
        first = env.step("<tool><python>\nprint(6 * 7)\n</python></tool>")
        assert message_text(first) == "42"
        assert first["metadata"] == {
            "tool_group": "PythonCodeExecutorToolGroup",
            "tool_name": "python",
            "tool_input": ["print(6 * 7)"],
            "tools": [["search"], ["python"]],
        }
        second = env.step("<tool><search>answer</search></tool>")
        assert message_text(second) == '{"result": "Doc 1: #### 42\\n"}'
        assert second["metadata"]["tool_group"] == "SearchToolGroup"
        last = env.step("<solution>#### 42</solution>")
        assert (last["reward"], last["done"], last["observations"]) == (1.0, True, [])
        assert env.get_metrics() == {"steps": 3}
    env = new_env()
    env.step("<tool><python>print('#' * 4, 42)</python></tool>")
    env.step("<tool><search>answer</search></tool>")
    assert env.step("no idea")["reward"] == 0.0


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("", "Call a tool with <tool>"),
        ("<tool>python</tool>", "Write the tool's name as a tag"),
        ("<tool><python>print(1)</tool>", "Write the tool's name as a tag"),
        ("<tool><shell>ls</shell></tool>", "There is no tool shell. Tools: python, search."),
        ("<tool><close>x</close></tool>", "There is no tool close."),
        ("<tool><execute_tool>x</execute_tool></tool>", "There is no tool execute_tool."),
        (long_text("<tool>"), "Call a tool with <tool>"),
    ],
)
def test_wrong_call_is_explained(reply: str, message: str) -> None:
    output = new_env().step(reply)
    assert message_text(output).startswith(message)
    assert (output["reward"], output["done"]) == (0.0, False)


def test_failures_of_tools() -> None:
    with pytest.raises(ToolFailure):
        new_env().step("<tool><search>down</search></tool>")
    message = message_text(new_env(tell_failures=True).step("<tool><search>down</search></tool>"))
    assert "Search error: down" in message
    message = message_text(new_env(python_timeout=0.5).step("<tool><python>while True: pass</python></tool>"))
    assert message.endswith("Execution timed out after 0.5 seconds.")
