"""Search engines and the browser, with local servers in place of the services."""

from typing import Any

import pytest
from agent_kit.services import serving_openai
from gym_kit.http_server import Request, chat_completion

from skyrl_agent.tools.base import create_tools
from skyrl_gym.error import ToolFailure
from skyrl_gym.tools.calls import ToolCallError

SERVICES = {
    "SERPER_URL": "{url}/serper",
    "GOOGLE_SEARCH_KEY": "s",
    "YOUCOM_URL": "{url}/you",
    "YOUCOM_API_KEY": "y",
    "JINA_URL": "{url}",
    "JINA_API_KEY": "j",
    "LOCAL_SEARCH_URL": "{url}/retrieve",
}


def use(name: str, **params: str) -> str:
    return str(create_tools([name])[name].call(params, agent=None, trajectory_id=""))  # type: ignore[arg-type]


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


def test_search_engines_and_the_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_openai(answer, **SERVICES):
        assert use("search_engine", query="capital") == "[1] France\nhttp://x/fr\nIts capital is Paris."
        assert use("youcom_search_engine", query="capital of France") == "[1] FR\nhttp://y\nParis\na city"
        assert use("local_search", query="x") == use("faiss_search", query="x") == "Doc 1: Paris is in France.\n"
        assert use("web_browser", url="http://x/fr", goal="the capital") == "France is a country."
        monkeypatch.setenv("WEB_SUMMARY_MODEL", "m")
        assert use("web_browser", url="http://x/fr", goal="the capital") == "It is Paris."
    monkeypatch.delenv("GOOGLE_SEARCH_KEY", raising=False)
    with pytest.raises(ToolFailure, match="Serper needs the environment variable GOOGLE_SEARCH_KEY"):
        use("search_engine", query="capital")


REMOTE = ["search_engine", "youcom_search_engine"]


def test_the_model_reads_that_the_local_server_refuses_its_query() -> None:
    for status in (400, 422):
        with serving_openai(lambda request, status=status: (status, {}), **SERVICES):
            assert f"the server rejected the query with status {status}" in call("local_search")


def call(name: str) -> str:
    return use(name, url="http://nowhere.invalid", goal="x") if name == "web_browser" else use(name, query="")


@pytest.mark.parametrize(
    ("status", "names", "error"),
    [
        *((status, [*REMOTE, "web_browser"], ToolCallError) for status in (400, 422)),
        *((status, ["web_browser"], ToolCallError) for status in (404, 451)),
        *((status, [*REMOTE, "local_search", "web_browser"], ToolFailure) for status in (401, 402, 403, 407, 501)),
        *((status, [*REMOTE, "local_search"], ToolFailure) for status in (404, 405, 410)),
    ],
)
def test_refusals_are_the_models_mistake_and_failures_are_not(
    status: int, names: list[str], error: type[Exception]
) -> None:
    with serving_openai(lambda request: (status, {"message": "no such domain"}), **SERVICES):
        for name in names:
            message = (
                f"answered with status {status}: .*no such domain" if error is ToolCallError else f"status {status}"
            )
            with pytest.raises(error, match=message):
                call(name)


@pytest.mark.parametrize("status", [429, 503, 413])
@pytest.mark.parametrize("pause", ["3600", "Fri, 01 Jan 2100 00:00:00 GMT"])
def test_a_long_pause_is_a_failure_at_once(status: int, pause: str) -> None:
    """A call that waited would end with its time limit, which is the model's."""
    headers = {"Retry-After": pause}
    with (
        serving_openai(lambda request: (status, {}), headers=headers, **SERVICES) as (_, requests),
        pytest.raises(ToolFailure, match=r"Retry-After \d+ s, more than 30 s"),
    ):
        call("web_browser")
    assert len(requests) == 1


def test_a_short_pause_is_waited_for() -> None:
    answers = iter([(429, ""), (503, ""), (200, "France")])
    with serving_openai(lambda request: next(answers), headers={"Retry-After": "0"}, **SERVICES):
        assert call("web_browser") == "France"
