import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import urllib3
from gym_kit.corpora import LINES
from gym_kit.processes import free_port
from gym_kit.servers import run_server

from skyrl_gym.tools import SearchToolGroup
from skyrl_gym.tools.search import MAX_QUERY_CHARS, call_search_api


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file, port = tmp_path_factory.mktemp("corpus") / "corpus.jsonl", free_port()
    file.write_text(LINES, encoding="utf-8")
    command = [sys.executable, "-m", "skyrl_gym.retrieval", "--corpus", str(file), "--port", str(port)]
    with run_server(command, port):
        health = urllib3.request("GET", f"http://127.0.0.1:{port}/health", retries=False, timeout=60)
        assert health.json() == {"status": "ok", "n_documents": 3}
        yield f"http://127.0.0.1:{port}/retrieve"


def ask(url: str, **body: Any) -> Any:
    return urllib3.request("POST", url, json=body, retries=False, timeout=60)


def test_documents_of_one_and_several_queries(url: str) -> None:
    (hits,) = ask(url, query="highest mountain", topk=2, return_scores=True).json()["result"]
    assert hits[0]["document"] == {"id": "fuji", "contents": "Mount Fuji is the highest mountain of Japan."}
    assert hits[0]["score"] > 0
    assert len(hits) == 1  # the others contain none of the words
    rivers, volcanoes = ask(url, queries=["river", "volcano"]).json()["result"]
    assert rivers == [{"id": "3", "contents": "The Nile is a river in Africa."}]
    assert volcanoes == [{"id": "etna", "contents": "Etna\nA volcano in Sicily, the tallest in Italy."}]


@pytest.mark.parametrize("query", ["", "zzz", "the of", "\0", "é" * 10_000])
def test_query_without_hits(url: str, query: str) -> None:
    assert ask(url, query=query).json() == {"result": [[]]}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"query": 3},
        {"query": "x", "topk": 0},
        {"query": "x", "topk": 10**6},
        {"query": "x" * (MAX_QUERY_CHARS + 1)},
        {"queries": ["x" * (MAX_QUERY_CHARS + 1)]},
        {"queries": ["x"] * 257},
    ],
)
def test_invalid_request_is_refused(url: str, body: dict[str, Any]) -> None:
    assert ask(url, **body).status == 422


def test_large_body_is_refused(url: str) -> None:
    assert ask(url, query="x" * (9 << 20)).status == 413
    assert ask(url, query="highest mountain").status == 200


def test_search_tool(url: str) -> None:
    group = SearchToolGroup(url, raise_failures=True)
    assert json.loads(group.search("mountain or river")) == {
        "result": "Doc 1: The Nile is a river in Africa.\nDoc 2: Mount Fuji is the highest mountain of Japan.\n"
    }
    assert json.loads(group.search("zzz")) == {"result": "No search results found."}
    assert "Mount Fuji" in group.search("mountain " * 100_000)  # long queries of a model are cut
    assert group.search(None) == ""
    answer, problem = call_search_api(url, "x", topk=0)
    assert answer is None
    assert "status 422" in str(problem)
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(group.search, ["volcano"] * 40))) == 1
