"""Registered tools, and those of task files."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from agent_runs import play_one
from local_server import Request, chat_completion, serving
from scripted_engine import call

from skyrl_agent import judge
from skyrl_agent.tools import BaseTool, register_tool, tool_registry
from skyrl_agent.tools.base import create_tools, format_tools
from skyrl_gym.error import ToolFailure
from skyrl_gym.tools.calls import ToolCallError
from skyrl_gym.tools.core import ToolGroup, tool


class Counter(BaseTool):
    """A tool with parameters of every type, which keeps state."""

    name = "count"
    description = "Count."
    parameters = [  # noqa: RUF012
        {"name": "n", "type": "integer", "description": "How far.", "required": True},
        {"name": "labels", "type": "array", "description": "Labels."},
        {"name": "loud", "type": "boolean", "description": "Loud."},
        {"name": "unit", "type": "string", "enum": ["a", "b"], "description": "The unit."},
    ]
    total = 0

    def call(self, params: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.total += params["n"]
        return {"total": self.total, **params}


class Calculator(ToolGroup):
    """A group of skyrl-gym."""

    def __init__(self, offset: int = 0) -> None:
        super().__init__("calculator")
        self._offset = offset

    @tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b + self._offset)


def find(name: str, **settings: Any) -> BaseTool:
    return create_tools([{"name": name, **settings}])[name]


def test_arguments_are_converted_and_validated() -> None:
    counter = Counter()
    assert counter.check({"n": "3", "labels": '["x"]', "loud": "True", "unit": "a"}) == {
        "n": 3,
        "labels": ["x"],
        "loud": True,
        "unit": "a",
    }
    for arguments, message in (
        ({}, "'n' is a required property"),
        ({"n": "three"}, "'three' is not of type 'integer'"),
        ({"n": "1", "m": "2"}, "Additional properties are not allowed"),
        ({"n": "1", "unit": "c"}, "'c' is not one of"),
        ({"n": "1", "labels": "[" * 100_000}, "is not of type 'array'"),
    ):
        with pytest.raises(ToolCallError, match=message):
            counter.check(arguments)


def test_descriptions_name_types_optional_parameters_and_choices() -> None:
    text = format_tools([Counter()])
    assert "n (integer): How far.\n" in text
    assert "unit (string, optional): The unit. One of a, b." in text
    assert format_tools([]) == ""


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="tool 'finish' is already registered, as Finish"):
        register_tool("finish")(Counter)
    assert tool_registry["finish"].__name__ == "Finish"


async def test_each_trajectory_has_its_own_tool_and_groups_of_skyrl_gym_are_tools() -> None:
    replies = [
        call("count", n="2"),
        call("count", n="2"),
        call("add", a="1", b="2"),
        call("add", a="one", b="2"),
        call("finish", answer="Paris"),
    ]
    tools = (f"{__name__}.Counter", {"name": f"{__name__}.Calculator", "offset": 10}, "finish")
    for _ in range(2):
        trajectory, engine = await play_one(replies, tools=tools)
        text = engine.prompts()[-1]
        assert '{"total": 4, "n": 2}' in text
        assert "EXECUTION RESULT of [add]:\n13" in text
        assert "ERROR: The arguments of add are wrong: a: Input should be a valid integer" in text
        assert trajectory.total_reward == 1.0


class Broken(BaseTool):
    """A tool that raises, hangs or returns nothing, as its argument says."""

    name = "broken"
    description = "Break."
    parameters = {"type": "object", "properties": {"how": {"type": "string"}}, "required": ["how"]}  # noqa: RUF012

    def call(self, params: dict[str, Any], **kwargs: Any) -> Any:
        match params["how"]:
            case "raises":
                raise KeyError("missing")
            case "exits":
                raise SystemExit(1)
            case "service":
                raise ToolFailure("the service is down")
            case "long":
                return "x" * 200_000
            case "hangs":
                hang.wait(20)
        return None


async def test_errors_of_tools_are_explained_and_services_that_fail_make_the_trajectory_invalid() -> None:
    replies = [call("broken", how=how) for how in ("raises", "exits", "long", "nothing")]
    tools = (f"{__name__}.Broken", "finish")
    trajectory, engine = await play_one(
        [*replies, call("finish", answer="Paris")], tools=tools, max_response_length=10**6
    )
    raised, exited, long, nothing = engine.prompts()[1:]
    assert "ERROR: KeyError: 'missing'" in raised
    assert "ERROR: RuntimeError: SystemExit: 1" in exited
    assert "[150,000 characters are left out]" in long
    assert nothing.endswith("EXECUTION RESULT of [broken]:\nnull<|im_end|>\n<|im_start|>assistant\n")
    assert trajectory.total_reward == 1.0
    invalid, _ = await play_one([call("broken", how="service")], tools=tools)
    assert invalid.stop_reason == "error_runtime"
    assert "the service is down" in str(invalid.error)


async def test_a_tool_that_hangs_ends_the_trajectory() -> None:
    global hang
    hang = threading.Event()
    tools = (f"{__name__}.Broken", "finish")
    trajectory, _ = await play_one([call("broken", how="hangs")], tools=tools, tool_timeout=0.2)
    hang.set()
    assert (trajectory.stop_reason, trajectory.total_reward) == ("cmd_timeout", 0.0)
    assert not any(trajectory.loss_mask)


async def test_search_engines_and_the_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: Request) -> tuple[int, Any]:
        if request.path == "/serper":
            assert request.headers["x-api-key"] == "s"
            return 200, {"organic": [{"title": "France", "link": "http://x/fr", "snippet": "Its capital is Paris."}]}
        if request.path.startswith("/you"):
            assert request.headers["x-api-key"] == "y"
            assert request.path == "/you?query=capital+of+France"
            return 200, {"results": {"web": [{"title": "FR", "url": "http://y", "snippets": ["Paris", "a city"]}]}}
        if request.path == "/retrieve":
            return 200, {"result": [[{"document": {"contents": "Paris is in France."}, "score": 1.0}]]}
        if request.path == "/v1/chat/completions":
            assert "Goal: the capital" in request.body["messages"][0]["content"]
            return 200, chat_completion("It is Paris.")
        assert request.path == "/http://x/fr"
        assert request.headers["authorization"] == "Bearer j"
        return 200, "France is a country."

    with serving(answer) as (url, _):
        for name, value in {
            "SERPER_URL": f"{url}/serper",
            "GOOGLE_SEARCH_KEY": "s",
            "YOUCOM_URL": f"{url}/you",
            "YOUCOM_API_KEY": "y",
            "JINA_URL": url,
            "JINA_API_KEY": "j",
            "LOCAL_SEARCH_URL": f"{url}/retrieve",
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "o",
        }.items():
            monkeypatch.setenv(name, value)
        judge._client.cache_clear()

        def use(name: str, **params: str) -> str:
            return str(find(name).call(params, agent=None, trajectory_id=""))  # type: ignore[arg-type]

        assert use("search_engine", query="capital") == "[1] France\nhttp://x/fr\nIts capital is Paris."
        assert use("youcom_search_engine", query="capital of France") == "[1] FR\nhttp://y\nParis\na city"
        assert use("local_search", query="x") == use("faiss_search", query="x") == "Doc 1: Paris is in France.\n"
        assert use("web_browser", url="http://x/fr", goal="the capital") == "France is a country."
        monkeypatch.setenv("WEB_SUMMARY_MODEL", "m")
        assert use("web_browser", url="http://x/fr", goal="the capital") == "It is Paris."
        monkeypatch.delenv("GOOGLE_SEARCH_KEY")
        with pytest.raises(ToolFailure, match="Serper needs the environment variable GOOGLE_SEARCH_KEY"):
            use("search_engine", query="capital")
    judge._client.cache_clear()


def test_a_service_that_refuses_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda request: (403, {"message": "no credit"})) as (url, requests):
        monkeypatch.setenv("SERPER_URL", url)
        monkeypatch.setenv("GOOGLE_SEARCH_KEY", "s")
        with pytest.raises(ToolFailure, match=r"Serper answered with status 403: .*no credit"):
            find("search_engine").call({"query": "x"}, agent=None, trajectory_id="")  # type: ignore[arg-type]
        assert len(requests) == 1


def test_programs_run_here_or_in_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(code: str) -> str:
        return str(find("code_interpreter", timeout=5).call({"code": code}, agent=None, trajectory_id=""))  # type: ignore[arg-type]

    assert use("print(6 * 7)") == "42"
    assert use("pass") == "(the program printed nothing)"
    assert "ZeroDivisionError" in use("1 / 0")
    result = {"status": "Finished", "stdout": "", "stderr": "boom", "return_code": 1}
    with serving(lambda request: (200, {"status": "Failed", "run_result": result})) as (url, requests):
        monkeypatch.setenv("SANDBOX_FUSION_URL", url)
        assert use("x") == "boom"
        assert requests[0].body == {"code": "x", "language": "python", "run_timeout": 5.0}
    with serving(lambda request: (200, "not JSON")) as (url, _):
        monkeypatch.setenv("SANDBOX_FUSION_URL", url)
        with pytest.raises(ToolFailure, match=r"the sandbox at .* failed"):
            use("x")


async def test_python_runs_in_a_trajectory() -> None:
    replies = [call("code_interpreter", code="print('Par' + 'is')"), call("finish", answer="Paris")]
    _, engine = await play_one(replies)
    assert "EXECUTION RESULT of [code_interpreter]:\nParis" in engine.prompts()[1]
