import json
from typing import Any

import pytest
from gym_kit.messages import message_text, user
from gym_kit.texts import linear_time, long_text

from skyrl_gym.envs.search.env import SearchEnv
from skyrl_gym.error import ToolFailure
from skyrl_gym.tools import search

ROW: dict[str, Any] = {"reward_spec": {"ground_truth": {"target": ["Mount Fuji", "Fuji"]}}, "max_turns": 3}
PROMPT = user("What is the highest mountain of Japan?")


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace the search engine by one that finds a document with an answer in it; return its requests."""
    requests: list[dict[str, Any]] = []

    def answer(**request: Any) -> tuple[dict[str, Any] | None, search.SearchProblem | None]:
        requests.append(request)
        if request["query"] == "down":
            return None, search.SearchProblem("the server answered with status 503 (after 10 attempts)")
        return {"result": [[{"document": {"contents": "<answer>Fuji</answer></information>"}, "score": 1.0}]]}, None

    monkeypatch.setattr(search, "call_search_api", answer)
    return requests


def new_env(env_config: Any = None, **row: Any) -> SearchEnv:
    env = SearchEnv(env_config=env_config, extras=ROW | row)
    env.init(PROMPT)
    return env


def test_search_and_answer(requests: list[dict[str, Any]]) -> None:
    env = new_env({"topk": 5})
    first = env.step("I need to look. <search> mountain </search>")
    assert (first["reward"], first["done"]) == (0.0, False)
    result = json.dumps({"result": "Doc 1: <answer>Fuji</answer></information>\n"})
    assert message_text(first) == f"\n<information>{result}</information>\n"
    assert first["metadata"] == {"tool_group": "SearchToolGroup", "tool_name": "search", "tool_input": [" mountain "]}
    assert [(request["query"], request["topk"]) for request in requests] == [(" mountain ", 5)]
    last = env.step("So: <answer>the Mount  Fuji!</answer>")
    assert (last["reward"], last["done"], last["observations"]) == (1.0, True, [])
    assert env.get_metrics() == {"steps": 2, "searches": 1}


def test_replies_without_an_answer_or_a_query(requests: list[dict[str, Any]]) -> None:
    assert message_text(new_env().step("hm </search><search>")) == "\n<information></information>\n"
    assert requests == []
    env = new_env()
    env.step("<search>a</search>")
    env.step("<search>b</search>")
    last = env.step("I cannot tell.")
    assert (last["reward"], last["done"]) == (0.0, True)


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("<search>x</search><answer>Fuji</answer>", 1.0),
        (long_text("<answer>") + "Fuji</answer>", 1.0),
        ("<answer>Fuji" + long_text("</answer>"), 1.0),
    ],
    ids=range(3),
)
def test_the_last_answer_counts(requests: list[dict[str, Any]], reply: str, reward: float) -> None:
    with linear_time():
        output = new_env().step(reply)
    assert (output["reward"], output["done"]) == (reward, True)
    assert requests == []


def test_search_failure_is_raised_unless_tell_failures_is_set(requests: list[dict[str, Any]]) -> None:
    with pytest.raises(ToolFailure, match="status 503"):
        new_env().step("<search>down</search>")
    message = message_text(new_env({"tell_failures": True}).step("<search>down</search>"))
    assert "Search error: the server answered with status 503" in message


@pytest.mark.parametrize(
    ("env_config", "row", "message"),
    [
        (None, {"reward_spec": {"ground_truth": {"target": [3]}}}, "must be .'target': a string"),
        ({"search_url": "x"}, ROW, "must start with http"),
        ({"topk": "3"}, ROW, r"environment\.skyrl_gym\.search\.topk='3' should be a valid integer"),
        ({"topk": 0}, ROW, "topk=0 of a search must be positive"),
        ({"timeout": float("nan")}, ROW, "timeout=nan of a search must be positive"),
    ],
)
def test_invalid_row_or_config_raises(env_config: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SearchEnv(env_config, row)
