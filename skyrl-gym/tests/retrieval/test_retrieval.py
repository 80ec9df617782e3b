"""A retrieval server over HTTP, and the tool that searches with it."""

from __future__ import annotations

import gzip
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import urllib3

from skyrl_gym.error import ToolFailure
from skyrl_gym.retrieval.corpus import read_corpus
from skyrl_gym.retrieval.index import VectorIndex, WordIndex
from skyrl_gym.tools import SearchToolGroup
from skyrl_gym.tools import search as search_module
from skyrl_gym.tools.search import MAX_QUERY_CHARS, call_search_api

LINES = [
    {"id": "fuji", "contents": "Mount Fuji is the highest mountain of Japan."},
    {"id": "etna", "title": "Etna", "text": "A volcano in Sicily, the tallest in Italy."},
    {"contents": "The Nile is a river in Africa."},
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in LINES) + "\n\n", encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def server(corpus: Path) -> Iterator[str]:
    """Return the address of a server started with its command line."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "skyrl_gym.retrieval", "--corpus", str(corpus), "--port", str(port)]
    with subprocess.Popen(command) as process:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                health = urllib3.request("GET", f"{url}/health", retries=False, timeout=5)
                assert health.json() == {"status": "ok", "n_documents": 3}
                break
            except urllib3.exceptions.HTTPError:
                time.sleep(0.1)
        yield f"{url}/retrieve"
        process.terminate()


def ask(url: str, **body: Any) -> Any:
    return urllib3.request("POST", url, json=body, retries=False, timeout=60)


class TestServer:
    def test_documents_with_scores(self, server: str) -> None:
        (hits,) = ask(server, query="highest mountain", topk=2, return_scores=True).json()["result"]
        assert hits[0]["document"] == {"id": "fuji", "contents": "Mount Fuji is the highest mountain of Japan."}
        assert hits[0]["score"] > 0
        assert len(hits) == 1  # the others contain none of the words

    def test_bare_documents_and_several_queries(self, server: str) -> None:
        rivers, volcanoes = ask(server, queries=["river", "volcano"]).json()["result"]
        assert rivers == [{"id": "3", "contents": "The Nile is a river in Africa."}]
        assert volcanoes == [{"id": "etna", "contents": "Etna\nA volcano in Sicily, the tallest in Italy."}]

    @pytest.mark.parametrize("query", ["", "zzz", "the of", "\0", "é" * 10_000])
    def test_query_without_hits(self, server: str, query: str) -> None:
        assert ask(server, query=query).json() == {"result": [[]]}

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
    def test_invalid_request_is_refused(self, server: str, body: dict[str, Any]) -> None:
        assert ask(server, **body).status == 422

    def test_large_body_is_refused(self, server: str) -> None:
        assert ask(server, query="x" * (9 << 20)).status == 413
        assert ask(server, query="highest mountain").status == 200

    def test_long_query_of_a_model_is_cut(self, server: str) -> None:
        text = SearchToolGroup(server, raise_failures=True).search("mountain " * 100_000)
        assert "Mount Fuji" in text


class TestCorpus:
    def test_compressed_corpus(self, corpus: Path, tmp_path: Path) -> None:
        file = tmp_path / "corpus.jsonl.gz"
        file.write_bytes(gzip.compress(corpus.read_bytes()))
        assert read_corpus(file) == read_corpus(corpus)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "has no documents"),
            ('{"contents": "a"}\n{', "line 2 of the corpus .* is not JSON"),
            ("[1]", "line 1 of the corpus .* is not an object"),
            ('{"title": "a"}', "line 1 of the corpus .* has no text; its keys are title"),
        ],
    )
    def test_invalid_corpus_raises(self, tmp_path: Path, text: str, message: str) -> None:
        file = tmp_path / "corpus.jsonl"
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            read_corpus(file)

    def test_missing_corpus_is_reported(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "skyrl_gym.retrieval", "--corpus", str(tmp_path / "nothing.jsonl")]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 1
        assert "nothing.jsonl" in result.stderr
        assert "Traceback" not in result.stderr


class LetterEncoder:
    """Encodes a text by its letter counts."""

    def encode(self, sentences: list[str], *, normalize_embeddings: bool, **_: Any) -> np.ndarray:
        vectors = np.array([[text.lower().count(chr(97 + i)) for i in range(26)] for text in sentences], dtype=float)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if normalize_embeddings else vectors


def test_vector_index_finds_the_closest_document(corpus: Path) -> None:
    documents = read_corpus(corpus)
    index = VectorIndex(documents, LetterEncoder(), query_prefix="", document_prefix="")
    (hits,) = index.search([documents[1]["contents"].upper()], 2)
    assert hits[0].document == documents[1]
    assert hits[0].score == pytest.approx(1.0)
    assert hits[0].score > hits[1].score


def test_word_index_sorts_by_score(corpus: Path) -> None:
    documents = read_corpus(corpus)
    (hits,) = WordIndex(documents).search(["tallest volcano in Italy, not a river"], 10)
    assert [hit.document["id"] for hit in hits] == ["etna", "3"]


class TestTool:
    def test_search_result_for_the_model(self, server: str) -> None:
        assert json.loads(SearchToolGroup(server).search("mountain or river")) == {
            "result": "Doc 1: The Nile is a river in Africa.\nDoc 2: Mount Fuji is the highest mountain of Japan.\n"
        }
        assert json.loads(SearchToolGroup(server).search("zzz")) == {"result": "No search results found."}
        assert SearchToolGroup(server).search(None) == ""

    def test_concurrent_searches(self, server: str) -> None:
        group = SearchToolGroup(server, log_requests=False)
        with ThreadPoolExecutor(16) as pool:
            answers = set(pool.map(group.search, ["volcano"] * 200))
        assert len(answers) == 1

    def test_refused_request_is_not_retried(self, server: str) -> None:
        answer, problem = call_search_api(server, "x", topk=0)
        assert answer is None
        assert problem is not None
        assert "status 422" in problem


class FlakyServer:
    """Sends the given answers one after the other, and repeats the last one forever."""

    def __init__(self, answers: list[bytes]) -> None:
        self._answers = answers
        self.n_requests = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/retrieve"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                answer = self._answers[min(self.n_requests, len(self._answers) - 1)]
                self.n_requests += 1
                connection.sendall(answer)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


def reply(status: str, body: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


class TestFailures:
    @pytest.fixture(autouse=True)
    def no_waiting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(search_module, "DELAY_SECONDS", 0.001)

    @pytest.mark.parametrize("failure", [reply("503 Busy", ""), reply("500 Oops", ""), b"", b"HTTP/1.1 2"])
    def test_failed_request_is_retried(self, failure: bytes) -> None:
        server = FlakyServer([failure, failure, reply("200 OK", '{"result": [[{"contents": "found"}]]}')])
        assert json.loads(SearchToolGroup(server.url).search("x")) == {"result": "Doc 1: found\n"}
        assert server.n_requests == 3
        server.close()

    def test_retries_are_limited(self) -> None:
        server = FlakyServer([reply("502 Bad", "")])
        answer, problem = call_search_api(server.url, "x")
        assert (answer, problem) == (None, "the server answered with status 502 (after 10 attempts)")
        assert server.n_requests == 10
        server.close()

    @pytest.mark.parametrize("body", ["<html>", "[]", '"x"'])
    def test_malformed_answer_is_not_retried(self, body: str) -> None:
        server = FlakyServer([reply("200 OK", body)])
        _, problem = call_search_api(server.url, "x")
        assert problem is not None
        assert "the server's answer is not" in problem
        assert server.n_requests == 1
        server.close()

    def test_unreachable_server(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            url = f"http://127.0.0.1:{taken.getsockname()[1]}/retrieve"
        message = json.loads(SearchToolGroup(url).search("x"))["result"]
        assert message.startswith("Search error: ")
        assert message.endswith("(after 10 attempts)")
        with pytest.raises(ToolFailure, match=f"search at {url}: .*after 10 attempts"):
            SearchToolGroup(url, raise_failures=True).search("x")

    def test_hanging_server_times_out(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}/retrieve"
            _, problem = call_search_api(url, "x", timeout=0.05)
        assert problem is not None
        assert problem.startswith("ReadTimeoutError")

    @pytest.mark.parametrize("url", ["http://", "ftp://x/y"])
    def test_invalid_address_is_not_retried(self, url: str) -> None:
        _, problem = call_search_api(url, "x")
        assert problem is not None
        assert "after" not in problem

    def test_search_url_is_validated(self) -> None:
        with pytest.raises(ValueError, match="search_url='nonsense' must start with http"):
            SearchToolGroup("nonsense")
