import pytest

from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.tools import Prefixed, ToolGroup, tool


class Counter(ToolGroup):
    """Two tools that share a number, and a method that is not a tool."""

    def __init__(self) -> None:
        super().__init__(name="Counter")
        self.count = 0
        self.n_closed = 0

    @tool
    def add(self, n: int = 1) -> int:
        """Count on."""
        self.count += n
        return self.count

    @tool
    def reset(self) -> int:
        """Start anew."""
        self.count = 0
        return 0

    def helper(self) -> None:
        """Not for models."""

    def close(self) -> None:
        self.n_closed += 1


class LateName(ToolGroup):
    """Sets its own attributes after the constructor of the base class."""

    def __init__(self) -> None:
        super().__init__("LateName")
        self.reset = "an attribute is not a tool"

    @tool
    def add(self) -> str:
        return "late"


def test_tools_are_found_and_run() -> None:
    group = Counter()
    assert (group.get_name(), group.get_tool_names()) == ("Counter", ["add", "reset"])
    assert group.execute_tool("add", 2) == 2
    assert group.execute_tool("add", n=3) == 5
    assert group.count == 5
    assert group.add() == 6
    assert group.get_tool("helper") is None
    assert (Counter.add.name, Counter.add.__doc__) == ("add", "Count on.")
    with pytest.raises(ValueError, match=r"Tool 'helper' not found in ToolGroup 'Counter'; its tools: add, reset"):
        group.execute_tool("helper")


def test_environment_executes_tools_by_group_name() -> None:
    env, counter = BaseTextEnv(), Counter()
    assert (env.tool_groups, env.tool_to_toolgroup) == ([], {})
    env.init_tool_groups([counter, LateName()])
    assert env.tool_to_toolgroup == {"add": "LateName", "reset": "Counter"}
    assert env._execute_tool("Counter", "add", [4]) == 4
    assert env._execute_tool("LateName", "add", ()) == "late"
    with pytest.raises(ValueError, match="ToolGroup 'Nobody' not found"):
        env._execute_tool("Nobody", "add", [])
    env.close()
    assert counter.n_closed == 1


def test_prefix_renames_tools() -> None:
    counter = Counter()
    group = Prefixed(counter, "my")
    assert (group.get_name(), group.get_tool_names()) == ("my", ["my_add", "my_reset"])
    assert group.get_tool_to_group_mapping() == {"my_add": "my", "my_reset": "my"}
    assert group.execute_tool("my_add", 2) == 2
    assert group.call("my_add", {"n": 3}) == "5"
    assert group.get_tool("add") is None
    assert [schema["function"]["name"] for schema in group.get_schemas()] == ["my_add", "my_reset"]
    assert group.get_schemas()[0]["function"]["parameters"] == counter.get_schemas()[0]["function"]["parameters"]
    assert counter.get_schemas()[0]["function"]["name"] == "add"
    group.close()
    assert counter.n_closed == 1


@pytest.mark.parametrize("prefix", ["", "my tools", "<function", "me\n"])
def test_prefix_must_be_a_word(prefix: str) -> None:
    with pytest.raises(ValueError, match="of 'Counter' must consist of letters, digits, _ and -"):
        Prefixed(Counter(), prefix)
