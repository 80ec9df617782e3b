import json
import re
import socket

import pytest
from gym_kit.processes import free_port
from gym_kit.servers import run_scripted_server

from skyrl_gym.error import ToolFailure
from skyrl_gym.tools import SearchToolGroup
from skyrl_gym.tools import search as search_module
from skyrl_gym.tools.search import call_search_api


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "DELAY_SECONDS", 0.001)


def reply(status: str, body: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


@pytest.mark.parametrize(
    "failure", [reply("503 Busy", ""), reply("429 Slow", ""), reply("500 Oops", ""), b"", b"HTTP/1.1 2"]
)
def test_failed_request_is_retried(failure: bytes) -> None:
    found = reply("200 OK", '{"result": [[{"contents": "found"}]]}')
    with run_scripted_server(failure, failure, found) as server:
        assert json.loads(SearchToolGroup(f"{server.url}/retrieve").search("x")) == {"result": "Doc 1: found\n"}
        assert server.n_requests == 3


@pytest.mark.parametrize(
    ("answer", "problem", "n_requests"),
    [
        (reply("502 Bad", ""), "the server answered with status 502 (after 10 attempts)", 10),
        (reply("404 Gone", ""), "the server answered with status 404", 1),
        *((reply("200 OK", body), "the server's answer is not", 1) for body in ("<html>", "[]", '"x"')),
    ],
)
def test_retries_are_limited_and_malformed_answers_are_not_retried(
    answer: bytes, problem: str, n_requests: int
) -> None:
    with run_scripted_server(answer) as server:
        result, found_problem = call_search_api(f"{server.url}/retrieve", "x")
        assert result is None
        assert problem in str(found_problem)
        assert server.n_requests == n_requests
        with pytest.raises(ToolFailure, match=re.escape(problem)):
            SearchToolGroup(f"{server.url}/retrieve", raise_failures=True).search("x")


@pytest.mark.parametrize("status", search_module.QUERY_STATUSES)
def test_model_reads_that_its_query_is_refused(status: int) -> None:
    with run_scripted_server(reply(f"{status} No", "")) as server:
        group = SearchToolGroup(f"{server.url}/retrieve", raise_failures=True)
        assert f"the server rejected the query with status {status}" in group.search("x")
        assert server.n_requests == 1


def test_unreachable_and_hanging_servers() -> None:
    url = f"http://127.0.0.1:{free_port()}/retrieve"
    message = json.loads(SearchToolGroup(url).search("x"))["result"]
    assert message.startswith("Search error: ")
    assert message.endswith("(after 10 attempts)")
    with pytest.raises(ToolFailure, match=f"search at {url}: .*after 10 attempts"):
        SearchToolGroup(url, raise_failures=True).search("x")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/retrieve"
        _, problem = call_search_api(url, "x", timeout=0.05)
    assert str(problem).startswith("ReadTimeoutError")


@pytest.mark.parametrize("url", ["http://", "ftp://x/y"])
def test_invalid_address_is_not_retried(url: str) -> None:
    _, problem = call_search_api(url, "x")
    assert problem
    assert "after" not in str(problem)
